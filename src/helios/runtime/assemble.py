"""Puts the rooms together: a built engine, its scheduler thread, the chat template, the frontend."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from helios.config import DEMO_MODEL, Settings
from helios.runtime.build import Built, build
from helios.runtime.chat import load_chat_template
from helios.runtime.frontend import Frontend
from helios.runtime.job_builder import GenerationDefaults, ModelInfo
from helios.runtime.metrics import Metrics
from helios.runtime.progress import StartupProgress
from helios.runtime.prompt_encoder import control_tokens
from helios.runtime.scheduler import Scheduler
from helios.runtime.snapshot import Snapshot, load_json
from helios.runtime.warmup import rehearse

log = logging.getLogger("helios.startup")


@dataclass(slots=True)
class Assembled:
    """A frontend that serves, and the start-up facts for /health."""

    frontend: Frontend
    scheduler: Scheduler
    built: Built
    info: dict[str, Any]


def assemble(settings: Settings, progress: StartupProgress | None = None) -> Assembled:
    """Build everything behind the API and start the worker. Raises StartupError."""
    built = build(settings, progress)
    engine = built.engine
    template = load_chat_template(built.snapshot.folder, control_tokens(built.tokenizer))
    scheduler = Scheduler(
        engine,
        max_queue_size=built.limits.max_queue_size,
        max_queue_tokens=settings.max_queue_tokens,
        batch_wait=built.limits.batch_wait_ms / 1e3,
    )
    model = model_info(settings, built)
    metrics = Metrics(model.name, model.max_model_len, settings.metrics_alias)
    frontend = Frontend(
        settings, built.tokenizer, template, scheduler, model, metrics,
        vocabulary=built.vocabulary, grammars=built.grammars,
    )  # fmt: skip
    scheduler.start()
    scheduler.call(lambda: rehearse(engine), timeout=None)
    engine.on_tick = metrics.observe_tick
    return Assembled(frontend, scheduler, built, built.report())


def model_info(settings: Settings, built: Built) -> ModelInfo:
    """What is known of a built model beside its weights."""
    snapshot, config = built.snapshot, built.engine.config
    names = _names(settings, snapshot)
    return ModelInfo(
        name=names[0],
        aliases=tuple(names[1:]),
        revision=snapshot.revision,
        max_model_len=config.max_model_len,
        vocab_size=min(built.vocabulary.size, snapshot.config.vocab_size),
        eos_token_ids=tuple(sorted(config.eos_token_ids)),
        generation_defaults=_generation_defaults(settings, snapshot),
    )


def _names(settings: Settings, snapshot: Snapshot) -> list[str]:
    """The served names, the one that answers carry first; the demo also answers to ``demo``."""
    own = [snapshot.name]
    if snapshot.revision == "bundled":
        own.append(DEMO_MODEL)
    elif settings.model_id is not None and settings.model_id != snapshot.name:
        own.append(settings.model_id)  # the folder as it was given
    return list(dict.fromkeys([*settings.served_model_name, *own]))


def _generation_defaults(settings: Settings, snapshot: Snapshot) -> GenerationDefaults:
    ours = GenerationDefaults(
        temperature=settings.default_temperature,
        top_p=settings.default_top_p,
        max_tokens=settings.default_max_tokens,
    )
    if settings.generation_config == "helios":
        return ours
    file = load_json(snapshot.folder / "generation_config.json")
    taken = {
        name: file[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if file.get(name) is not None
    }
    if file.get("do_sample") is False:
        taken["temperature"] = 0.0
    log.info("sampling defaults from generation_config.json: %s", taken or "it names none")
    return GenerationDefaults(
        temperature=float(taken.get("temperature", ours.temperature)),
        top_p=float(taken.get("top_p", ours.top_p)),
        top_k=int(taken.get("top_k", ours.top_k)),
        min_p=float(taken.get("min_p", ours.min_p)),
        max_tokens=ours.max_tokens,
        repetition_penalty=float(taken.get("repetition_penalty", ours.repetition_penalty)),
    )
