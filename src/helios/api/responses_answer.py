"""Answers of ``/v1/responses``: one response object, or its stream of events.

The output is a list of items (reasoning, message, function calls). In a stream each item is announced,
grows, and is sent whole when it is done; the last event carries the whole response.
"""

from __future__ import annotations

from typing import Any

from helios.api.answer import AnswerIdentity, to_json
from helios.api.chat_answer import ChatCollector, CollectedChoice, new_call_id
from helios.api.schemas.responses import ResponsesRequest
from helios.errors import RequestError
from helios.runtime.frontend import new_request_id
from helios.runtime.generation import Generation
from helios.runtime.output_parser import Delta, DeltaKind, OutputParser
from helios.runtime.reporting import timings_report
from helios.runtime.request import FinishReason, SamplingParams, TokenEvent

Item = dict[str, Any]


class ResponseShape:
    """The response object of one request, at any stage."""

    def __init__(self, identity: AnswerIdentity, generation: Generation, body: ResponsesRequest) -> None:
        self._generation = generation
        params: SamplingParams = generation.job.params
        sent = body.model_dump(exclude_none=True, by_alias=True)
        self._base: dict[str, Any] = {
            "id": identity.id,
            "object": "response",
            "created_at": identity.created,
            "model": identity.model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": sent.get("metadata", {}),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": sent.get("text") or {"format": {"type": "text"}},
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": sent.get("tools", []),
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": sent.get("user"),
        }

    def unfinished(self) -> dict[str, Any]:
        """While it runs."""
        return {
            **self._base,
            "status": "in_progress",
            "output": [],
            "incomplete_details": None,
            "usage": None,
        }

    def finished(self, output: list[Item], finish: str | None, reasoning_tokens: int) -> dict[str, Any]:
        """When every item is done."""
        generation = self._generation
        cut = finish == FinishReason.LENGTH.value
        return {
            **self._base,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": generation.prompt_tokens,
                "input_tokens_details": {"cached_tokens": generation.cached_tokens},
                "output_tokens": generation.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": generation.prompt_tokens + generation.completion_tokens,
            },
            "timings": timings_report(generation.jobs),
        }


def _item(kind: DeltaKind, text: str, *, name: str = "", status: str = "completed") -> Item:
    """One output item. ``text`` is its text, its thinking, or its arguments."""
    unique = new_request_id()
    if kind is DeltaKind.REASONING:
        content = [_part(kind, text)] if text else []
        return {
            "type": "reasoning",
            "id": f"rs_{unique}",
            "summary": [],
            "content": content,
            "status": status,
        }
    if kind is DeltaKind.CONTENT:
        content = [_part(kind, text)] if text else []
        return {
            "type": "message",
            "id": f"msg_{unique}",
            "role": "assistant",
            "content": content,
            "status": status,
        }
    return {
        "type": "function_call",
        "id": f"fc_{unique}",
        "call_id": new_call_id(),
        "name": name,
        "arguments": text,
        "status": status,
    }


def _part(kind: DeltaKind, text: str) -> dict[str, Any]:
    if kind is DeltaKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def collect_response(shape: ResponseShape, collector: ChatCollector) -> dict[str, Any]:
    """Wait for the end; the whole response. Raises what ended the request."""
    await collector.gather()
    choice = collector.choices[0]
    return shape.finished(_output(choice), choice.finish_reason, collector.reasoning_tokens)


def _output(choice: CollectedChoice) -> list[Item]:
    items: list[Item] = []
    if choice.reasoning:
        items.append(_item(DeltaKind.REASONING, "".join(choice.reasoning)))
    if choice.content or not choice.tool_calls:
        items.append(_item(DeltaKind.CONTENT, "".join(choice.content)))
    for call in choice.tool_calls:
        function = call["function"]
        items.append(_item(DeltaKind.TOOL_START, function["arguments"], name=function["name"]))
    return items


