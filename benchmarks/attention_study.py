"""Decode rows beside a prompt: two attention calls, as served, or one call for all rows.

One call is simpler, but its rows of one query take the prompt's tiles: the keys of a decode row are walked
unsplit and once for each query head. The calls are timed alone, one layer, in CUDA graphs where there is a GPU.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from helios.config import PAGE_SIZE
from helios.kernels.common import multiprocessors
from helios.kernels.decode_attention import DecodeWorkspace, default_config, num_columns, paged_decode
from helios.kernels.measure import time_in_graph
from helios.runtime.batch import AttentionPlan
from helios.runtime.build import Built
from helios.runtime.page_pool import pages_for
from helios.runtime.qwen3.attention import attend, prefill_attention

_CASES = ((8, 640, 512), (64, 640, 512), (64, 640, 2048), (192, 800, 2048))  # decode rows, context, prompt


def _plan(decode: int, lengths: list[int], counts: list[int], table: torch.Tensor) -> AttentionPlan:
    """Rows of ``counts`` queries over ``lengths`` keys, the first ``decode`` of them as decode rows."""
    device = table.device
    offsets = torch.tensor([0, *counts[decode:]], device=device).cumsum(0).int()
    kv = torch.tensor(lengths, dtype=torch.int32, device=device)
    most = max(counts[decode:], default=0)
    return AttentionPlan(decode, table, kv, offsets, most, table.shape[1] * PAGE_SIZE)


def _seconds(step: Any, device: torch.device) -> float:
    """One call's time."""
    if device.type == "cuda":
        return time_in_graph(step, device, replays=10)
    step()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@torch.inference_mode()
def _case(built: Built, rows: int, context: int, prompt: int) -> dict[str, Any]:
    config, device = built.snapshot.config, built.runner.device
    pages = pages_for(max(context, prompt))
    total = (rows + 1) * pages + 1
    shape = (total, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    dtype = built.runner.cache.data.dtype
    k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    table = (torch.randperm(total - 1, device=device) + 1).int().view(rows + 1, pages)
    q = torch.randn(rows + prompt, config.num_heads, config.head_dim, device=device, dtype=dtype)
    lengths, counts = [context] * rows + [prompt], [1] * rows + [prompt]
    split, one = _plan(rows, lengths, counts, table), _plan(0, lengths, counts, table)
    found: dict[str, Any] = {"decode_rows": rows, "context": context, "prompt": prompt}
    found["two_calls_microseconds"] = 1e6 * _seconds(lambda: attend(q, k, v, split), device)
    found["one_call_microseconds"] = 1e6 * _seconds(lambda: attend(q, k, v, one), device)
    if device.type == "cuda":
        decode = default_config(device, config.head_dim)
        columns = num_columns(rows, pages * PAGE_SIZE, config.num_kv_heads, multiprocessors(device), decode)
        group = config.num_heads // config.num_kv_heads
        workspace = DecodeWorkspace(device, rows, columns, config.num_kv_heads, group, config.head_dim)

        def served() -> None:
            decoded = paged_decode(
                q[:rows], k, v, table[:rows], split.kv_lengths[:rows], pages * PAGE_SIZE, config=decode,
                workspace=workspace,
            )  # fmt: skip
            prompts = prefill_attention(
                q[rows:],
                k,
                v,
                table[rows:],
                split.kv_lengths[rows:],
                split.prefill_cu_q,
                prompt,
                split.max_kv,
            )
            torch.cat((decoded, prompts))

        found["own_kernel_microseconds"] = 1e6 * _seconds(served, device)
    return found


def attention(built: Built, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case that the machine can hold; on a CPU only the smallest, to try the code."""
    found: list[dict[str, Any]] = []
    cases = _CASES if built.device.kind == "cuda" else ((2, 64, 32),)
    for rows, context, prompt in cases:
        found.append(row := _case(built, rows, context, prompt))
        shown = "  ".join(f"{key[:-13]} {row[key]:.0f} µs" for key in row if key.endswith("_microseconds"))
        print(f"  {rows} rows of {context} beside a prompt of {prompt}: {shown}", flush=True)
    return found
