"""Which kernel computes prompt attention on this card: chosen at start by measurement, for each length class.

* ``fa2``: torch's varlen_attn, right everywhere; what the others are checked against.
* ``triton``: :func:`helios.kernels.prefill_attention.paged_prefill` in one of a few configurations, and on SM90
  :func:`helios.kernels.prefill_hopper.paged_prefill_hopper`.
* ``fa3``: FlashAttention-3 (SM90) of the optional package, through its own function. torch's
  ``activate_flash_attention_impl("FA3")`` reaches the same operator, but for every call of the process: decode
  attention would change with it, and each change back registers a handful of operators anew.

A length class is the number of new tokens in a call, which a CUDA graph knows at capture.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

import torch

from helios.config import PAGE_SIZE
from helios.errors import StartupError
from helios.kernels.common import available as kernels_available
from helios.kernels.common import sm90_kernels
from helios.kernels.measure import relative_error, time_in_graph
from helios.kernels.prefill_attention import PrefillConfig, default_config, new_counters, paged_prefill
from helios.runtime.page_pool import pages_for
from helios.runtime.qwen3.attention import prefill_attention

log = logging.getLogger("helios.startup")

Choice = Literal["auto", "fa2", "triton", "fa3"]
# (q, k_pages, v_pages, page_table, kv_lengths, cu_q, max_q, max_kv) -> like q
PrefillAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int],
    torch.Tensor,
]

# (most new tokens of the class, new tokens timed, cached tokens before them). The first is the next turn of a
# chat, whose time goes into the old turns' keys. Those above 512 are later chunks of a long prompt: with 32 query
# heads their tiles fill an H200 once, or twice, and a quarter of a round more, which is where a tail shows.
CLASSES: tuple[tuple[int, int, int], ...] = (
    (256, 128, 4000),
    (512, 512, 0),
    (1024, 640, 7000),
    (2048, 1280, 4000),
    (1 << 30, 2240, 4000),
)
TAIL_ABOVE = 512  # most new tokens of the last class without one: its tiles rarely fill the card once
BUDGET_S = 1.5  # of timing; compiling comes once on a new machine
MARGIN = 0.03  # what a candidate must win by: fa2 is the tried one
TOLERANCE = 1e-2  # relative error against fa2, of results rounded to bfloat16
INSTALL_FA3 = "install it with: uv sync --extra fa3"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute prompt attention. ``name`` is what the log and the benchmark print."""

    name: str
    run: PrefillAttention


@dataclass(slots=True)
class PrefillBackend:
    """The chosen candidate of each length class; called like :func:`prefill_attention`."""

    choices: list[Candidate]  # by class
    seconds: list[dict[str, float]] = field(
        default_factory=list[dict[str, float]]
    )  # by class: name -> a call

    def choose(self, tokens: int) -> Candidate:
        """The candidate for ``tokens`` new tokens."""
        return next(
            choice for (most, _, _), choice in zip(CLASSES, self.choices, strict=True) if tokens <= most
        )

    def __call__(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        kv_lengths: torch.Tensor,
        cu_q: torch.Tensor,
        max_q: int,
        max_kv: int,
    ) -> torch.Tensor:
        run = self.choose(q.shape[0]).run
        return run(q, k_pages, v_pages, page_table, kv_lengths, cu_q, max_q, max_kv)

    def __str__(self) -> str:
        parts: list[str] = []
        for index, ((most, new, cached), choice) in enumerate(zip(CLASSES, self.choices, strict=True)):
            where = f"up to {most}" if most < 1 << 30 else "beyond"
            times = self.seconds[index] if self.seconds else {}
            listed = ", ".join(f"{name} {value * 1e6:.0f}" for name, value in times.items())
            parts.append(
                f"{where}: {choice.name}" + (f" ({new} after {cached}, us: {listed})" if listed else "")
            )
        return "; ".join(parts)


FA2 = Candidate("fa2", prefill_attention)


def fa3_installed() -> bool:
    """Whether the package of the extra ``fa3`` is there."""
    return importlib.util.find_spec("flash_attn_interface") is not None


