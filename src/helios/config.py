"""Settings: every knob, documented once, read once at the edge and frozen afterwards.

Sources in order of precedence: command-line flags (``--max-batch-size 16``), environment variables
(``HELIOS_MAX_BATCH_SIZE=16``), a local ``.env`` file, the default. A default of None means "chosen at
start from the device"; :func:`resolve` fills those in and the start-up banner prints what was chosen.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from helios.errors import StartupError

DEFAULT_MODEL = "Qwen/Qwen3-4B"
DEMO_MODEL = "demo"
PAGE_SIZE = 256  # tokens; what varlen_attn's FlashAttention-2 pages are made of

CommaList = Annotated[tuple[str, ...], NoDecode]


def _flag(default: Any, description: str, **kwargs: Any) -> Any:
    return Field(default=default, description=description, **kwargs)


class Settings(BaseSettings):
    """All settings. Field ``x_y`` is environment variable ``HELIOS_X_Y`` and flag ``--x-y``."""

    model_config = SettingsConfigDict(
        env_prefix="HELIOS_",
        env_file=".env",
        env_ignore_empty=True,  # HELIOS_MODEL_ID= in a .env file means the default
        extra="ignore",
        frozen=True,
        populate_by_name=True,
    )

    # What to serve
    model_id: str | None = _flag(
        None,
        "Hub repository, local folder, or 'demo'. Default: Qwen/Qwen3-4B on a GPU, the demo model without one.",
    )
    model_revision: str | None = _flag(None, "Pins tokenizer and weights to one revision of the repository.")
    hf_token: SecretStr | None = _flag(
        None,
        "Hugging Face authentication (HF_TOKEN or HF_API_KEY).",
        validation_alias=AliasChoices("HF_TOKEN", "HF_API_KEY"),
    )
    served_model_name: CommaList = _flag(
        (), "Names clients may use for the model, comma-separated; the first is the one answers carry."
    )
    load_format: Literal["auto", "dummy"] = _flag(
        "auto", "'dummy' fills the model with random weights: benchmarks a shape without its checkpoint."
    )
    device: Literal["auto", "cuda", "cpu"] = _flag("auto", "Where to run.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _flag(
        "auto", "Weights and KV cache: bfloat16 on a GPU, float32 on the CPU, unless named."
    )
    max_model_len: int | None = _flag(
        None,
        "Longest prompt plus answer, in tokens. Default: the model's context, as far as memory allows.",
        ge=16,
    )

    # Memory
    max_gpu_utilization: float = _flag(
        0.90,
        "Fraction of the GPU's memory for weights, activations and KV pages.",
        gt=0,
        le=1,
    )
    weight_headroom_ratio: float = _flag(
        0.20,
        "Free memory wanted beyond the weights, as a fraction of them, before loading starts.",
        ge=0,
        le=4,
    )
    kv_cache_headroom_ratio: float = _flag(
        0.20, "Safety margin on top of the measured activation memory.", ge=0, le=4
    )
    num_pages: int | None = _flag(None, "Number of 256-token KV pages. Default: what memory allows.", ge=2)
    cpu_kv_bytes: int = _flag(1 << 30, "KV pool size on the CPU, in bytes.", ge=1 << 20)
    prefix_cache: bool = _flag(True, "Keep and share the KV pages of computed 256-token blocks.")
    prefix_cache_ttl_seconds: float = _flag(300.0, "Sliding lifetime of a cached block.", gt=0)
    kv_offload_bytes: int = _flag(
        0,
        "Host memory (pinned, on a GPU) for cached blocks that the KV pool has no room for; 0: they are dropped.",
        ge=0,
    )

    # Scheduling
    scheduling_policy: Literal["fcfs", "priority"] = _flag(
        "fcfs",
        "Order of waiting requests: as they came, or by their field 'priority', lower values first.",
    )
    priority_age_seconds: float = _flag(
        30.0, "With policy priority: a request that waited this long goes before all others.", gt=0
    )
    admission: Literal["reserve", "on_demand"] = _flag(
        "on_demand",
        "'reserve' holds pages for the longest possible answer; 'on_demand' gives them as tokens come, and when "
        "memory is short puts back the newest (or least urgent) request, which later goes on where it was.",
    )
    chunked_prefill: bool = _flag(
        True, "Prompts run in chunks beside decoding. Off: prompts first, decoding only when none waits."
    )
    long_prefill_token_threshold: int = _flag(
        0, "Most tokens of one prompt in a tick; 0: only the budget limits them.", ge=0
    )
    target_itl_ms: float | None = _flag(
        None,
        "While requests decode, prompt chunks are cut so that a tick is expected to stay below this, or below "
        "eight ticks without prompts where that is longer; 0: never cut. Default: 30 with CUDA graphs, else 0.",
        ge=0,
    )
    prefill_chunk_size: int | None = _flag(
        None, "Token budget of one tick, decode and prefill together. Default: chosen from the device.", ge=1
    )
    max_batch_size: int | None = _flag(
        None, "Most sequences running at once. Default: chosen from the device.", ge=1, le=1024
    )
    max_queue_size: int | None = _flag(
        None, "Most waiting requests; more get HTTP 503. Default: four times the batch size.", ge=1
    )
    max_queue_tokens: int | None = _flag(
        None, "Most prompt tokens waiting in the queue; more get HTTP 503. Default: no limit.", ge=1
    )
    batch_wait_ms: float | None = _flag(
        None,
        "How long an idle engine waits after a first request for others to join. Default: 2 on small devices, "
        "where a prompt that comes late waits for a whole tick, 0 on large ones.",
        ge=0,
        le=1000,
    )
    prefill_age_ms: float = _flag(
        100.0, "A prompt that waited this long takes the next chunk before any other.", ge=0
    )
    request_timeout_seconds: float | None = _flag(
        None, "Deadline of a request that brings none of its own. Default: none.", gt=0
    )

    # Compilation
    torch_compile: bool = _flag(False, "Compile the model call with TorchInductor before warm-up.")
    compile_fullgraph: bool = _flag(False, "Stop at the first graph break. Needs torch_compile.")
    compile_diagnostics: bool = _flag(
        True, "With torch_compile: log graph breaks and recompilations (an explicit TORCH_LOGS wins)."
    )

    # Speed on a GPU; each can be switched off, and the plain path stays
    cuda_graphs: bool = _flag(
        True, "Replay captured CUDA graphs of fused kernels instead of running operators."
    )
    lookahead: bool = _flag(
        True, "Launch a tick before the last one's tokens are read back. Needs cuda_graphs."
    )
    late_launch: bool = _flag(
        True,
        "While requests only decode, launch that tick when most of the last one has passed instead of at once, so "
        "that requests which arrive meanwhile are in it. Needs lookahead.",
    )
    dependent_launch: bool = _flag(
        True, "Let a kernel's start overlap the end of the one before (SM90 and newer)."
    )
    sm90_kernels: bool = _flag(
        True, "On an H100 or H200: choose among the kernels written for them, too. Needs cuda_graphs."
    )
    prefill_attention: Literal["auto", "fa2", "triton", "fa3"] = _flag(
        "auto",
        "What computes prompt attention: the fastest on this card (auto), or one by name; fa3 needs the package "
        "of 'uv sync --extra fa3'. Needs cuda_graphs.",
    )
    tune_seconds: float = _flag(
        3.0,
        "Most seconds that each choice of kernels by measurement takes at start: linears alone, linears in a step, "
        "prompt attention.",
        ge=0,
    )

    # Sampling defaults
    generation_config: Literal["helios", "model"] = _flag(
        "helios",
        "Where default sampling values come from: the three below, or the model's generation_config.json.",
    )
    default_temperature: float = _flag(0.2, "Temperature of a request that names none.", ge=0, le=2)
    default_top_p: float = _flag(0.95, "top_p of a request that names none.", gt=0, le=1)
    default_max_tokens: int = _flag(
        256, "Answer length of a request that names none, clamped to the room left; 0: all the room.", ge=0
    )
    enable_thinking: bool = _flag(False, "Whether chats think unless the request says.")

    # HTTP
    host: str = _flag("127.0.0.1", "Address to listen on.")
    port: int = _flag(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = _flag(
        (),
        "Keys that clients must send as 'Authorization: Bearer KEY', comma-separated. Default: none needed.",
    )
    api_key_file: Path | None = _flag(None, "File with one API key a line.")
    max_requests_per_key: int | None = _flag(
        None, "Most requests in flight for one API key; more get HTTP 429. Default: no limit.", ge=1
    )
    cors_origins: CommaList = _flag((), "Browser origins that may call the server, comma-separated.")
    max_body_bytes: int = _flag(16 << 20, "Largest request body.", ge=1024)
    max_messages: int = _flag(2048, "Most messages in one chat request.", ge=1)
    max_tokens_limit: int | None = _flag(
        None, "Largest max_tokens a request may ask for. Default: the context.", ge=1
    )
    max_choices: int = _flag(128, "Largest n a request may ask for.", ge=1, le=1024)
    sse_keepalive_seconds: float = _flag(15.0, "Silence after which a stream sends a comment line.", gt=0)
    shutdown_timeout_seconds: float = _flag(
        30.0, "How long SIGTERM lets running requests finish before the rest get an error.", ge=0
    )
    metrics_alias: Literal["none", "vllm"] = _flag(
        "none", "'vllm' also exposes the metrics under vLLM's names, for routers that read those."
    )
    tick_log: int = _flag(
        0, "Number of last ticks kept for GET /internal/ticks; 0: none.", ge=0, le=1_000_000
    )
    log_level: Literal["debug", "info", "warning", "error"] = _flag("info", "Least severe log lines shown.")

    @field_validator("served_model_name", "cors_origins", "api_keys", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator(
        "model_id", "model_revision", "hf_token", "api_key_file", "max_model_len", "num_pages", mode="before"
    )
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        """``--model ""`` means the default, not an empty name."""
        return None if value == "" else value

    @model_validator(mode="after")
    def _needs_compile(self) -> Settings:
        if self.compile_fullgraph and not self.torch_compile:
            raise ValueError("HELIOS_COMPILE_FULLGRAPH=1 needs HELIOS_TORCH_COMPILE=1")
        return self


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What :func:`resolve` needs to know of the device. ``total_memory`` is in bytes."""

    kind: Literal["cuda", "cpu"]
    name: str
    total_memory: int
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduling limits in force, each either set by hand or chosen from the device."""

    max_batch_size: int
    prefill_chunk_size: int
    max_queue_size: int
    batch_wait_ms: float = 0.0


def resolve(settings: Settings, device: DeviceInfo) -> Limits:
    """Choose the limits left open, from the device's memory and compute; explicit values win.

    A card of 16 GB keeps the original defaults (8 sequences, 256 tokens a tick). Larger ones take more
    rows, since decode reads the weights once for all of them, and larger ticks, since their matrix units
    need more rows to be busy: some 8 tokens per multiprocessor and doubling with memory.
    """
    gigabytes = device.total_memory / 1e9
    if device.kind == "cpu" or gigabytes < 20:
        batch, chunk, wait = 8, 256, 2.0
    elif gigabytes < 45:
        batch, chunk, wait = 32, 1024, 0.0
    elif gigabytes < 90:
        batch, chunk, wait = 128, 2048, 0.0
    else:
        batch, chunk, wait = 256, 4096, 0.0
    if device.kind == "cuda" and device.multiprocessors < 80:
        chunk = min(chunk, 512)
    batch = settings.max_batch_size or batch
    return Limits(
        max_batch_size=batch,
        prefill_chunk_size=settings.prefill_chunk_size or chunk,
        max_queue_size=settings.max_queue_size or 4 * batch,
        batch_wait_ms=settings.batch_wait_ms if settings.batch_wait_ms is not None else wait,
    )


def environment_name(field: str) -> str:
    """``max_batch_size`` → ``HELIOS_MAX_BATCH_SIZE`` (``hf_token`` → ``HF_TOKEN``)."""
    return "HF_TOKEN" if field == "hf_token" else f"HELIOS_{field.upper()}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting. Values stay strings: pydantic checks them with everything else."""
    for name, info in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        names = [flag, "--model"] if name == "model_id" else [flag]
        help_text = f"{info.description} [{environment_name(name)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(*names, dest=name, nargs="?", const="true", metavar="BOOL", help=help_text)
        else:
            parser.add_argument(*names, dest=name, metavar="VALUE", help=help_text)


def load(flags: dict[str, str | None] | None = None, **overrides: Any) -> Settings:
    """Read the settings. ``flags`` are command-line values (None: not given).

    Raises StartupError with one line per wrong value, naming the variable, the value and what is allowed.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None} | overrides
    try:
        return cast(Any, Settings)(**given)
    except ValidationError as error:
        lines: list[str] = []
        for problem in error.errors(include_url=False):
            message = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:  # about several settings, which the message names
                lines.append(message)
                continue
            location = str(problem["loc"][0])
            field = "hf_token" if location in ("HF_TOKEN", "HF_API_KEY") else location
            name = environment_name(field) if field in Settings.model_fields else field
            value = "" if field in ("hf_token", "api_keys") else f"={problem['input']!r}"
            lines.append(f"{name}{value}: {message[0].lower()}{message[1:]}")
        raise StartupError("; ".join(lines)) from None
