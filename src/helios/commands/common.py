"""What the subcommands share: sampling flags, and a model in this process."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from helios.config import load
from helios.runtime.request import SamplingParams

if TYPE_CHECKING:
    from helios.llm import LLM

# flag, type, help; the field of SamplingParams and of the HTTP API has the flag's name.
SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "longest answer, in tokens"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "share of the probability to draw from"),
    ("top_k", int, "number of tokens to draw from; 0: all"),
    ("min_p", float, "least probability, as a share of the largest"),
    ("seed", int, "for the same draw again"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags."""
    for name, kind, text in SAMPLING:
        metavar = "N" if kind is int else "X"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def sampling_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling flags that were given."""
    names = [*(name for name, _, _ in SAMPLING), "stop"]
    return {name: options[name] for name in names if options.get(name) is not None}


def open_llm(flags: dict[str, Any]) -> LLM:
    """The model that the settings' flags name."""
    from helios.llm import LLM

    settings = load(flags)
    if "log_level" in settings.model_fields_set:
        from helios.main import configure_logging

        configure_logging(settings.log_level)
    model = flags.get("model_id")
    return LLM(model, **{name: value for name, value in flags.items() if name != "model_id"})


def params_for(llm: LLM, fields: dict[str, Any]) -> SamplingParams | None:
    """The parameters of these fields over the defaults; None, for the defaults cut to the room, without any.
    Raises InvalidRequestError."""
    return replace(llm.default_params, **fields) if fields else None
