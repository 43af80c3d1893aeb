"""Every kernel for prompts on a GPU, in a CUDA graph and outside, against a plain softmax in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helios.kernels.measure import relative_error
from helios.kernels.prefill_attention import (
    DEFAULT_CONFIGS,
    PrefillConfig,
    new_counters,
    paged_prefill,
    paged_prefill_reference,
)
from helios.kernels.prefill_kernel import prefill_kernel
from helios.runtime.prefill_backend import (
    FA2,
    Candidate,
    PrefillAttention,
    choose_prefill,
    fa3_candidate,
    fa3_installed,
    hopper_candidate,
    triton_candidate,
)

pytestmark = pytest.mark.gpu
PAGE = 256
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CONFIGS = [replace(config, tail=tail) for _, config in DEFAULT_CONFIGS for tail in (False, True)]


def backends() -> list[object]:
    """All kernels; what this machine lacks is skipped with the reason."""
    found: list[object] = [pytest.param(FA2, id="fa2")]
    for config in CONFIGS:
        marks = [pytest.mark.skipif(config.tma and not SM90, reason="tensor descriptors need SM90")]
        found.append(pytest.param(triton_candidate(config), id=str(config), marks=marks))
    needs_sm90 = [pytest.mark.skipif(not SM90, reason="written for SM90")]
    found.append(pytest.param(hopper_candidate(), id="sm90", marks=needs_sm90))
    if fa3_installed() and SM90:
        found.append(pytest.param(fa3_candidate(), id="fa3"))
    else:
        reason = pytest.mark.skip(reason="FlashAttention-3 needs its package and SM90")
        found.append(pytest.param(FA2, id="fa3", marks=[reason]))
    return found


class Buffers:
    """Fixed tensors, as a CUDA graph needs: pages full of NaN of which rows own some, in shuffled order."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int = 2048, rows: int = 16
    ) -> None:
        self.tokens, self.most_pages = tokens, 64
        self.q = torch.zeros((self.tokens, heads, head_dim), device="cuda", dtype=dtype)
        self.pages = torch.zeros((2, 120, PAGE, kv_heads, head_dim), device="cuda", dtype=dtype)
        self.table = torch.zeros((rows, self.most_pages), device="cuda", dtype=torch.int32)
        self.lengths = torch.ones(rows, device="cuda", dtype=torch.int32)
        self.cu_q = torch.zeros(rows + 1, device="cuda", dtype=torch.int32)
        self.used = 0

    def fill(self, rows: list[tuple[int, int]], *, tail: float, seed: int = 0) -> None:
        """New rows of (keys, new tokens); the rest is padding. ``tail`` stands behind a row in its last page."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.q.normal_(generator=generator)
        self.pages.fill_(torch.nan)
        self.pages[:, 0] = 0
        order = (torch.randperm(119, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        table = torch.full(self.table.shape, order.pop(), dtype=torch.int32)
        table[len(rows) :] = 0
        offsets = [0]
        for row, (length, count) in enumerate(rows):
            offsets.append(offsets[-1] + count)
            for index in range(-(-length // PAGE)):
                page = order.pop()
                table[row, index] = page
                self.pages[:, page] = tail
                used = min(PAGE, length - index * PAGE)
                self.pages[:, page, :used].normal_(generator=generator)
        self.used = offsets[-1]
        padding = self.table.shape[0] - len(rows)
        self.table.copy_(table)
        self.lengths.copy_(torch.tensor([length for length, _ in rows] + [1] * padding))
        self.cu_q.copy_(torch.tensor(offsets + offsets[-1:] * padding))

    def run(self, attend: PrefillAttention) -> torch.Tensor:
        keys, values = self.pages
        most = self.most_pages * PAGE
        return attend(self.q, keys, values, self.table, self.lengths, self.cu_q, self.tokens, most)

    def error(self, out: torch.Tensor) -> float:
        expected = paged_prefill_reference(
            self.q, self.pages[0], self.pages[1], self.table, self.lengths, self.cu_q
        )
        return relative_error(out[: self.used], expected[: self.used])


TICKS = [
    [(512, 512)],
    [(7000, 1024)],
    [(700, 44), (256, 256), (3, 3), (2000, 1024), (1, 1), (5000, 1)],
    [(20 + row, 20 + row) for row in range(16)],
    [(2048, 2048)],
    # Tails of few tiles behind full rounds, and of short rows behind long ones, on cards of 264 programs at once.
    [(7000, 640)],
    [(6000, 1270)],
    [(6000, 1270), (500, 500), (3, 3)],
]
# Ticks of a graph for 64 tokens, whose keys are cut into parts.
SHORT_TICKS = [
    [(8000, 64)],
    [(5000, 20), (30, 30), (600, 9)],
    [(400 + 16 * row, 1 + row % 5) for row in range(16)],
    [(64, 64)],
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (8, 8, 128), (14, 2, 64)]
)
@pytest.mark.parametrize("candidate", backends())
def test_every_kernel_equals_the_reference(
    gpu: torch.device, candidate: Candidate, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Would catch a wrong mask or page, rows mixed up, and a read of anything outside the rows. Only the
    Triton kernel promises to bear NaN behind a row in the row's own last page."""
    if candidate.name == "triton sm90" and head_dim != 128:
        with pytest.raises(ValueError, match="is not 128"):
            Buffers(heads, kv_heads, head_dim, dtype).run(candidate.run)
        return
    tail = torch.nan if candidate.name.startswith("triton") else 0.0
    for tokens, ticks in ((2048, TICKS), (64, SHORT_TICKS)):
        buffers = Buffers(heads, kv_heads, head_dim, dtype, tokens)
        for seed, rows in enumerate(ticks):
            buffers.fill(rows, tail=tail, seed=seed)
            assert buffers.error(buffers.run(candidate.run)) < 5e-3, rows


