"""Copies to the device that nobody waits for."""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy ``host`` to ``device``, in the order of its stream.

    On CUDA through pinned memory: a copy from other memory waits for all that has been launched, which with
    lookahead is the whole next tick.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
