"""Anthropic's answers: one message, or its stream of events.

A stream is a message with content blocks that open, grow and close one after the other; a parser's deltas
map onto them directly.
"""

from __future__ import annotations

import json
from typing import Any

from helios.api.answer import AnswerIdentity, to_json
from helios.api.chat_answer import ChatCollector, CollectedChoice
from helios.api.errors import error_body
from helios.errors import RequestError
from helios.runtime.frontend import new_request_id
from helios.runtime.generation import Generation
from helios.runtime.output_parser import Delta, DeltaKind, OutputParser
from helios.runtime.request import FinishReason, TokenEvent

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _usage(generation: Generation, output_tokens: int) -> dict[str, int]:
    """Anthropic counts cached prompt tokens apart from ``input_tokens``."""
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def _stop(finish: str, match: str | int | None) -> dict[str, str | None]:
    if finish == "stop" and isinstance(match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": match}
    return {"stop_reason": _STOP_REASONS.get(finish, "end_turn"), "stop_sequence": None}


def _message(
    identity: AnswerIdentity, content: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": identity.id,
        "type": "message",
        "role": "assistant",
        "model": identity.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


async def collect_message(
    identity: AnswerIdentity, generation: Generation, collector: ChatCollector
) -> dict[str, Any]:
    """Wait for the end; the whole message. Raises what ended the request."""
    await collector.gather()
    choice = collector.choices[0]
    message = _message(identity, _content(choice), _usage(generation, generation.completion_tokens))
    return {**message, **_stop(choice.finish_reason or "stop", choice.stop_match)}


def _content(choice: CollectedChoice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": "".join(choice.reasoning), "signature": ""})
    if choice.content:
        blocks.append({"type": "text", "text": "".join(choice.content)})
    for call in choice.tool_calls:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": _tool_id(), "name": function["name"], "input": arguments})
    return blocks


def _tool_id() -> str:
    return f"toolu_{new_request_id()[:24]}"


def event(kind: str, **fields: Any) -> bytes:
    """One named event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


class MessageStream:
    """Encodes a message's events."""

    def __init__(self, identity: AnswerIdentity, generation: Generation, parser: OutputParser) -> None:
        self._identity = identity
        self._generation = generation
        self._parser = parser
        self._started = False
        self._block = -1
        self._open: tuple[DeltaKind, int] | None = None
        self._finish: dict[str, str | None] = {}

    def encode(self, events: list[tuple[int, TokenEvent]]) -> bytes:
        """The events for some tokens."""
        out: list[bytes] = []
        if not self._started:
            self._started = True
            message = _message(self._identity, [], _usage(self._generation, 0))
            out.append(event("message_start", message=message))
        for _, token in events:
            deltas = self._parser.feed(token.text, token.markers)
            if token.finish_reason is not None:
                deltas = deltas + self._parser.finish()
                self._set_finish(token.finish_reason, self._parser.reported_stop(token.stop_match))
            for delta in deltas:
                self._encode_delta(delta, out)
        return b"".join(out)

    def _set_finish(self, reason: FinishReason, match: str | int | None) -> None:
        calls = self._parser.num_tool_calls and reason is FinishReason.STOP
        self._finish = _stop("tool_calls" if calls else reason.value, match)

    def _encode_delta(self, delta: Delta, out: list[bytes]) -> None:
        kind = DeltaKind.TOOL_START if delta.kind is DeltaKind.TOOL_ARGUMENTS else delta.kind
        if self._open != (kind, delta.tool):
            self._close(out)
            self._block += 1
            self._open = (kind, delta.tool)
            out.append(event("content_block_start", index=self._block, content_block=_empty_block(delta)))
        if delta.kind is not DeltaKind.TOOL_START:
            out.append(event("content_block_delta", index=self._block, delta=_block_delta(delta)))

    def _close(self, out: list[bytes]) -> None:
        if self._open is not None:
            out.append(event("content_block_stop", index=self._block))
            self._open = None

    def end(self) -> bytes:
        """Close the block and the message."""
        out: list[bytes] = []
        self._close(out)
        usage = _usage(self._generation, self._generation.completion_tokens)
        out.append(event("message_delta", delta=self._finish, usage=usage))
        out.append(event("message_stop"))
        return b"".join(out)

    def error(self, error: RequestError) -> bytes:
        """An error event, which ends the stream."""
        return b"event: error\ndata: " + to_json(error_body(error, "/v1/messages")) + b"\n\n"


def _empty_block(delta: Delta) -> dict[str, Any]:
    match delta.kind:
        case DeltaKind.CONTENT:
            return {"type": "text", "text": ""}
        case DeltaKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case _:
            return {"type": "tool_use", "id": _tool_id(), "name": delta.text, "input": {}}


def _block_delta(delta: Delta) -> dict[str, str]:
    match delta.kind:
        case DeltaKind.CONTENT:
            return {"type": "text_delta", "text": delta.text}
        case DeltaKind.REASONING:
            return {"type": "thinking_delta", "thinking": delta.text}
        case _:
            return {"type": "input_json_delta", "partial_json": delta.text}
