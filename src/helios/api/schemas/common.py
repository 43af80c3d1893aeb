"""What the request bodies share: strict types, sampling fields, and the rule for unknown fields.

A field is either in the schema and has its effect, or it is one of the few that cannot matter
(:data:`HARMLESS`), or it carries the value that asks for nothing (:data:`NEUTRAL`, and null always);
anything else is refused by name, so no client believes in an effect that it does not get.

Lists fail fast: a list of a million wrong entries is one problem, where pydantic would otherwise build a
million errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from helios.config import Settings
from helios.errors import InvalidRequestError, UnsupportedParameterError
from helios.runtime.job_builder import JobOptions, ModelInfo
from helios.runtime.request import Grammar, SamplingParams
from helios.runtime.sampling_rules import (
    BOUNDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SEED_MASK,
    bound_problem,
    check_token_ids,
)

# Sent by SDKs and frameworks; about accounts and storage, never about the answer.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
# Fields without an effect here, with the values that ask for none.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True, False),  # Qwen tokenizers add none
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "speed": ("standard",),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
JsonObject = dict[str, Any]
Value = TypeVar("Value")


class RequestModel(BaseModel):
    """Strict types, and unknown fields kept aside for :func:`check_unknown`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    # Unknown fields that this object may carry without any effect.
    harmless: ClassVar[frozenset[str]] = frozenset()


def check_unknown(model: RequestModel, path: str = "") -> None:
    """Refuse the fields, at any depth, that Helios does not know. Raises UnsupportedParameterError."""
    for name, value in (model.model_extra or {}).items():
        if value is None or name in model.harmless or _is_neutral(name, value):
            continue
        param = (path + name)[:200]
        raise UnsupportedParameterError(f"Unsupported parameter: '{param}'.", param=param)
    for name in model.model_fields_set:
        value = getattr(model, name)
        where = path + name.rstrip("_")
        if isinstance(value, RequestModel):
            check_unknown(value, where + ".")
        elif isinstance(value, list):
            for index, entry in enumerate(cast("list[object]", value)):
                if not isinstance(entry, RequestModel):
                    break
                check_unknown(entry, f"{where}[{index}].")


def _is_neutral(name: str, value: object) -> bool:
    # True is 1 in Python, but not in JSON.
    return any(
        value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in NEUTRAL.get(name, ())
    )


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with usage and timings.")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is ever sent.")


def bounded(name: str, description: str | None = None) -> Any:
    """An optional field with the bounds that the library checks, too."""
    bounds: dict[str, Any] = dict(BOUNDS[name])
    return Field(None, description=description, **bounds)


def _few_entries(bias: object) -> object:
    """Before the entries are looked at one by one."""
    entries = len(cast("JsonObject", bias)) if isinstance(bias, dict) else 0
    if entries > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries are allowed.")
    return cast("object", bias)


class SamplingFields(RequestModel):
    """Sampling and stopping, the same on every generating route."""

    harmless = HARMLESS

    model: str | None = Field(None, description="Served model name or alias; default: the served model.")
    temperature: float | None = bounded("temperature", "0 is greedy.")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k", "0 or -1: off.")
    min_p: float | None = bounded("min_p")
    seed: int | None = bounded("seed")
    n: int | None = bounded("n")
    stop: str | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = bounded("min_tokens")
    max_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    repetition_penalty: float | None = bounded("repetition_penalty")
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_entries)] | None
    ) = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    timeout_seconds: float | None = Field(None, gt=0, le=7 * 86400)
    priority: int | None = bounded("priority", "Lower runs first; needs HELIOS_SCHEDULING_POLICY=priority.")

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    def check(self, settings: Settings) -> None:
        """The rules that span fields. Raises InvalidRequestError."""
        check_unknown(self)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
            )
        if self.n is not None and self.n > settings.max_choices:
            raise above_maximum("n", self.n, settings.max_choices)
        if self.stop == "":
            raise InvalidRequestError("Invalid 'stop': a stop string must not be empty.", param="stop")
        check_priority(self.priority or 0, settings)

    def sampling_params(self, info: ModelInfo, **extra: Any) -> SamplingParams:
        """The parameters of this request, with the model's defaults for what it leaves out.

        ``max_tokens`` is left to :meth:`helios.runtime.frontend.Frontend.submit`, which knows the prompt.
        """
        defaults = info.generation_defaults
        stop = self.stop or ()
        return SamplingParams(
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(0, _or(self.top_k, defaults.top_k)),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            seed=None if self.seed is None else self.seed & SEED_MASK,
            n=self.n or 1,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=self._stop_token_ids(info),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(info),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            **extra,
        )

    def job_options(self, max_tokens: int | None, settings: Settings, param: str) -> JobOptions:
        """Length, deadline, priority and cache salt. Raises InvalidRequestError."""
        limit = settings.max_tokens_limit
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise above_maximum("max_tokens", max_tokens, limit)
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise above_maximum("min_tokens", self.min_tokens or 0, max_tokens)
        return JobOptions(
            max_tokens=max_tokens,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            timeout_seconds=self.timeout_seconds,
            param=param,
        )

    def _logit_bias(self, info: ModelInfo) -> tuple[tuple[int, float], ...]:
        bias = self.logit_bias or {}
        ids = [int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1 for key in bias]
        check_token_ids("logit_bias", ids, info.vocab_size)
        return tuple(zip(ids, bias.values(), strict=True))

    def _stop_token_ids(self, info: ModelInfo) -> tuple[int, ...]:
        ids = tuple(self.stop_token_ids or ())
        check_token_ids("stop_token_ids", ids, info.vocab_size)
        return ids


