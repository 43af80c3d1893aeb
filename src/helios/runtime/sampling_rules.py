"""Which values sampling parameters may have: one table and one form of words for HTTP and for the library.

Nothing here imports torch or pydantic. The request schemas take their bounds from :data:`BOUNDS`;
:class:`~helios.runtime.request.SamplingParams` is checked by :func:`normalized` when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from helios.errors import InvalidRequestError

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_ECHO = 200  # characters of a caller's value that a message repeats
SEED_MASK = (1 << 64) - 1

# Bounds in pydantic's words. What is not a whole number here may be one there: 0 is a fine temperature.
BOUNDS: Mapping[str, Mapping[str, int]] = {
    "temperature": {"ge": 0, "le": 2},
    "top_p": {"gt": 0, "le": 1},
    "top_k": {"ge": -1, "le": 1_000_000},
    "min_p": {"ge": 0, "le": 1},
    "seed": {"ge": -(1 << 63), "le": SEED_MASK},
    "n": {"ge": 1},
    "max_tokens": {"ge": 1},
    "min_tokens": {"ge": 0},
    "presence_penalty": {"ge": -2, "le": 2},
    "frequency_penalty": {"ge": -2, "le": 2},
    "repetition_penalty": {"gt": 0, "le": 10},
    "logit_bias": {"ge": -100, "le": 100},
    "logprobs": {"ge": 0, "le": 20},
    "prompt_logprobs": {"ge": 0, "le": 20},
    "thinking_budget": {"ge": 0},
    "priority": {"ge": -(1 << 31), "le": (1 << 31) - 1},
}
_INTEGERS = ("top_k", "n", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_budget")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_WORDS = {
    "gt": ("below minimum value", "below_min_value", ">"),
    "ge": ("below minimum value", "below_min_value", ">="),
    "lt": ("above maximum value", "above_max_value", "<"),
    "le": ("above maximum value", "above_max_value", "<="),
}


def echo(value: object) -> str:
    """A value as it may be repeated in an error message."""
    if isinstance(value, str):
        value = value[:MAX_ECHO]
    elif isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    elif isinstance(value, list | dict):
        return kind_of(cast("object", value))
    text = repr(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def kind_of(value: object) -> str:
    """How JSON names a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def bound_problem(param: str, value: object, key: str, bound: object) -> tuple[str, str]:
    """Message and code for a number beyond ``bound``; ``key`` is gt, ge, lt or le."""
    words, code, sign = _WORDS[key]
    number = "integer" if isinstance(value, int) else "decimal"
    text = f"Invalid '{param}': {number} {words}. Expected a value {sign} {bound}, but got {echo(value)} instead."
    return text, f"{number}_{code}"


def check_bounds(param: str, value: float, bounds: Mapping[str, int]) -> None:
    """Raise InvalidRequestError unless ``value`` is within ``bounds``."""
    for key, bound in bounds.items():
        inside = value >= bound if key == "ge" else value > bound if key == "gt" else value <= bound
        if not inside:  # NaN is inside of nothing
            text, code = bound_problem(param, value, key, bound)
            raise InvalidRequestError(text, param=param, code=code)


def check_type(param: str, value: object, wanted: str, *types: type) -> None:
    """Raise InvalidRequestError unless ``value`` is of one of ``types``; True is no number."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidRequestError(
            f"Invalid type for '{param}': expected {wanted}, but got {kind_of(value)} instead.",
            param=param,
            code="invalid_type",
        )


def check_integer(param: str, value: object, bounds: Mapping[str, int]) -> None:
    """Raise InvalidRequestError unless ``value`` is an integer within ``bounds``."""
    check_type(param, value, "an integer", int)
    check_bounds(param, cast(int, value), bounds)


def check_token_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for ids that the model does not have."""
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequestError(
            f"Invalid '{param}': token ids must be integers from 0 to {vocab_size - 1}.", param=param
        )


def normalized(fields: Any) -> dict[str, Any]:
    """Check the values of a SamplingParams; returns those to replace by their plain form.

    ``stop`` may be one string or any list, ``stop_token_ids`` any list, ``logit_bias`` a dictionary,
    ``top_k`` -1, and a seed negative, as over HTTP. Raises InvalidRequestError naming the field.
    """
    for name in _NUMBERS:
        value = getattr(fields, name)
        check_type(name, value, "a number", int, float)
        if not math.isfinite(value):
            raise InvalidRequestError(f"Invalid '{name}': not a finite number.", param=name)
        check_bounds(name, value, BOUNDS[name])
    for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
        value = getattr(fields, name)
        if value is not None or name in _INTEGERS:
            check_integer(name, value, BOUNDS[name])
    for name in _FLAGS:
        check_type(name, getattr(fields, name), "a boolean", bool)
    plain: dict[str, Any] = {}
    if fields.top_k < 0:
        plain["top_k"] = 0
    if fields.seed is not None and fields.seed < 0:
        plain["seed"] = fields.seed & SEED_MASK
    if fields.stop != ():
        plain["stop"] = _stop_strings(fields.stop)
    if fields.stop_token_ids != ():
        plain["stop_token_ids"] = _stop_tokens(fields.stop_token_ids)
    if fields.logit_bias != ():
        plain["logit_bias"] = _logit_bias(fields.logit_bias)
    return plain


def _entries(param: str, value: Any, most: int) -> tuple[Any, ...]:
    check_type(param, value, "an array", list, tuple, set, frozenset)
    entries = tuple(value)
    if len(entries) > most:
        raise InvalidRequestError(
            f"Invalid '{param}': at most {most} entries are allowed.",
            param=param,
            code="array_above_max_length",
        )
    return entries


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else _entries("stop", stop, MAX_STOP_STRINGS)
    for string in strings:
        check_type("stop", string, "a string or an array of strings", str)
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"Invalid 'stop': a stop string has 1 to {MAX_STOP_LENGTH} characters.", param="stop"
            )
    return strings


def _stop_tokens(ids: object) -> tuple[int, ...]:
    tokens: Sequence[int] = () if ids is None else _entries("stop_token_ids", ids, MAX_STOP_TOKENS)
    for token_id in tokens:
        check_integer("stop_token_ids", token_id, {"ge": 0})
    return tuple(tokens)


def _logit_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    if bias is None:
        return ()
    pairs: Any = cast("dict[int, float]", bias).items() if isinstance(bias, dict) else bias
    entries = _entries("logit_bias", list(pairs), MAX_LOGIT_BIAS)
    for token_id, value in entries:
        check_integer("logit_bias", token_id, {"ge": 0})
        check_type("logit_bias", value, "a number", int, float)
        check_bounds("logit_bias", value, BOUNDS["logit_bias"])
    return tuple((token_id, float(value)) for token_id, value in entries)
