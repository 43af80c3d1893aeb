"""The two ends of a captured decode step against their plain forms."""

from __future__ import annotations

import pytest
import torch

from helios.kernels.step import begin_step, begin_step_reference, end_step, end_step_reference
from helios.runtime.sampler import POSITION

PAGE = 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some_rows(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct batch rows in any order, every third one padding (-1)."""
    ids = torch.randperm(2 * rows, generator=generator)[:rows].int()
    ids[torch.arange(rows) % 3 == 2] = -1
    return ids


def begin_state(rows: int) -> list[torch.Tensor]:
    """row_ids, positions, page_table, last_tokens, then the four outputs full of nonsense."""
    generator = torch.Generator().manual_seed(rows)
    ids = some_rows(rows, generator)
    positions = torch.randint(0, 4 * PAGE, (rows,), generator=generator).int()
    positions[0] = PAGE - 1
    table = torch.randint(1, 500, (rows, 5), generator=generator).int()
    tokens = torch.randint(0, 150_000, (2 * rows,), generator=generator)
    outputs = [torch.full((rows,), -7, dtype=torch.int64), *(torch.full((rows,), -7).int() for _ in range(3))]
    return [tensor.to(DEVICE) for tensor in (ids, positions, table, tokens, *outputs)]


@pytest.mark.parametrize("rows", [1, 3, 17, 64])
def test_begin_step_equals_its_plain_form(rows: int) -> None:
    """Would catch a wrong slot at a page border, padding that writes into a page, or padding that moves on;
    two steps, so also positions that do not advance."""
    got, expected = begin_state(rows), begin_state(rows)
    for _ in range(2):
        begin_step(*got, PAGE)
        begin_step_reference(*expected, PAGE)
        for name, a, b in zip(
            ("ids", "positions", "table", "last", "in", "at", "slot", "kv"), got, expected, strict=True
        ):
            assert torch.equal(a, b), name
    padding = got[0] < 0
    assert (got[6][padding] == 0).all()
    assert (got[7][padding] == 1).all()
    assert got[1][0] == PAGE + 1


@pytest.mark.parametrize("rows", [1, 3, 17, 64])
def test_end_step_equals_its_plain_form(rows: int) -> None:
    """Would catch a token kept for the wrong batch row, a padding row that overwrites one, or random numbers
    that repeat because the position stands still."""
    generator = torch.Generator().manual_seed(rows)
    ids = some_rows(rows, generator).to(DEVICE)
    tokens = torch.randint(0, 150_000, (rows,), generator=generator).to(DEVICE)
    finite = (torch.arange(rows) % 4 != 1).to(DEVICE)
    wide = torch.randint(0, 1000, (7, rows + 5), generator=generator).int()  # a slice of a larger buffer
    results = []
    for step in (end_step, end_step_reference):
        buffer = wide.clone().to(DEVICE)
        last = torch.full((2 * rows,), -7, dtype=torch.int64, device=DEVICE)
        out = torch.full((2, rows + 5), -7, dtype=torch.int32, device=DEVICE)
        step(ids, tokens, finite, buffer[:, :rows], last, out[:, :rows])
        results.append((buffer, last, out))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    buffer, last, out = results[0]
    assert torch.equal(buffer[POSITION, :rows].cpu(), wide[POSITION, :rows] + 1)
    assert (out[:, rows:] == -7).all()
    assert (last >= 0).sum() == (ids >= 0).sum()
