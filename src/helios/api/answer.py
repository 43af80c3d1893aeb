"""What every kind of answer needs: ids, JSON pieces, logprob objects, finish reasons."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from helios.errors import RequestError
from helios.runtime.frontend import new_request_id
from helios.runtime.generation import Generation
from helios.runtime.prompt_encoder import PromptEncoder
from helios.runtime.reporting import timings_report, usage_report
from helios.runtime.request import FinishReason, TokenEvent, TokenLogprob

to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# JSON has no -inf, and clients add these numbers up.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What all chunks of one answer repeat. ``created`` is in Unix seconds."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerIdentity:
        """A fresh id such as ``chatcmpl-…``; always made here, so two clients cannot collide."""
        return cls(prefix + new_request_id(), model)


def data(payload: object) -> bytes:
    """One SSE event."""
    return b"data: " + to_json(payload) + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """An error inside a stream, in the nested shape (SDKs swallow the flat one), and the end."""
    return data(error.body()) + DONE


def finish_name(reason: FinishReason, tool_calls: int = 0) -> str:
    """OpenAI's name for why a choice ended."""
    return "tool_calls" if tool_calls and reason is FinishReason.STOP else reason.value


def usage_and_timings(generation: Generation, reasoning_tokens: int = 0) -> dict[str, object]:
    """The ``usage`` and ``timings`` objects of a finished answer."""
    return {
        "usage": usage_report(
            generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens, reasoning_tokens
        ),
        "timings": timings_report(generation.jobs),
    }


def clamp(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprob(entry: TokenLogprob, encoder: PromptEncoder, num_top: int) -> dict[str, Any]:
    """One token in the chat form of logprobs."""
    return {
        **_token_logprob(entry.token_id, entry.logprob, encoder),
        "top_logprobs": [_token_logprob(token, value, encoder) for token, value in entry.top[:num_top]],
    }


def _token_logprob(token_id: int, logprob: float, encoder: PromptEncoder) -> dict[str, Any]:
    return {
        "token": encoder.token_text(token_id),
        "logprob": clamp(logprob),
        "bytes": list(encoder.vocabulary.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """The completions form of logprobs, built up in order."""

    def __init__(self, encoder: PromptEncoder, num_top: int, offset: int = 0) -> None:
        self._encoder = encoder
        self._num_top = num_top
        self.offset = offset  # characters before the next token
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        """Add the tokens of an echoed prompt; the first has no probability."""
        for position, token_id in enumerate(ids):
            entry = entries[position] if position < len(entries) else None
            self._add(token_id, entry)

    def add(self, event: TokenEvent) -> None:
        """Add the tokens of one event."""
        for entry in event.logprobs or ():
            self._add(entry.token_id, entry)

    def _add(self, token_id: int, entry: TokenLogprob | None) -> None:
        text = self._encoder.token_text(token_id)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(self._encoder.vocabulary.token_bytes(token_id).decode(errors="ignore"))
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(clamp(entry.logprob))
        top: dict[str, float] = {}
        for other, value in entry.top[: self._num_top]:
            top.setdefault(self._encoder.token_text(other), clamp(value))
        top.setdefault(text, clamp(entry.logprob))
        self.top_logprobs.append(top)

    def take(self) -> dict[str, Any]:
        """The object for what was added since the last call."""
        taken: dict[str, Any] = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self._clear()
        return taken
