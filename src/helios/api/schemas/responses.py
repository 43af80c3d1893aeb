"""The body of ``POST /v1/responses``, and its translation into a chat.

The stateless subset: the whole conversation comes in ``input``, nothing is stored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from helios.api.schemas.chat import MAX_TOOLS, ContentPart, flatten
from helios.api.schemas.common import (
    HARMLESS,
    JsonObject,
    RequestModel,
    SamplingFields,
    check_unknown,
)
from helios.errors import InvalidRequestError, UnsupportedParameterError


class InputItem(RequestModel):
    """One item of the conversation."""

    harmless = frozenset({"id", "status", "encrypted_content", "summary", "phase"})

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class ResponseTool(RequestModel):
    """A function, in the flat form of this API."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseToolChoice(RequestModel):
    """Forces one function."""

    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(RequestModel):
    """Container of the form."""

    format: TextFormat | None = None


class Reasoning(RequestModel):
    """How much the model thinks. Summaries are not made; the thinking itself is returned."""

    harmless = frozenset({"summary", "generate_summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(SamplingFields):
    """A response request."""

    harmless = HARMLESS | {"include"}

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: JsonObject | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The same request as fields of a chat completion. Raises InvalidRequestError."""
        check_unknown(self)
        for name in ("max_tokens", "n"):
            if getattr(self, name) not in (None, 1 if name == "n" else None):
                raise UnsupportedParameterError(f"Unsupported parameter: '{name}'.", param=name)
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in SamplingFields.model_fields
            if name not in ("stream_options", "max_tokens", "n")
        }
        fields["messages"] = self._chat_messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        form = self.text.format if self.text is not None else None
        if form is not None:
            response_format: dict[str, Any] = {"type": form.type}
            if form.type == "json_schema":
                response_format["json_schema"] = {"name": form.name, "schema": form.schema_}
            fields["response_format"] = response_format
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add_item(messages, item, f"input[{index}]")
        return messages


def _add_item(messages: list[dict[str, Any]], item: InputItem, path: str) -> None:
    if item.type == "message":
        if item.role is None or item.content is None:
            missing = "role" if item.role is None else "content"
            raise _missing(f"{path}.{missing}")
        text = flatten(item.content, f"{path}.content")
        if item.role == "assistant":
            _assistant_turn(messages)["content"] += text
        else:
            messages.append({"role": item.role, "content": text})
    elif item.type == "reasoning":
        parts = item.content or []
        text = parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)
        if text:
            turn = _assistant_turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif item.type == "function_call":
        if not item.name:
            raise _missing(f"{path}.name")
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant_turn(messages).setdefault("tool_calls", []).append(call)
    else:
        if item.output is None:
            raise _missing(f"{path}.output")
        text = flatten(item.output, f"{path}.output")
        messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Reasoning, text and calls that follow each other are one turn of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
