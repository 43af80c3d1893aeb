"""Chat answers: the JSON body and the stream of chunks.

Both are made from the same parser's deltas. The stream's hot path is a dictionary-free join of bytes that
were encoded once per choice around the one string that changes.
"""

from __future__ import annotations

from typing import Any

from helios.api.answer import (
    DONE,
    AnswerIdentity,
    chat_logprob,
    error_event,
    finish_name,
    to_json,
    usage_and_timings,
)
from helios.errors import RequestError
from helios.runtime.frontend import new_request_id
from helios.runtime.generation import Generation
from helios.runtime.output_parser import Delta, DeltaKind, OutputParser
from helios.runtime.prompt_encoder import PromptEncoder
from helios.runtime.reporting import usage_report
from helios.runtime.request import TokenEvent

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"
_PLAIN_END = b',"logprobs":null,"finish_reason":null}]'


def new_call_id() -> str:
    """The id of a tool call."""
    return f"call_{new_request_id()[:24]}"


class ChatStream:
    """Encodes a chat as ``chat.completion.chunk`` events: role, deltas, finish, usage, ``[DONE]``."""

    def __init__(
        self,
        identity: AnswerIdentity,
        generation: Generation,
        parsers: list[OutputParser],
        encoder: PromptEncoder,
        *,
        num_top_logprobs: int | None,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._identity = identity
        self._generation = generation
        self._parsers = parsers
        self._encoder = encoder
        self._num_top = num_top_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        head = {
            "id": identity.id,
            "object": CHUNK_OBJECT,
            "created": identity.created,
            "model": identity.model,
        }
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._openings = [
            self._head + b'{"index":%d,"delta":' % index for index in range(generation.num_choices)
        ]
        self._started = [False] * generation.num_choices
        self._pending_logprobs: list[list[dict[str, Any]]] = [[] for _ in parsers]

    def encode(self, events: list[tuple[int, TokenEvent]]) -> bytes:
        """Chunks for some events."""
        out: list[bytes] = []
        for choice, event in events:
            self._encode_event(choice, event, out)
        return b"".join(out)

    def _encode_event(self, choice: int, event: TokenEvent, out: list[bytes]) -> None:
        parser = self._parsers[choice]
        if not self._started[choice]:
            self._started[choice] = True
            out.append(self._chunk(choice, b'{"role":"assistant","content":""}'))
        parser.count(event.token_ids, bool(event.markers))
        deltas = parser.feed(event.text, event.markers)
        if event.logprobs and self._num_top is not None:
            self._pending_logprobs[choice] += [
                chat_logprob(entry, self._encoder, self._num_top) for entry in event.logprobs
            ]
        if event.finish_reason is not None:
            deltas = deltas + parser.finish()
        for delta in deltas:
            out.append(self._chunk(choice, _delta_json(delta)))
        if event.finish_reason is not None:
            name = finish_name(event.finish_reason, parser.num_tool_calls)
            match = parser.reported_stop(event.stop_match)
            stop = b',"stop_reason":' + to_json(match) if match is not None else b""
            out.append(self._chunk(choice, b"{}", b'"' + name.encode() + b'"' + stop))

    def _chunk(self, choice: int, delta: bytes, finish: bytes = b"") -> bytes:
        pending = self._pending_logprobs[choice]
        if not finish and not pending:
            end = _PLAIN_END
        else:
            logprobs = to_json({"content": pending, "refusal": None}) if pending else b"null"
            self._pending_logprobs[choice] = []
            end = b',"logprobs":' + logprobs + b',"finish_reason":' + (finish or b"null") + b"}]"
        if self._continuous_usage:
            end += b',"usage":' + to_json(self._usage())
        return self._openings[choice] + delta + end + b"}\n\n"

    def _usage(self) -> dict[str, object]:
        generation = self._generation
        return usage_report(
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
            sum(parser.reasoning_tokens for parser in self._parsers),
        )

    def end(self) -> bytes:
        """The usage chunk, where it was asked for, and ``[DONE]``."""
        if not self._include_usage:
            return DONE
        reasoning = sum(parser.reasoning_tokens for parser in self._parsers)
        fields = to_json(usage_and_timings(self._generation, reasoning))
        return self._head + b"]," + fields[1:] + b"\n\n" + DONE

    def error(self, error: RequestError) -> bytes:
        """An error event and the end."""
        return error_event(error)


def _delta_json(delta: Delta) -> bytes:
    text = to_json(delta.text)
    if delta.kind is DeltaKind.CONTENT:
        return b'{"content":' + text + b"}"
    if delta.kind is DeltaKind.REASONING:
        return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
    if delta.kind is DeltaKind.TOOL_START:
        call = b'{"index":%d,"id":"%b","type":"function","function":{"name":%b,"arguments":""}}'
        return b'{"tool_calls":[' + call % (delta.tool, new_call_id().encode(), text) + b"]}"
    return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (delta.tool, text)


class CollectedChoice:
    """One choice while it is collected."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_match: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Take one piece of output."""
        match delta.kind:
            case DeltaKind.CONTENT:
                self.content.append(delta.text)
            case DeltaKind.REASONING:
                self.reasoning.append(delta.text)
            case DeltaKind.TOOL_START:
                function = {"name": delta.text, "arguments": ""}
                self.tool_calls.append({"id": new_call_id(), "type": "function", "function": function})
            case DeltaKind.TOOL_ARGUMENTS:
                self.tool_calls[delta.tool]["function"]["arguments"] += delta.text

    def message(self) -> dict[str, Any]:
        """The assistant message."""
        content = "".join(self.content)
        reasoning = "".join(self.reasoning) or None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.tool_calls else ""),
            "refusal": None,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ChatCollector:
    """Collects a chat into one ``chat.completion`` object."""

    def __init__(
        self,
        identity: AnswerIdentity,
        generation: Generation,
        parsers: list[OutputParser],
        encoder: PromptEncoder,
        num_top_logprobs: int | None,
    ) -> None:
        self._identity = identity
        self._generation = generation
        self._parsers = parsers
        self._encoder = encoder
        self._num_top = num_top_logprobs
        self.choices = [CollectedChoice() for _ in parsers]

    async def collect(self) -> dict[str, Any]:
        """Wait for the end; the ``chat.completion`` object. Raises what ended the request."""
        await self.gather()
        return self._body()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking in all choices."""
        return sum(parser.reasoning_tokens for parser in self._parsers)

    async def gather(self) -> None:
        """Wait for the end; ``choices`` then hold the output. Raises what ended the request."""
        while not self._generation.ended:
            for index, event in await self._generation.next_events():
                self._add(self.choices[index], self._parsers[index], event)

    def _add(self, choice: CollectedChoice, parser: OutputParser, event: TokenEvent) -> None:
        parser.count(event.token_ids, bool(event.markers))
        deltas = parser.feed(event.text, event.markers)
        if event.finish_reason is not None:
            deltas = deltas + parser.finish()
            choice.finish_reason = finish_name(event.finish_reason, parser.num_tool_calls)
            choice.stop_match = parser.reported_stop(event.stop_match)
        for delta in deltas:
            choice.add(delta)
        if event.logprobs and self._num_top is not None:
            choice.logprobs += [chat_logprob(entry, self._encoder, self._num_top) for entry in event.logprobs]

    def _body(self) -> dict[str, Any]:
        return {
            "id": self._identity.id,
            "object": OBJECT,
            "created": self._identity.created,
            "model": self._identity.model,
            "choices": [
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": None
                    if self._num_top is None
                    else {"content": choice.logprobs, "refusal": None},
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_match,
                }
                for index, choice in enumerate(self.choices)
            ],
            **usage_and_timings(self._generation, self.reasoning_tokens),
        }
