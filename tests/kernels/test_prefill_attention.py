"""The paged prefill kernel against a plain softmax: compiled on a GPU, interpreted elsewhere.

Every page that no row owns and every slot behind a row's end holds NaN, so a single stray key or value makes
the answer NaN. The interpreter cannot multiply bfloat16; float16 stands in for it.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

pytest.importorskip("triton")

from helios.kernels.common import available
from helios.kernels.prefill_attention import (
    DEFAULT_CONFIGS,
    MAX_ROWS,
    PrefillConfig,
    default_config,
    new_counters,
    num_tiles,
    paged_prefill,
    paged_prefill_reference,
)

PAGE = 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = PrefillConfig(block_m=32, block_n=64, num_warps=4, num_stages=2)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="kernels were imported without the interpreter")


class Case:
    """Shuffled pages, NaN outside the rows. ``rows`` are (keys, new tokens); ``padding`` adds rows without
    tokens and tokens without a row, as a captured graph has them."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        padding: int = 0,
        before: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(heads + sum(length for length, _ in rows))
        counts = [(length + PAGE - 1) // PAGE for length, _ in rows]
        order = (torch.randperm(sum(counts) + 1, generator=generator) + 1).tolist()
        pages = torch.full((2, len(order) + 1, PAGE, kv_heads, head_dim), torch.nan, dtype=torch.float16)
        stray = order.pop()
        table = torch.full((len(rows) + padding, max(counts) + 1), stray, dtype=torch.int32)
        for row, (length, _) in enumerate(rows):
            for index in range(counts[row]):
                page = order.pop()
                used = min(PAGE, length - index * PAGE)
                table[row, index] = page
                pages[:, page, :used] = torch.randn((2, used, kv_heads, head_dim), generator=generator).half()
        self.tokens = slice(before, before + sum(count for _, count in rows))
        q = torch.randn((self.tokens.stop + 9 * padding, heads, head_dim), generator=generator).half()
        q[:before] = q[self.tokens.stop :] = torch.nan
        lengths = [length for length, _ in rows] + [1] * padding
        offsets = [before]
        for _, count in [*rows, *[(1, 0)] * padding]:
            offsets.append(offsets[-1] + count)
        self.arguments = (
            q.to(DEVICE),
            pages[0].to(DEVICE),
            pages[1].to(DEVICE),
            table.to(DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            torch.tensor(offsets, dtype=torch.int32, device=DEVICE),
        )

    def check(
        self, config: PrefillConfig = SMALL, counters: torch.Tensor | None = None, at_once: int = 0
    ) -> torch.Tensor:
        out = paged_prefill(*self.arguments, config=config, counters=counters, at_once=at_once)
        got = out[self.tokens]
        expected = paged_prefill_reference(*self.arguments)[self.tokens]
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
        return got


def test_reference_is_a_causal_softmax() -> None:
    """The reference itself, against torch on one row whose page is in order."""
    case = Case([(70, 70)])
    q, k, v = case.arguments[:3]
    page = int(case.arguments[3][0, 0])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        k[page, :70].float().transpose(0, 1)[None],
        v[page, :70].float().transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    got = paged_prefill_reference(*case.arguments)
    torch.testing.assert_close(got, expected[0].transpose(0, 1).half(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 64), (4, 2, 128), (6, 2, 16), (8, 1, 32)],
)
@pytest.mark.parametrize("pack", [True, False])
def test_groups_of_heads(heads: int, kv_heads: int, head_dim: int, pack: bool) -> None:
    """A wrong head of a packed tile or a wrong kv head; a group of three cannot be packed."""
    case = Case([(270, 20), (9, 9)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case.check(replace(SMALL, pack=pack))


@pytest.mark.parametrize("count", [1, 16, 65])
@pytest.mark.parametrize("cached", [0, 63, 64, 191, 255])
@pytest.mark.parametrize("one_loop", [False, True])
def test_chunks_around_tiles_blocks_and_pages(cached: int, count: int, one_loop: bool) -> None:
    """The border between whole and masked blocks, the last block and the page change, off by one."""
    Case([(cached + count, count)], heads=2, kv_heads=1).check(replace(SMALL, one_loop=one_loop))


def test_ragged_rows() -> None:
    """Rows of any length side by side, the longest neither first nor last; one-token rows among them."""
    Case([(17, 17), (1, 1), (600, 70), (257, 1), (64, 64)]).check()


def test_rows_of_equal_length_do_not_hide_each_other() -> None:
    """Tiles are ordered by length: equal ones must still be all computed."""
    Case([(40, 40), (40, 3), (40, 40), (40, 20)]).check()


def test_padding_rows_and_tokens_of_a_graph() -> None:
    """A graph for many rows runs few: rows without tokens and tokens of no row change nothing."""
    Case([(70, 70), (300, 5)], padding=14).check()
    paged_prefill(*Case([(1, 0)]).arguments)


@pytest.mark.parametrize("at_once", [0, 64])
def test_tokens_before_the_first_row(at_once: int) -> None:
    """In a mixed tick decoding rows' tokens come first: a row's tokens are found by cu_q, not by counting."""
    case = Case([(70, 70), (900, 37)], before=45, padding=3)
    case.check(counters=new_counters(DEVICE), at_once=at_once)


def test_more_rows_than_one_launch_takes() -> None:
    """A tick of many short prompts."""
    Case([(5 + row, 3 + row % 3) for row in range(MAX_ROWS + 1)]).check(
        PrefillConfig(block_m=16, block_n=16, num_warps=4)
    )


@pytest.mark.parametrize("options", [{}, {"tma": True}, {"one_loop": True}], ids=str)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (128, 32), (64, 256)])
def test_any_tile(block_m: int, block_n: int, options: dict[str, bool]) -> None:
    """Tiles wider than blocks have several blocks on the diagonal, and the other way round."""
    Case([(300, 150)]).check(PrefillConfig(block_m, block_n, 4, 2, **options))


@pytest.mark.parametrize("tokens", [most for most, _ in DEFAULT_CONFIGS])
def test_default_configurations(tokens: int) -> None:
    """Each line of the table must be a configuration the kernel can run."""
    Case([(200, 100)], head_dim=128).check(default_config(tokens))


@pytest.mark.parametrize("at_once", [7, 40])
@pytest.mark.parametrize("options", [{}, {"one_loop": True}], ids=str)
def test_keys_cut_into_parts(at_once: int, options: dict[str, bool]) -> None:
    """Parts that hold only whole blocks, only the diagonal, or keys that none of some queries sees; fewer and more
    programs than parts; a short row beside, which is not cut."""
    case = Case([(1100, 9), (40, 5)], padding=1)
    case.check(replace(SMALL, **options), at_once=at_once)
    Case([(1037, 30)], heads=2, kv_heads=1).check(replace(SMALL, block_m=64, **options), at_once=at_once)


@pytest.mark.parametrize("at_once", [1, 5, 13])
@pytest.mark.parametrize(
    ("rows", "before", "padding"),
    [
        pytest.param([(1300, 48)], 0, 0, id="six tiles of one row"),
        pytest.param([(17, 17), (1, 1), (1700, 50), (520, 3)], 0, 0, id="rows of different lengths"),
        pytest.param([(1100, 30), (600, 20)], 21, 2, id="padding before and behind"),
        pytest.param([(150, 150)], 0, 0, id="from the first token"),
        pytest.param([(1, 0)], 5, 1, id="no tokens"),
    ],
)
def test_tail_cut_into_parts(rows: list[tuple[int, int]], before: int, padding: int, at_once: int) -> None:
    """Full rounds alone, a tail of one tile and of nearly a round, fewer parts than programs for want of keys:
    each tile once, its parts merged in order, so that a second call repeats the bits, and the counters at zero."""
    case, counters = Case(rows, before=before, padding=padding), new_counters(DEVICE)
    config = replace(SMALL, tail=True)
    first, second = (case.check(config, counters, at_once) for _ in range(2))
    assert torch.equal(first, second)
    assert not counters.any()


@pytest.mark.parametrize("options", [{"tma": True}, {"one_loop": True}, {"pack": False}], ids=str)
def test_tail_of_other_configurations(options: dict[str, bool]) -> None:
    """Parts of other loops, and of tiles of 64 whose halves are merged one after the other."""
    config = replace(SMALL, block_m=64, tail=True, **options)
    Case([(1300, 70), (40, 5)]).check(config, at_once=5)


def test_tail_in_several_launches() -> None:
    """The rows behind the first launch's have a tail of their own, with the same slots and counters."""
    case = Case([(5 + row, 3 + row % 3) for row in range(MAX_ROWS)] + [(900, 20), (1100, 3)])
    case.check(replace(SMALL, tail=True), new_counters(DEVICE), at_once=5)


def test_counters_are_clean_after_every_call() -> None:
    """One that is not put back to zero would merge too early, or never, in the next layer."""
    counters = new_counters(DEVICE)
    for rows in ([(700, 5), (1100, 2)], [(30, 30)]):
        Case(rows).check(counters=counters, at_once=32)
        assert not counters.any()


def test_large_scores_stay_finite() -> None:
    """Scores of hundreds: without the running maximum their exponentials overflow."""
    case = Case([(200, 100)])
    case.arguments[0].mul_(60)
    case.check()


@pytest.mark.parametrize("counts", [[1], [16], [17], [5, 16, 1, 0, 33], [1] * 9, [15] * 4])
def test_grid_holds_every_tile(counts: list[int]) -> None:
    """Too small a bound would leave queries without an answer; padding must not make it large."""
    needed = sum(-(-count // 16) for count in counts)
    bound = num_tiles(sum(counts), len(counts), 16)
    assert needed <= bound <= needed + len(counts)
    assert num_tiles(512, 16, 32) <= 512 // 32 + 16


def test_what_the_kernel_cannot_do_is_refused() -> None:
    case = Case([(10, 10)])
    q, *rest = case.arguments
    with pytest.raises(ValueError, match="does not divide"):
        paged_prefill(q, *rest, config=replace(SMALL, block_n=512))
    with pytest.raises(ValueError, match="loop of their own"):
        paged_prefill(q, *rest, config=replace(SMALL, tma=True, one_loop=True))
    with pytest.raises(ValueError, match="kv heads"):
        paged_prefill(q[:, :3], *rest, config=SMALL)
    with pytest.raises(ValueError, match="power of two"):
        paged_prefill(q[..., :24], *rest, config=SMALL)
