"""``helios info``: settings in force, device, model shape and memory plan, without loading weights."""

from __future__ import annotations

from typing import Any

import torch

from helios import __version__
from helios.config import DeviceInfo, Limits, Settings, environment_name, load, resolve
from helios.runtime.build import DTYPES, choose_dtype, detect_device
from helios.runtime.snapshot import resolve_snapshot
from helios.runtime.warmup import plan_memory


def run(flags: dict[str, Any], options: dict[str, Any]) -> int:
    """Print everything. Raises StartupError for a model that cannot be found or cannot fit."""
    del options
    settings = load(flags)
    device = detect_device(settings)
    limits = resolve(settings, device)
    print(f"helios {__version__} on {device.name}, {device.total_memory / 2**30:.1f} GiB")
    _print_settings(settings, limits)
    _print_model(settings, device, limits)
    return 0


def _print_settings(settings: Settings, limits: Limits) -> None:
    chosen = {
        "max_batch_size": limits.max_batch_size,
        "prefill_chunk_size": limits.prefill_chunk_size,
        "max_queue_size": limits.max_queue_size,
        "batch_wait_ms": limits.batch_wait_ms,
    }
    for name in Settings.model_fields:
        value = getattr(settings, name)
        note = ""
        if value is None and name in chosen:
            value, note = chosen[name], "  (chosen from the device)"
        print(f"{environment_name(name)}={'' if value is None else value}{note}")


def _print_model(settings: Settings, device: DeviceInfo, limits: Limits) -> None:
    # With dummy weights only the model's text files are fetched.
    snapshot = resolve_snapshot(settings.model_copy(update={"load_format": "dummy"}), device.kind)
    config = snapshot.config
    dtype = choose_dtype(settings, device)
    size = DTYPES[dtype].itemsize
    context = settings.max_model_len or config.max_position
    print(f"model           {snapshot.name} ({snapshot.revision}), {config.model_type}, {dtype}")
    print(
        f"shape           {config.num_layers} layers of width {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{config.num_heads} query and {config.num_kv_heads} key-value heads of {config.head_dim}"
    )
    print(
        f"                {config.num_parameters:,} parameters, vocabulary {config.vocab_size:,}, "
        f"context {config.max_position:,}, {config.kv_bytes_per_token(size):,} bytes of keys and values a token"
    )
    plan = plan_memory(settings, config, device, limits, size, _used_by_others(device))
    for line in plan.lines(context):
        print(line)


def _used_by_others(device: DeviceInfo) -> int:
    """Bytes of the GPU that are taken now."""
    if device.kind != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
