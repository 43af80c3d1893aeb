"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr

from helios.api.schemas.common import (
    JsonObject,
    RequestModel,
    SamplingFields,
    StructuredFields,
)
from helios.config import Settings
from helios.errors import InvalidRequestError, UnsupportedParameterError
from helios.runtime.chat import ChatTemplate, Message, ToolSpec

MAX_TOOLS = 512


class ContentPart(RequestModel):
    """One part of a message's content. Only text parts can be served."""

    harmless = frozenset({"annotations", "cache_control", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(RequestModel):
    """The function and its arguments, as JSON text or as an object."""

    name: str
    arguments: str | JsonObject | None = None


class ToolCall(RequestModel):
    """A call that the assistant made earlier."""

    harmless = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One message of the dialogue."""

    # Keys of SDK objects sent back as they came; none of them reaches the prompt.
    harmless = frozenset(
        {"id", "refusal", "annotations", "audio", "function_call", "name", "status", "index"}
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def to_template(self, path: str, *, parse_arguments: bool) -> Message:
        """The message as a chat template reads it. Raises InvalidRequestError naming the field."""
        if self.content is None and self.role not in ("assistant", "tool"):
            raise InvalidRequestError(
                f"Invalid type for '{path}.content': expected a string or an array, but got null instead.",
                param=f"{path}.content",
                code="invalid_type",
            )
        message: Message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": flatten(self.content, f"{path}.content"),
        }
        if self.role == "assistant":
            reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            if self.tool_calls:
                message["tool_calls"] = [
                    _call_for_template(call, f"{path}.tool_calls[{index}]", parse_arguments)
                    for index, call in enumerate(self.tool_calls)
                ]
        elif self.tool_calls:
            raise InvalidRequestError(
                f"'{path}.tool_calls' is only allowed in assistant messages.", param=f"{path}.tool_calls"
            )
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def flatten(content: str | list[ContentPart] | None, path: str) -> str:
    """Text of a message's content; a template that is given parts drops them silently."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise InvalidRequestError(
                f"Invalid '{where}': content of type '{part.type[:100]}' is not supported by this model; "
                "only text is.",
                param=where,
                code="unsupported_content",
            )
        if text is None:
            raise InvalidRequestError(
                f"Missing required parameter: '{where}.text'.",
                param=f"{where}.text",
                code="missing_required_parameter",
            )
        texts.append(text)
    return "\n".join(texts)


def _call_for_template(call: ToolCall, path: str, parse_arguments: bool) -> dict[str, Any]:
    arguments: str | JsonObject = call.function.arguments if call.function.arguments is not None else "{}"
    if parse_arguments and isinstance(arguments, str):
        try:
            parsed: object = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise InvalidRequestError(
                f"Invalid '{path}.function.arguments': not a JSON object.",
                param=f"{path}.function.arguments",
            )
        arguments = cast("JsonObject", parsed)
    function = {"name": call.function.name, "arguments": arguments}
    entry: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call.id, **entry} if call.id is not None else entry


class FunctionSpec(RequestModel):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(RequestModel):
    """The name inside a named tool choice."""

    name: str


class NamedToolChoice(RequestModel):
    """Forces one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields, StructuredFields):
    """A chat completion request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="Older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = Field(None, description="Same as in chat_template_kwargs.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: int | None = Field(None, ge=0, description="Most tokens of thinking.")
    thinking_token_budget: int | None = Field(None, ge=0, description="vLLM's name of thinking_budget.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    _raw_tools: list[ToolSpec] | None = PrivateAttr(default=None)

    def check(self, settings: Settings) -> None:
        """The rules that span fields. Raises InvalidRequestError."""
        super().check(settings)
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "'add_generation_prompt' and 'continue_final_message' cannot both be true.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise InvalidRequestError(
                    "'continue_final_message' needs a last message of the assistant.",
                    param="continue_final_message",
                )
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise InvalidRequestError("Invalid 'tools': two functions have the same name.", param="tools")
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice):
            if choice.function.name not in names:
                raise InvalidRequestError(
                    f"Invalid 'tool_choice': no tool is named '{choice.function.name[:100]}'.",
                    param="tool_choice",
                )
        elif choice == "required" and not names:
            raise InvalidRequestError("'tool_choice' 'required' needs 'tools'.", param="tool_choice")

    def answer_tokens(self) -> int | None:
        """The explicit limit on the answer's length, if any."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def template_messages(self, template: ChatTemplate) -> list[Message]:
        """The messages as the template reads them."""
        parse = not template.prints_argument_strings
        return [
            message.to_template(f"messages[{index}]", parse_arguments=parse)
            for index, message in enumerate(self.messages)
        ]

    def template_tools(self) -> list[ToolSpec] | None:
        """The tools as they were sent, for the template; None where none may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return self._raw_tools or [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def keep_raw_tools(self, body: object) -> None:
        """Remember the tools as they were sent: their JSON is part of the prompt, key order included."""
        tools = cast("JsonObject", body).get("tools") if isinstance(body, dict) else None
        self._raw_tools = cast("list[ToolSpec]", tools) if isinstance(tools, list) else None

    def thinking(self, template: ChatTemplate, default: bool) -> bool | None:
        """The template's ``enable_thinking`` for this request; None where the template has no such switch.

        Raises where the request asks for what the model cannot do.
        """
        kwargs = self.chat_template_kwargs or {}
        asked: list[tuple[str, bool]] = []
        nested = kwargs.get("enable_thinking")
        if nested is not None:
            if not isinstance(nested, bool):
                raise InvalidRequestError(
                    "Invalid type for 'chat_template_kwargs.enable_thinking': expected a boolean.",
                    param="chat_template_kwargs.enable_thinking",
                    code="invalid_type",
                )
            asked.append(("chat_template_kwargs.enable_thinking", nested))
        if self.enable_thinking is not None:
            asked.append(("enable_thinking", self.enable_thinking))
        if self.reasoning_effort is not None:
            asked.append(("reasoning_effort", self.reasoning_effort != "none"))
        return resolve_thinking(asked, template, default)


def resolve_thinking(asked: list[tuple[str, bool]], template: ChatTemplate, default: bool) -> bool | None:
    """Settle the several ways of asking for thinking; (field, wanted) pairs, the first one wins."""
    if template.thinking == "switchable":
        return asked[0][1] if asked else default
    always = template.thinking == "always"
    for param, wanted in asked:
        if wanted != always:
            words = "always thinks" if always else "does not think"
            raise UnsupportedParameterError(
                f"'{param}' cannot be {'on' if wanted else 'off'}: this model {words}.", param=param
            )
    return None
