"""From settings to a running engine: device, snapshot, memory plan, weights, warm-up, final pool."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer

from helios.config import PAGE_SIZE, DeviceInfo, Limits, Settings, resolve
from helios.errors import StartupError
from helios.kernels.common import available as kernels_available
from helios.runtime.cost_model import CostModel
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.grammar import GrammarCompiler
from helios.runtime.graph_runner import GraphRunner
from helios.runtime.mixed_parts import PREFILL_ROWS
from helios.runtime.page_store import HostPageStore
from helios.runtime.prefill_backend import require
from helios.runtime.progress import StartupProgress
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import KVCache, page_bytes
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import arrange_for_cpu, build_empty, fill_dummy, load_weights
from helios.runtime.runner import ModelRunner
from helios.runtime.snapshot import Snapshot, end_token_ids, load_tokenizer, resolve_snapshot
from helios.runtime.warmup import (
    DECODE_STEPS,
    MemoryPlan,
    peak_since,
    plan_memory,
    reset_peak,
    row_buckets,
    warm_up,
)

log = logging.getLogger("helios.startup")

TARGET_ITL = 0.03  # with graphs: some ten decode steps of a 4B model, and prefill still efficient
SMALL_MODEL_PARAMETERS = 50_000_000  # below this a CPU step is made of operators of microseconds
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True)
class Built:
    """A warmed engine and what else is known of it."""

    engine: Engine
    runner: ModelRunner
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    grammars: GrammarCompiler
    snapshot: Snapshot
    device: DeviceInfo
    limits: Limits
    plan: MemoryPlan
    dtype: str
    warmed_batch_sizes: list[int]
    startup_seconds: dict[str, float] = field(default_factory=dict[str, float])

    def report(self) -> dict[str, Any]:
        """The facts for /health."""
        plan = self.plan
        return {
            "model": self.snapshot.name,
            "model_revision": self.snapshot.revision,
            "device": self.device.name,
            "dtype": self.dtype,
            "max_model_len": self.engine.config.max_model_len,
            "warmup_batch_sizes": self.warmed_batch_sizes,
            "memory": {
                "budget_bytes": plan.budget,
                "weights_bytes": plan.weights,
                "activation_bytes": plan.activations,
                "kv_bytes": plan.kv,
                "page_bytes": plan.page,
                "num_pages": plan.num_pages,
                "kv_tokens": plan.num_pages * PAGE_SIZE,
            },
            "startup_seconds": self.startup_seconds,
        }


def detect_device(settings: Settings) -> DeviceInfo:
    """The device to serve on. Raises StartupError for a GPU that cannot, or that was asked for and is not
    there."""
    usable = settings.device != "cpu" and torch.cuda.is_available()
    if settings.device == "cuda" and not usable:
        raise StartupError(
            "HELIOS_DEVICE='cuda', but torch sees no CUDA GPU: check the driver, or use --device cpu"
        )
    if not usable:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceInfo("cpu", f"CPU ({torch.get_num_threads()} threads)", memory)
    properties = cast(Any, torch.cuda.get_device_properties(0))
    capability = (int(properties.major), int(properties.minor))
    if capability < (8, 0):
        if settings.device == "auto" and settings.model_id is None:
            return detect_device(settings.model_copy(update={"device": "cpu"}))
        raise StartupError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, and paged attention needs 8.0 "
            f"(Ampere) or newer: use another GPU, or --device cpu"
        )
    return DeviceInfo(
        "cuda", properties.name, properties.total_memory, capability, properties.multi_processor_count
    )


def choose_dtype(settings: Settings, device: DeviceInfo) -> Literal["bfloat16", "float16", "float32"]:
    """bfloat16 on a GPU, float32 on the CPU, unless the settings name one."""
    if settings.dtype == "auto":
        return "bfloat16" if device.kind == "cuda" else "float32"
    if settings.dtype == "float32" and device.kind == "cuda":
        raise StartupError("HELIOS_DTYPE='float32': paged attention on a GPU computes bfloat16 or float16")
    return settings.dtype


def build(settings: Settings, progress: StartupProgress | None = None) -> Built:
    """Load and warm a model. Raises StartupError with one line that says what to change."""
    progress = progress or StartupProgress()
    with progress.step("resolving the model", "resolve"):
        device = detect_device(settings)
        limits = resolve(settings, device)
        if settings.model_id is None and device.kind == "cpu":
            progress.say(
                "no usable GPU: serving the bundled demo model on the CPU. "
                "For a real model: uv run helios --model Qwen/Qwen3-0.6B"
            )
        snapshot = resolve_snapshot(settings, device.kind)
    builder = _Builder(settings, device, limits, snapshot)
    plan = builder.plan()
    progress.say(f"{snapshot.name} ({snapshot.revision}) on {device.name}, {builder.dtype_name}")
    progress.say(
        f"batch {limits.max_batch_size} sequences, {limits.prefill_chunk_size} tokens a tick, "
        f"queue {limits.max_queue_size}"
    )
    for line in plan.lines(builder.max_model_len):
        progress.say(line)
    with progress.step("loading the tokenizer", "tokenizer"):
        builder.load_tokenizer()
    with progress.step("loading the weights", "weights"):
        builder.load_model(progress)
    with progress.step("warming up", "warmup"):
        engine, runner, plan, warmed = builder.warm(plan, progress)
    return Built(
        engine, runner, builder.tokenizer, builder.vocabulary, builder.grammars, snapshot, device, limits, plan,
        builder.dtype_name, warmed, progress.seconds,
    )  # fmt: skip


class _Builder:
    """The steps of :func:`build` that share the model and the sizes."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    grammars: GrammarCompiler
    model: Qwen3

    def __init__(self, settings: Settings, device: DeviceInfo, limits: Limits, snapshot: Snapshot) -> None:
        self.settings, self.device, self.limits, self.snapshot = settings, device, limits, snapshot
        self.dtype_name = choose_dtype(settings, device)
        self.dtype = DTYPES[self.dtype_name]
        self.where = torch.device(device.kind)
        self.max_model_len = _context(settings, snapshot.config)
        self.used_by_others = _used_by_others(device)
        self.end_ids = end_token_ids(snapshot.folder)
        if self.uses_graphs:
            require(settings.prefill_attention)

    def plan(self, activations: int | None = None) -> MemoryPlan:
        """The memory plan, estimated or (with a peak in bytes) measured."""
        return plan_memory(
            self.settings, self.snapshot.config, self.device, self.limits, self.dtype.itemsize,
            self.used_by_others, activations,
        )  # fmt: skip

    def load_tokenizer(self) -> None:
        self.tokenizer = load_tokenizer(self.snapshot.folder)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, self.snapshot.config.vocab_size, sorted(self.end_ids))

    def load_model(self, progress: StartupProgress) -> None:
        self.model = build_empty(self.snapshot.config, self.max_model_len, self.where, self.dtype)
        if self.settings.load_format == "dummy":
            fill_dummy(self.model)
        else:
            load_weights(self.model, self.snapshot.folder, progress.advance)
        if self.device.kind == "cpu" and self.snapshot.config.num_parameters < SMALL_MODEL_PARAMETERS:
            arrange_for_cpu(self.model)
            # Its operators end in microseconds: threads that wait for each other cost more than they give.
            torch.set_num_threads(1)
        if self.settings.torch_compile:
            _compile(self.model, self.settings)

    def warm(
        self, plan: MemoryPlan, progress: StartupProgress
    ) -> tuple[Engine, ModelRunner, MemoryPlan, list[int]]:
        """Warm up; on a GPU over a provisional pool whose peak decides the final one."""
        buckets = row_buckets(self.limits.max_batch_size, self.device.kind)
        if self.device.kind == "cpu":
            engine, runner = self.engine_over(plan.num_pages, with_store=True)
            warmed = warm_up(engine, self.limits, buckets, progress.advance, calibrate=self.target_itl > 0)
            return engine, runner, plan, warmed
        engine, runner = self.engine_over(
            min(plan.num_pages, _provisional_pages(self.limits, self.max_model_len))
        )
        base = reset_peak(self.where)
        if isinstance(runner, GraphRunner):
            self.prepare(runner, progress, only_largest=True)
            buckets = buckets[-1:]
        warmed = warm_up(engine, self.limits, buckets, progress.advance)
        activations = peak_since(self.where, base)
        del engine, runner
        reset_peak(self.where)
        plan = self.plan(activations)
        engine, runner = self.engine_over(plan.num_pages, with_store=True)
        if isinstance(runner, GraphRunner):
            self.prepare(runner, progress)
            engine.cost = CostModel(runner.mixed_sizes)
            warmed = runner.captured_batch_sizes
        if self.uses_graphs or self.settings.torch_compile:
            # The first client must not be the one that meets a path made for the final pool.
            warm_up(engine, self.limits, [1], progress.advance, calibrate=self.target_itl > 0)
        return engine, runner, plan, warmed

    def prepare(self, runner: GraphRunner, progress: StartupProgress, *, only_largest: bool = False) -> None:
        runner.prepare(
            tune_seconds=0.0 if only_largest else self.settings.tune_seconds,
            max_tokens=self.limits.prefill_chunk_size,
            pdl=self.settings.dependent_launch,
            sm90=self.settings.sm90_kernels,
            prefill_attention=self.settings.prefill_attention,
            only_largest=only_largest,
            report=progress.advance,
        )

    @property
    def uses_graphs(self) -> bool:
        """Whether this model on this device can be served through captured graphs of fused kernels."""
        config = self.snapshot.config
        return (
            self.device.kind == "cuda"
            and self.settings.cuda_graphs
            and not self.settings.torch_compile
            and kernels_available(self.where)
            and config.head_dim in (64, 128)
            and config.num_heads // config.num_kv_heads <= 16
        )

    @property
    def target_itl(self) -> float:
        """Seconds; 0: chunks are not cut by time."""
        target = self.settings.target_itl_ms
        return (TARGET_ITL if self.uses_graphs else 0.0) if target is None else target / 1e3

    def engine_over(self, num_pages: int, *, with_store: bool = False) -> tuple[Engine, ModelRunner]:
        """An engine over a fresh pool of ``num_pages`` pages, and over host memory if the settings want it."""
        settings, limits, config = self.settings, self.limits, self.snapshot.config
        limit = min(self.max_model_len, num_pages * PAGE_SIZE)
        runner_class = GraphRunner if self.uses_graphs else ModelRunner
        cache = KVCache(config, num_pages, self.where, self.dtype)
        runner = runner_class(
            self.model,
            cache,
            max_tokens=limits.prefill_chunk_size,
            max_rows=limits.max_batch_size,
            max_model_len=limit,
            vocabulary_size=min(self.vocabulary.size, config.vocab_size),
            end_token_ids=self.end_ids,
        )
        engine_config = EngineConfig(
            max_batch_size=limits.max_batch_size,
            prefill_chunk_size=limits.prefill_chunk_size,
            num_pages=num_pages,
            max_model_len=limit,
            eos_token_ids=self.end_ids,
            prefill_age=settings.prefill_age_ms / 1e3,
            prefix_cache=settings.prefix_cache,
            prefix_cache_ttl=settings.prefix_cache_ttl_seconds,
            lookahead=settings.lookahead and self.uses_graphs,
            late_launch=settings.late_launch,
            end_thinking_ids=tuple(self.tokenizer.encode("\n</think>\n\n", add_special_tokens=False).ids),
            on_demand=settings.admission == "on_demand",
            by_priority=settings.scheduling_policy == "priority",
            priority_age=settings.priority_age_seconds,
            prefill_first=not settings.chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            max_prompts=PREFILL_ROWS if self.uses_graphs else 0,  # more are computed without a graph
            target_itl=self.target_itl,
            tick_log=settings.tick_log,
        )
        store = self._host_store(cache) if with_store else None
        return Engine(engine_config, runner, self.vocabulary, self.grammars, store=store), runner

    def _host_store(self, cache: KVCache) -> HostPageStore | None:
        """Room for evicted pages in host memory. Raises StartupError if the host has not that much."""
        size = page_bytes(self.snapshot.config, self.dtype.itemsize)
        slots = self.settings.kv_offload_bytes // size
        if not self.settings.kv_offload_bytes or not self.settings.prefix_cache:
            return None
        if not slots:
            raise StartupError(
                f"HELIOS_KV_OFFLOAD_BYTES={self.settings.kv_offload_bytes}: a page of this model takes {size} bytes"
            )
        try:
            return HostPageStore(cache, slots)
        except (RuntimeError, MemoryError) as error:
            raise StartupError(
                f"HELIOS_KV_OFFLOAD_BYTES={self.settings.kv_offload_bytes}: the host gives no such memory ({error})"
            ) from None


def _context(settings: Settings, config: ModelConfig) -> int:
    if settings.max_model_len is None:
        return config.max_position
    if settings.max_model_len > config.max_position:
        raise StartupError(
            f"HELIOS_MAX_MODEL_LEN={settings.max_model_len}: the model's context is {config.max_position} tokens"
        )
    return settings.max_model_len


def _provisional_pages(limits: Limits, max_model_len: int) -> int:
    """Pages enough for every warm-up batch, each row with a page and a full tick's prompt."""
    prompt = (min(limits.prefill_chunk_size, max_model_len) + DECODE_STEPS) // PAGE_SIZE + 2
    return max(2 * row_buckets(limits.max_batch_size)[-1], prompt)


def _used_by_others(device: DeviceInfo) -> int:
    """Bytes of the GPU that other processes (and the CUDA context) hold."""
    if device.kind != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _compile(model: Qwen3, settings: Settings) -> None:
    """Compile the model call with TorchInductor; with diagnostics, log what it does."""
    if settings.compile_diagnostics and not os.environ.get("TORCH_LOGS"):
        torch._logging.set_logs(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            dynamo=logging.INFO, graph_breaks=True, recompiles=True
        )
    model.compile(fullgraph=settings.compile_fullgraph)