class StructuredOutputs(RequestModel):
    """vLLM's container for a constraint on the output."""

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None


class JsonSchemaFormat(RequestModel):
    """The schema of ``response_format``. ``strict`` is accepted; a schema always binds here."""

    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(RequestModel):
    """Fields that constrain the output, under their several names; at most one may be used."""

    response_format: ResponseFormat | None = None
    regex: str | None = Field(None, min_length=1, description="The output matches this regular expression.")
    choice: Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None

    def grammar(self, starts_after: int | None = None) -> tuple[Grammar | None, str]:
        """The constraint that the request asks for, and the field that asks. Raises InvalidRequestError."""
        found: list[tuple[str, Grammar]] = []

        def add(param: str, kind: str, value: object) -> None:
            found.append((param, Grammar.of(kind, value, param=param, starts_after=starts_after)))

        self._add_response_format(add)
        nested = self.structured_outputs
        if nested is not None and nested.json_object:
            add("structured_outputs.json_object", "json_object", "{}")
        for param, kind, value in (
            ("regex", "regex", self.regex),
            ("guided_regex", "regex", self.guided_regex),
            ("structured_outputs.regex", "regex", nested and nested.regex),
            ("choice", "choice", self.choice),
            ("guided_choice", "choice", self.guided_choice),
            ("structured_outputs.choice", "choice", nested and nested.choice),
            ("guided_json", "json_schema", self.guided_json),
            ("structured_outputs.json", "json_schema", nested and nested.json_),
        ):
            if value is not None:
                add(param, kind, _schema_text(param, value) if kind == "json_schema" else value)
        if len(found) > 1:
            raise InvalidRequestError(
                f"'{found[0][0]}' and '{found[1][0]}' cannot be used together.", param=found[1][0]
            )
        return (found[0][1], found[0][0]) if found else (None, "response_format")

    def _add_response_format(self, add: Any) -> None:
        form = self.response_format
        if form is None or form.type == "text":
            return
        if form.type == "json_object":
            add("response_format", "json_object", "{}")
            return
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidRequestError(
                "Missing required parameter: 'response_format.json_schema.schema'.",
                param="response_format.json_schema.schema",
                code="missing_required_parameter",
            )
        add("response_format", "json_schema", form.json_schema.schema_)


def _schema_text(param: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"Invalid '{param}': not a JSON schema.", param=param)
    return cast("JsonObject", parsed)


def above_maximum(param: str, value: int, maximum: int) -> InvalidRequestError:
    """OpenAI's words for a number that is too large."""
    text, code = bound_problem(param, value, "le", maximum)
    return InvalidRequestError(text, param=param, code=code)


def check_priority(priority: int, settings: Settings, param: str = "priority") -> None:
    """Refuse a priority that the scheduling policy would not look at. Raises InvalidRequestError."""
    if priority and settings.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"Invalid '{param}': {priority} has no effect with HELIOS_SCHEDULING_POLICY="
            f"{settings.scheduling_policy}; only 0 is allowed unless it is 'priority'.",
            param=param,
        )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
