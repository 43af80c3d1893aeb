"""Small models run on one thread: a second one only waits for the first."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
