"""Reads and checks a dataset.json of one's own requests (the schema is in benchmarks/README.md)."""

import json
from pathlib import Path
from typing import Any

from benchmarks.workloads import Ask, Message, Session, Workload

_TOP_KEYS = {"version", "name", "defaults", "requests"}
_REQUEST_KEYS = {
    "id",
    "category",
    "messages",
    "prompt",
    "prompt_token_ids",
    "max_tokens",
    "arrival_seconds",
    "body",
}
_DEFAULT_KEYS = {"category", "max_tokens", "body"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


class DatasetError(ValueError):
    """A dataset that breaks the schema; the message names the place, as in requests[3].max_tokens."""


def _fail(place: str, wanted: str, got: object) -> DatasetError:
    shown = repr(got)
    return DatasetError(f"{place}: expected {wanted}, got {shown if len(shown) < 60 else shown[:57] + '...'}")


def _object(value: Any, place: str, allowed: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fail(place, "an object", value)
    unknown = sorted(set(value) - allowed) if allowed is not None else []
    if unknown and allowed is not None:
        raise DatasetError(f"{place}: unknown key {unknown[0]!r}; known: {', '.join(sorted(allowed))}")
    return value


def _messages(value: Any, place: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _fail(place, "a non-empty list of messages", value)
    for index, message in enumerate(value):
        here = f"{place}[{index}]"
        _object(message, here)
        if message.get("role") not in _ROLES:
            raise _fail(f"{here}.role", "one of " + ", ".join(_ROLES), message.get("role"))
        if not isinstance(message.get("content"), str):
            raise _fail(f"{here}.content", "a string", message.get("content"))
    return tuple(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # JSON's true is Python's 1


def _request(value: Any, place: str, defaults: dict[str, Any]) -> tuple[str | None, Session]:
    given = {**defaults, **_object(value, place, _REQUEST_KEYS)}
    kinds = [key for key in ("messages", "prompt", "prompt_token_ids") if key in given]
    if len(kinds) != 1:
        raise DatasetError(
            f"{place}: needs exactly one of messages, prompt, prompt_token_ids; has {kinds or 'none'}"
        )
    max_tokens = given.get("max_tokens", 256)
    if not _is_int(max_tokens) or max_tokens < 1:
        raise _fail(f"{place}.max_tokens", "a whole number of at least 1", max_tokens)
    arrival = given.get("arrival_seconds", 0.0)
    if not (_is_int(arrival) or isinstance(arrival, float)) or not 0 <= arrival < float("inf"):
        raise _fail(f"{place}.arrival_seconds", "a number of at least 0", arrival)
    category = given.get("category", "dataset")
    if not isinstance(category, str):
        raise _fail(f"{place}.category", "a string", category)
    name = given.get("id")
    if name is not None and not isinstance(name, str):
        raise _fail(f"{place}.id", "a string", name)
    body = {
        **_object(defaults.get("body", {}), "defaults.body"),
        **_object(given.get("body", {}), f"{place}.body"),
    }
    prompt = messages = None
    if kinds[0] == "messages":
        messages = _messages(given["messages"], f"{place}.messages")
    elif kinds[0] == "prompt":
        prompt = given["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise _fail(f"{place}.prompt", "a non-empty string", prompt)
    else:
        ids = given["prompt_token_ids"]
        if not isinstance(ids, list) or not ids or not all(_is_int(i) and i >= 0 for i in ids):
            raise _fail(f"{place}.prompt_token_ids", "a non-empty list of token ids", ids)
        prompt = tuple(ids)
    return name, Session((Ask(category, max_tokens, prompt, messages, body),), float(arrival))


def load_dataset(path: Path) -> Workload:
    """The workload in a dataset file, requests in file order. Raises DatasetError or OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{path.name}: not JSON: {error}") from None
    _object(data, path.name, _TOP_KEYS)
    if data.get("version") != 1:
        raise _fail("version", "1", data.get("version"))
    requests = data.get("requests")
    if not isinstance(requests, list) or not requests:
        raise _fail("requests", "a non-empty list", requests)
    defaults = _object(data.get("defaults", {}), "defaults", _DEFAULT_KEYS)
    seen: set[str] = set()
    sessions = []
    for index, value in enumerate(requests):
        name, session = _request(value, f"requests[{index}]", defaults)
        if name is not None and name in seen:
            raise DatasetError(f"requests[{index}].id: {name!r} is used twice")
        seen.update([name] if name is not None else [])
        sessions.append(session)
    sessions.sort(key=lambda session: session.arrival_seconds)
    return Workload(str(data.get("name", path.stem)), 0, tuple(sessions))
