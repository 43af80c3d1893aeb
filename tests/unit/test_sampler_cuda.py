"""Sampling on a GPU: the CPU's tokens, and everything inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from helios.runtime.logit_edits import LogitEdits
from helios.runtime.philox import row_seed
from helios.runtime.request import Job, SamplingParams, Sequence
from helios.runtime.sampler import SamplingTensors, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROWS, VOCABULARY = 32, 5000


def make_sequences() -> list[Sequence]:
    sequences: list[Sequence] = []
    for row in range(ROWS):
        params = SamplingParams(
            temperature=0.4 * (row % 4),
            top_k=(0, 30)[row % 2],
            top_p=(1.0, 0.9)[row % 3 == 0],
            min_p=(0.0, 0.05)[row % 5 == 0],
            frequency_penalty=(0.0, 0.5)[row % 4 == 1],
            logit_bias=((7, 3.0),) if row % 4 == 2 else (),
            min_tokens=(0, 3)[row % 4 == 3],
        )
        sequence = Job("job", [1, 2, 3], params, max_tokens=9).sequences[0]
        sequence.sample_seed = row_seed(row, 0)
        sequences.append(sequence)
    return sequences


def run(device: torch.device, ticks: int, *, graph: bool) -> list[list[int]]:
    """Sample ``ticks`` tokens of every row from the same logits, edits and state on ``device``."""
    logits = (torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3).to(device)
    sequences = make_sequences()
    edits = LogitEdits(ROWS, VOCABULARY, device, [5])
    for row, sequence in enumerate(sequences):
        edits.admit(row, sequence)
    rows = torch.arange(ROWS, device=device)
    params = SamplingTensors.build(sequences, device, [3] * ROWS)
    plan = edits.plan(range(ROWS))
    tokens = torch.zeros(ROWS, dtype=torch.long, device=device)

    def tick() -> None:
        tokens.copy_(sample(edits.apply(logits, plan), params, VOCABULARY - 10).token_ids)
        edits.append(rows, tokens)
        params.advance()

    if not graph:
        history = []
        for _ in range(ticks):
            tick()
            history.append(tokens.tolist())
        return history
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tick()  # a graph is captured after its kernels have run once
    torch.cuda.synchronize()
    history = [tokens.tolist()]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        tick()
    for _ in range(ticks - 1):
        captured.replay()
        history.append(tokens.tolist())
    return history


def test_a_gpu_draws_the_tokens_of_the_cpu() -> None:
    """The same key and position give the same noise everywhere; only the last bit of a logarithm may
    differ."""
    on_cpu = run(torch.device("cpu"), 4, graph=False)
    on_gpu = run(torch.device("cuda"), 4, graph=False)
    assert on_gpu == on_cpu


def test_sampling_and_edits_run_inside_a_cuda_graph() -> None:
    """A branch on the device's values would fail the capture; a stale buffer would repeat a token."""
    assert run(torch.device("cuda"), 5, graph=True) == run(torch.device("cuda"), 5, graph=False)