@pytest.mark.parametrize(("tokens", "ticks"), [(2048, TICKS), (64, SHORT_TICKS)], ids=["long", "short"])
@pytest.mark.parametrize("candidate", backends())
def test_one_graph_serves_any_rows(
    gpu: torch.device, candidate: Candidate, tokens: int, ticks: list[list[tuple[int, int]]]
) -> None:
    """Captured on padding alone, as at start: nothing of the rows may be baked into the launch."""
    buffers = Buffers(32, 8, 128, torch.bfloat16, tokens)
    buffers.fill([], tail=0.0)
    buffers.run(candidate.run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffers.run(candidate.run)
    for seed, rows in enumerate([*ticks, *ticks]):
        buffers.fill(rows, tail=0.0, seed=seed)
        out.fill_(torch.nan)
        graph.replay()
        assert buffers.error(out) < 5e-3, rows


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tails_repeat_and_leave_their_counters_at_zero(gpu: torch.device, config: PrefillConfig) -> None:
    """Parts arrive in any order: a merge in that order, or before all have arrived, would change the bits."""
    if config.tma and not SM90:
        pytest.skip("tensor descriptors need SM90")
    buffers, counters = Buffers(32, 8, 128, torch.bfloat16), new_counters(gpu)
    for rows in ([(7000, 640)], [(6000, 1270), (500, 500), (3, 3)], [(8000, 64)]):
        buffers.fill(rows, tail=torch.nan)
        outs = [
            buffers.run(lambda *arguments: paged_prefill(*arguments[:6], config=config, counters=counters))
            for _ in range(20)
        ]
        assert buffers.error(outs[0]) < 5e-3
        assert all(torch.equal(out[: buffers.used], outs[0][: buffers.used]) for out in outs)
        assert not counters.any()


@pytest.mark.skipif(not SM90, reason="written for SM90")
def test_parts_of_the_kernel_for_sm90_repeat_too(gpu: torch.device) -> None:
    """Likewise, with two counters for each tile; few programs at once cut the keys of every call."""
    from helios.kernels.prefill_hopper import paged_prefill_hopper

    buffers, counters = Buffers(32, 8, 128, torch.bfloat16), new_counters(gpu)
    for at_once in (None, 7, 40):
        for rows in ([(7000, 640)], [(6000, 1270), (500, 500), (3, 3)], [(8000, 64)], [(1, 1)]):
            buffers.fill(rows, tail=torch.nan)
            outs = [
                buffers.run(
                    lambda *arguments, at_once=at_once: paged_prefill_hopper(
                        *arguments[:6], counters=counters, at_once=at_once
                    )
                )
                for _ in range(10)
            ]
            assert buffers.error(outs[0]) < 5e-3, (at_once, rows)
            assert all(torch.equal(out[: buffers.used], outs[0][: buffers.used]) for out in outs)
            assert not counters.any()


@pytest.mark.parametrize("config", [config for config in CONFIGS if not config.tma], ids=str)
def test_unpacked_heads_and_the_accelerator_change_nothing(gpu: torch.device, config: PrefillConfig) -> None:
    buffers = Buffers(32, 8, 128, torch.bfloat16)
    buffers.fill(TICKS[2], tail=torch.nan)
    options = [replace(config, pack=False)] + ([replace(config, tma=True, one_loop=False)] if SM90 else [])
    for option in options:
        got = buffers.run(triton_candidate(option).run)
        assert buffers.error(got) < 5e-3, str(option)


def test_slices_of_packed_buffers_need_no_new_kernel(gpu: torch.device) -> None:
    """Rows behind any number of decode rows: an address that is not a multiple of 16 must not compile again."""
    buffers = Buffers(32, 8, 128, torch.bfloat16)
    buffers.fill([(300, 100), (64, 64), (40, 7)], tail=torch.nan)
    whole = buffers.run(lambda *arguments: paged_prefill(*arguments[:6]))
    compiled = compiled_forms()
    for skipped in (1, 2):
        part = paged_prefill(
            buffers.q,
            buffers.pages[0],
            buffers.pages[1],
            buffers.table[skipped:],
            buffers.lengths[skipped:],
            buffers.cu_q[skipped:],
        )
        first = int(buffers.cu_q[skipped])
        torch.testing.assert_close(part[first : buffers.used], whole[first : buffers.used])
    assert compiled_forms() == compiled


def compiled_forms() -> int:
    kernel: Any = prefill_kernel
    return len(kernel.device_caches[torch.cuda.current_device()][0])


def test_choice_at_start_is_quick_and_names_a_kernel_for_each_length(gpu: torch.device) -> None:
    """The whole choice, compilation included, belongs to a start of seconds."""
    backend = choose_prefill("auto", gpu, torch.bfloat16, heads=32, kv_heads=8, head_dim=128)
    assert all(choice.name for choice in backend.choices)
    print(backend)


def test_decode_attention_is_untouched_by_the_choice(gpu: torch.device) -> None:
    """FlashAttention-3 must not be switched on for the calls of the whole process."""
    from torch.nn.attention import current_flash_attention_impl

    choose_prefill("auto", gpu, torch.bfloat16, heads=32, kv_heads=8, head_dim=128)
    assert current_flash_attention_impl() is None
