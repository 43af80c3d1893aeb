"""The body of Anthropic's ``POST /v1/messages``, and its translation into a chat.

Blocks become what the chat template reads: ``tool_use`` a tool call, ``tool_result`` a tool message,
``thinking`` reasoning. Parts that only serve accounts, caching hints or client-side housekeeping are taken
and have no effect (:data:`HARMLESS_IN_MESSAGES`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from helios.api.schemas.chat import MAX_TOOLS
from helios.api.schemas.common import JsonObject, RequestModel, StopString, bounded, check_unknown
from helios.errors import InvalidRequestError


class Block(RequestModel):
    """A content block of any kind."""

    harmless = frozenset({"cache_control", "citations", "signature", "caller", "data"})

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


class InputMessage(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(RequestModel):
    """A tool of the client."""

    harmless = frozenset({"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"})

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: JsonObject | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestModel):
    """How tools may be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(RequestModel):
    """A schema for the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(RequestModel):
    """Form of the answer. ``effort`` is taken and has no effect."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(RequestModel):
    """What shapes the prompt."""

    harmless = frozenset(
        {
            "metadata",
            "service_tier",
            "context_management",
            "container",
            "diagnostics",
            "inference_geo",
            "user_profile_id",
            "workspace_id",
            "betas",
            "cache_control",
        }
    )

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[Block], Field(fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat_fields(self, *, can_think: bool) -> dict[str, Any]:
        """The same request as fields of a chat completion. Raises InvalidRequestError."""
        check_unknown(self)
        fields: dict[str, Any] = {"model": self.model, "messages": self._chat_messages()}
        if self.tools:
            fields["tools"] = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        choice = self.tool_choice
        if choice is not None:
            fields["tool_choice"] = _chat_tool_choice(choice)
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if self.thinking is not None:
            wanted = self.thinking.type != "disabled"
            # "adaptive" and "between_tools" allow thinking and do not ask for it.
            if self.thinking.type in ("enabled", "disabled") or can_think:
                fields["enable_thinking"] = wanted
            if fields.get("enable_thinking") and self.thinking.budget_tokens is not None:
                fields["thinking_budget"] = self.thinking.budget_tokens
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema_
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            path = f"messages[{index}].content"
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            elif message.role == "assistant":
                messages.append(_assistant(message.content, path))
            else:
                messages += _user(message.role, message.content, path)
        return messages


class MessagesRequest(CountTokensRequest):
    """A message request."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    priority: int | None = bounded("priority", "Lower runs first; needs HELIOS_SCHEDULING_POLICY=priority.")

    def chat_fields(self, *, can_think: bool) -> dict[str, Any]:
        """The same request as fields of a chat completion."""
        fields = super().chat_fields(can_think=can_think)
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "priority"):
            fields[name] = getattr(self, name)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        return fields


def _text(content: str | list[Block] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _unsupported(block, f"{path}[{index}]")
        texts.append(block.text)
    return "\n".join(texts)


def _user(role: str, blocks: list[Block], path: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "tool_result":
            flush()
            text = _text(block.content, where + ".content")
            messages.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        else:
            raise _unsupported(block, where)
    flush()
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: list[Block], path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.type == "redacted_thinking":
            continue  # encrypted for another server
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use" and block.name:
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _unsupported(block, where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _unsupported(block: Block, path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Invalid '{path}': a block of type '{block.type[:100]}' cannot be used here.",
        param=path,
        code="unsupported_content",
    )


def _chat_tool(tool: AnthropicTool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(
            f"Invalid '{path}': tools of type '{tool.type[:100]}' run on Anthropic's servers only.",
            param=path,
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: AnthropicToolChoice) -> object:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "Missing required parameter: 'tool_choice.name'.", param="tool_choice.name"
            )
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