def require(choice: Choice) -> None:
    """Raise StartupError if ``choice`` names what is not installed, before anything is loaded."""
    if choice == "fa3" and not fa3_installed():
        raise StartupError(
            f"HELIOS_PREFILL_ATTENTION='fa3': FlashAttention-3 is not installed; {INSTALL_FA3}"
        )


def triton_candidate(config: PrefillConfig) -> Candidate:
    """The Triton kernel in one configuration. Its first call on a device must not be captured."""
    return _with_counters(f"triton {config}", partial(paged_prefill, config=config))


def hopper_candidate() -> Candidate:
    """The kernel written for SM90, imported in its first call, which must not be captured."""

    def attend(*arguments: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
        kernel = importlib.import_module("helios.kernels.prefill_hopper").paged_prefill_hopper
        return kernel(*arguments, counters=counters)

    return _with_counters("triton sm90", attend)


def _with_counters(name: str, attend: Callable[..., torch.Tensor]) -> Candidate:
    """A kernel of ours with counters of its own on each device."""
    counters: dict[torch.device, torch.Tensor] = {}

    def run(
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        kv_lengths: torch.Tensor,
        cu_q: torch.Tensor,
        max_q: int,
        max_kv: int,
    ) -> torch.Tensor:
        if q.device not in counters:
            counters[q.device] = new_counters(q.device)
        return attend(q, k_pages, v_pages, page_table, kv_lengths, cu_q, counters=counters[q.device])

    return Candidate(name, run)


def fa3_candidate() -> Candidate:
    """FlashAttention-3, imported in its first call: a broken package then loses only this candidate."""

    def run(
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        kv_lengths: torch.Tensor,
        cu_q: torch.Tensor,
        max_q: int,
        max_kv: int,
    ) -> torch.Tensor:
        attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        return attend(
            q,
            k_pages,
            v_pages,
            cache_seqlens=kv_lengths,
            page_table=page_table,
            cu_seqlens_q=cu_q,
            max_seqlen_q=max_q,
            causal=True,
            num_splits=1,
        )

    return Candidate("fa3", run)


def candidates(choice: Choice, device: torch.device, most: int) -> list[Candidate]:
    """What is tried for the length class of up to ``most`` tokens, the likeliest winner first."""
    found: list[Candidate] = []
    capability = torch.cuda.get_device_capability(device)
    if choice in ("auto", "fa3") and capability == (9, 0) and fa3_installed():
        found.append(fa3_candidate())
    # Older cards are what FlashAttention-2 was written for: left out of auto, they start sooner.
    if (choice == "triton" or (choice == "auto" and capability >= (9, 0))) and kernels_available(device):
        config, long, sm90 = default_config(most), most > TAIL_ABOVE, sm90_kernels(device)
        if sm90:
            found.append(hopper_candidate())
        if not (long and sm90):
            found.append(triton_candidate(config))
        if long:
            found.append(triton_candidate(replace(config, tail=True)))
    return found


def choose_prefill(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    budget_s: float = BUDGET_S,
) -> PrefillBackend:
    """Check and time the candidates that ``choice`` allows and keep the fastest of each length class.

    Nothing more is timed ``budget_s`` after all were compiled: ``auto`` is then fa2, a forced name its first
    candidate that is right. Without a budget ``auto`` does not even compile. Raises StartupError if a forced
    candidate cannot run here, or is wrong.
    """
    require(choice)
    if choice == "fa2" or (choice == "auto" and budget_s <= 0):
        return PrefillBackend([FA2] * len(CLASSES))
    # A second, short row in each, so that rows mixed up would show.
    problems = [
        Problem(device, dtype, heads, kv_heads, head_dim, [(cached + new - 37, new - 37), (37, 37)])
        for _, new, cached in CLASSES
    ]
    of_class = [candidates(choice, device, most) for most, _, _ in CLASSES]
    backend = PrefillBackend([])
    judged = _verdicts(problems, of_class)
    deadline = time.monotonic() + budget_s
    for problem, verdicts in zip(problems, judged, strict=True):
        right = [candidate for candidate, why in verdicts if not why]
        reasons = "; ".join(f"{candidate.name}: {why}" for candidate, why in verdicts if why)
        if choice != "auto" and not right:
            raise StartupError(
                f"HELIOS_PREFILL_ATTENTION={choice!r} cannot run on {torch.cuda.get_device_name(device)}: "
                + (reasons or "not supported")
            )
        if reasons:
            log.info("prompt attention leaves out %s", reasons)
        ranked = [FA2, *right] if choice == "auto" else right
        times: dict[str, float] = {}
        if len(ranked) > 1 and time.monotonic() < deadline:
            with torch.inference_mode():
                times = {candidate.name: problem.seconds(candidate) for candidate in ranked}
            ranked.sort(key=lambda candidate: times[candidate.name] * (1 - MARGIN * (candidate is FA2)))
        backend.choices.append(ranked[0])
        backend.seconds.append(times)
    log.info("prompt attention, new tokens %s", backend)
    return backend


def _verdicts(problems: list[Problem], of_class: list[list[Candidate]]) -> list[list[tuple[Candidate, str]]]:
    """For each class, each candidate with what is wrong with its answer: empty if nothing. Kernels compile side
    by side; the classes of one name follow each other, so that they do not all compile the same."""
    with torch.inference_mode():
        expected = [problem.run(FA2) for problem in problems]
    of_name: dict[str, list[tuple[int, Candidate]]] = {}
    for index, tried in enumerate(of_class):
        for candidate in tried:
            of_name.setdefault(candidate.name, []).append((index, candidate))

    def judge(named: list[tuple[int, Candidate]]) -> dict[int, str]:
        return {index: _verdict(candidate, problems[index], expected[index]) for index, candidate in named}

    with ThreadPoolExecutor(8) as pool:
        verdicts = dict(zip(of_name, pool.map(judge, of_name.values()), strict=True))
    return [
        [(candidate, verdicts[candidate.name][index]) for candidate in tried]
        for index, tried in enumerate(of_class)
    ]


def _verdict(candidate: Candidate, problem: Problem, expected: torch.Tensor) -> str:
    try:
        with torch.inference_mode():  # which is a thread's own
            error = relative_error(problem.run(candidate), expected)
    except Exception as failure:  # a compiler's or a library's: whatever it is, the candidate is out
        return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:120]}"
    return "" if error < TOLERANCE else f"relative error {error:.3g} against fa2"


