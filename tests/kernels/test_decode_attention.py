"""The paged decode kernel against its torch reference: compiled on a GPU, interpreted elsewhere.

Every page that no sequence owns and every slot behind a sequence's end holds NaN, so a single stray key or
value makes the answer NaN. The interpreter cannot multiply bfloat16; float16 stands in for it.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

pytest.importorskip("triton")

from helios.kernels.common import available
from helios.kernels.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    num_columns,
    paged_decode,
    paged_decode_reference,
)

PAGE = 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="kernels were imported without the interpreter")


class Case:
    """Shuffled pages, NaN outside the sequences, one query token a row."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        counts = [(length + PAGE - 1) // PAGE for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        shape = (2, len(order), PAGE, kv_heads, head_dim)
        pages = torch.full(shape, torch.nan, dtype=torch.float16)
        stray = order.pop()
        table = torch.full((len(lengths), max(counts) + 1), stray, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for index in range(counts[row]):
                page = order.pop()
                used = min(PAGE, length - index * PAGE)
                table[row, index] = page
                pages[:, page, :used] = torch.randn((2, used, kv_heads, head_dim), generator=generator).half()
        # As in the model: the queries are a slice of the packed projection, not contiguous over rows.
        packed = torch.randn((len(lengths), heads + 2 * kv_heads, head_dim), generator=generator).half()
        self.q = packed.to(DEVICE)[:, :heads]
        self.k_pages, self.v_pages = pages.to(DEVICE)
        self.table = table.to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def run(
        self,
        columns: int,
        config: DecodeConfig | None = None,
        workspace: DecodeWorkspace | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        max_kv = self.table.shape[1] * PAGE
        return paged_decode(
            self.q,
            self.k_pages,
            self.v_pages,
            self.table,
            self.lengths,
            max_kv,
            config=config,
            columns=columns,
            workspace=workspace,
            out=out,
        )

    def reference(self) -> torch.Tensor:
        return paged_decode_reference(self.q, self.k_pages, self.v_pages, self.table, self.lengths)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 64), (4, 2, 128), (8, 2, 64), (4, 1, 128), (14, 2, 64), (16, 1, 128)],
)
def test_every_group_size_is_packed_into_one_tile(heads: int, kv_heads: int, head_dim: int) -> None:
    """A wrong head offset or a padded query row that reaches the output shows here."""
    case = Case(heads, kv_heads, head_dim, [257, 40])
    check(case.run(columns=3), case.reference())


@pytest.mark.parametrize("length", [1, 63, 64, 255, 256, 257, 700])
def test_lengths_around_tiles_and_pages(length: int) -> None:
    """The last tile is partly masked, the page changes inside the loop, one key alone is a softmax of 1."""
    case = Case(4, 2, 64, [length])
    check(case.run(columns=2), case.reference())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("columns", range(1, 9))
def test_any_cut_gives_the_same_answer(columns: int, fused: bool) -> None:
    """Rows inside one column, across two and across many; columns without work when there are too many."""
    case = Case(4, 1, 64, [200, 1, 260, 64])
    check(case.run(columns, DecodeConfig(fused=fused)), case.reference())


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_tiles_that_divide_a_page(tile: int) -> None:
    case = Case(4, 2, 64, [700, 130])
    check(case.run(4, DecodeConfig(tile=tile, num_stages=2)), case.reference())


def test_more_columns_than_tiles_leave_programs_idle() -> None:
    """A graph captured for a long context runs a short one: most programs must do nothing, and no harm."""
    case = Case(4, 2, 64, [70])
    check(case.run(columns=40), case.reference())


def test_many_parts_are_merged_in_several_rounds() -> None:
    """More partial results than the merge takes at a time."""
    case = Case(2, 1, 64, [32 * 19])
    check(case.run(19, DecodeConfig(tile=32)), case.reference())


def test_rows_of_length_zero_are_zeros_between_others() -> None:
    case = Case(4, 2, 64, [0, 300, 0, 5, 0])
    out = case.run(columns=3)
    check(out, case.reference())
    assert not out[0].any()
    assert not out[4].any()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lengths", [[300, 5, 700], [90], []])
def test_empty_rows_at_the_end_leave_a_given_output_alone(lengths: list[int], fused: bool) -> None:
    """The places of padding rows are other rows' in a mixed tick: would catch zeros, or NaN, written there."""
    case = Case(4, 2, 64, [*lengths, 0, 0])
    out = torch.full(case.q.shape, 7.0, dtype=case.q.dtype, device=DEVICE)
    assert case.run(columns=3, config=DecodeConfig(fused=fused), out=out) is out
    check(out[: len(lengths)], case.reference()[: len(lengths)])
    assert (out[len(lengths) :] == 7.0).all()


def test_an_output_of_another_shape_is_refused() -> None:
    case = Case(4, 2, 64, [300, 5])
    for wrong in (torch.empty(3, 4, 64), torch.empty(2, 4, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="q's shape and dtype"):
            case.run(columns=3, out=wrong.to(DEVICE))


def test_padding_rows_on_the_dummy_page_do_not_disturb() -> None:
    """Padding rows read one key of a shared page; the rows before them stay right."""
    case = Case(4, 2, 64, [300, 1, 1, 1])
    case.table[2:] = case.table[1]
    check(case.run(columns=3), case.reference())


def test_more_rows_than_a_warp() -> None:
    """The line of tiles is summed over all rows."""
    case = Case(2, 1, 64, [1 + 7 * index % 60 for index in range(33)])
    check(case.run(columns=5), case.reference())


def test_workspace_is_clean_after_every_call() -> None:
    """A counter that is not put back to zero would merge too early, or never, in the next layer."""
    workspace = DecodeWorkspace(DEVICE, max_rows=4, columns=6, kv_heads=2, group=2, head_dim=64)
    for lengths in ([300, 1, 520], [64, 65, 700, 3], [1000]):
        case = Case(4, 2, 64, lengths)
        check(case.run(6, workspace=workspace), case.reference())
        assert not workspace.counters.any()


def test_columns_fill_the_card_but_not_more_than_there_are_tiles() -> None:
    config = DecodeConfig(tile=64, programs_per_sm=3)
    assert num_columns(256, 40960, 8, 132, config) == 49
    assert num_columns(1, 1024, 8, 132, config) == 16
    assert num_columns(1, 1, 8, 132, config) == 1
    assert num_columns(4, 1024, 8, 2, config) == 1


def test_what_the_kernel_cannot_do_is_refused() -> None:
    case = Case(4, 2, 64, [10])
    with pytest.raises(ValueError, match="does not divide"):
        case.run(1, DecodeConfig(tile=512))
    case.q = torch.zeros((1, 5, 64), device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match="query heads"):
        case.run(1)