class ResponseStream:
    """Encodes a response's events, numbered in order."""

    def __init__(self, shape: ResponseShape, parser: OutputParser) -> None:
        self._shape = shape
        self._parser = parser
        self._number = -1
        self._output: list[Item] = []
        self._open: tuple[DeltaKind, int] | None = None
        self._text: list[str] = []
        self._finish: str | None = None
        self._started = False

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        payload = {"type": kind, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(payload))

    def encode(self, events: list[tuple[int, TokenEvent]]) -> bytes:
        """The events for some tokens."""
        out: list[bytes] = []
        if not self._started:
            self._started = True
            response = self._shape.unfinished()
            out.append(self._event("response.created", response=response))
            out.append(self._event("response.in_progress", response=response))
        for _, token in events:
            self._parser.count(token.token_ids, bool(token.markers))
            deltas = self._parser.feed(token.text, token.markers)
            if token.finish_reason is not None:
                deltas = deltas + self._parser.finish()
                self._finish = token.finish_reason.value
            for delta in deltas:
                self._encode_delta(delta, out)
        return b"".join(out)

    def _encode_delta(self, delta: Delta, out: list[bytes]) -> None:
        kind = DeltaKind.TOOL_START if delta.kind is DeltaKind.TOOL_ARGUMENTS else delta.kind
        if self._open != (kind, delta.tool):
            self._close(out)
            self._begin(kind, delta, out)
        if delta.kind is DeltaKind.TOOL_START:
            return
        self._text.append(delta.text)
        where = self._place()
        if kind is DeltaKind.CONTENT:
            fields: dict[str, Any] = {**where, "delta": delta.text, "content_index": 0, "logprobs": []}
            out.append(self._event("response.output_text.delta", **fields))
        elif kind is DeltaKind.REASONING:
            out.append(
                self._event("response.reasoning_text.delta", **where, content_index=0, delta=delta.text)
            )
        else:
            out.append(self._event("response.function_call_arguments.delta", **where, delta=delta.text))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _begin(self, kind: DeltaKind, delta: Delta, out: list[bytes]) -> None:
        self._open = (kind, delta.tool)
        self._text = []
        name = delta.text if kind is DeltaKind.TOOL_START else ""
        self._output.append(_item(kind, "", name=name, status="in_progress"))
        index = len(self._output) - 1
        out.append(self._event("response.output_item.added", output_index=index, item=self._output[-1]))
        if kind is not DeltaKind.TOOL_START:
            part = _part(kind, "")
            out.append(
                self._event("response.content_part.added", **self._place(), content_index=0, part=part)
            )

    def _close(self, out: list[bytes]) -> None:
        if self._open is None:
            return
        kind, text, where = self._open[0], "".join(self._text), self._place()
        item = self._output[-1]
        item["status"] = "completed"
        self._open = None
        if kind is DeltaKind.TOOL_START:
            item["arguments"] = text
            name = item["name"]
            out.append(
                self._event("response.function_call_arguments.done", **where, name=name, arguments=text)
            )
        else:
            part = _part(kind, text)
            item["content"] = [part]
            if kind is DeltaKind.CONTENT:
                fields: dict[str, Any] = {**where, "content_index": 0, "text": text, "logprobs": []}
                out.append(self._event("response.output_text.done", **fields))
            else:
                out.append(self._event("response.reasoning_text.done", **where, content_index=0, text=text))
            out.append(self._event("response.content_part.done", **where, content_index=0, part=part))
        out.append(self._event("response.output_item.done", output_index=where["output_index"], item=item))

    def end(self) -> bytes:
        """Close the last item and send the whole response."""
        out: list[bytes] = []
        if not self._output:
            self._begin(DeltaKind.CONTENT, Delta(DeltaKind.CONTENT, ""), out)
        self._close(out)
        response = self._shape.finished(self._output, self._finish, self._parser.reasoning_tokens)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        out.append(self._event(kind, response=response))
        return b"".join(out)

    def error(self, error: RequestError) -> bytes:
        """An error event, which ends the stream; the nested object is what SDKs raise."""
        return self._event("error", code=error.code, message=error.message, param=error.param, **error.body())