class Problem:
    """Random queries, keys and values of rows (keys, new tokens), in shuffled pages; also the benchmark's."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rows: list[tuple[int, int]],
    ) -> None:
        pages = [pages_for(length) for length, _ in rows]
        order = cast(list[int], (torch.randperm(sum(pages)) + 1).tolist())
        table = torch.zeros((len(rows), max(pages)), dtype=torch.int32)
        for row, count in enumerate(pages):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        offsets = [0]
        for _, count in rows:
            offsets.append(offsets[-1] + count)
        shape = (2, sum(pages) + 1, PAGE_SIZE, kv_heads, head_dim)
        generator = torch.Generator(device).manual_seed(0)
        self.pool = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        self.q = torch.randn((offsets[-1], heads, head_dim), device=device, dtype=dtype, generator=generator)
        self.table = table.to(device)
        self.kv_lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32, device=device)
        self.cu_q = torch.tensor(offsets, dtype=torch.int32, device=device)
        self.max_kv = max(pages) * PAGE_SIZE

    def run(self, candidate: Candidate) -> torch.Tensor:
        """The candidate's answer."""
        return candidate.run(
            self.q,
            self.pool[0],
            self.pool[1],
            self.table,
            self.kv_lengths,
            self.cu_q,
            self.q.shape[0],
            self.max_kv,
        )

    def seconds(self, candidate: Candidate, calls: int = 4) -> float:
        """Seconds of one call, in a CUDA graph."""

        def step() -> None:
            for _ in range(calls):
                self.run(candidate)

        return time_in_graph(step, self.q.device) / calls
