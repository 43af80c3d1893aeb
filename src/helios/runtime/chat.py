"""The model's own chat template, rendered in a sandbox.

The rendered text is byte-equal to what Hugging Face's ``apply_chat_template`` gives for the same
messages: JSON is written without HTML or ASCII escapes, blocks are trimmed, and ``raise_exception`` and
``strftime_now`` exist. Templates come with the model only; a client can never send one, since a template
is a program.

Rendering can also mark the control tokens that occur inside the *caller's* strings
(:class:`ControlTokenMarks`), so that the tokenizer can tell a user who types ``<|im_end|>`` from the
template that writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from helios.errors import InvalidRequestError, StartupError, UnsupportedParameterError

Message = dict[str, Any]
ToolSpec = dict[str, Any]

# Noncharacters: Unicode reserves them for a program's internal use. Those that a request contains are
# passed over, so the marks can never be forged.
_MARK_CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Template variables that Helios sets itself; chat_template_kwargs must not replace them.
_RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "bos_token",
        "eos_token",
    }
)
# What a template can raise when the messages are not of the form that it expects.
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
Thinking = Literal["switchable", "always", "never"]


class _GenerationBlock(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: training templates use it; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the shape that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@dataclass(frozen=True, slots=True)
class ControlTokenMarks:
    """Marks that stand beside a control token's text to say "this is text, not a control token".

    An opening token gets ``after`` behind it, a closing one (``</…>``) ``before`` in front of it, so that
    a template's own tests (``startswith('<tool_response>')``, ``endswith('</tool_response>')``) see what
    they would see without marks.
    """

    before: str
    after: str

    def strip(self, text: str) -> str:
        """The text without any mark."""
        return text.replace(self.before, "").replace(self.after, "")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered prompt; ``marks`` is set only where the caller's strings hold control tokens."""

    text: str
    marks: ControlTokenMarks | None = None

    @property
    def plain(self) -> str:
        return self.marks.strip(self.text) if self.marks else self.text


class ChatTemplate:
    """One compiled chat template.

    ``special_tokens`` are the named tokens that templates may print (``bos_token``, ``eos_token`` …);
    ``control_tokens`` the texts of the tokenizer's added tokens with whether each is *special*.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Mapping[str, bool] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportArgumentType]
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens or {})
        tokens = dict(control_tokens or {})
        self._any_control = _alternation(tokens)
        self._special_control = _alternation(text for text, special in tokens.items() if special)
        # Templates that print arguments only through tojson (Qwen2.5) need an object, not its JSON text.
        self.prints_argument_strings = "arguments is string" in source
        self.thinking: Thinking = self._find_thinking()

    def _find_thinking(self) -> Thinking:
        if "enable_thinking" in self.variables:
            return "switchable"
        try:
            tail = self.render([{"role": "user", "content": "x"}]).text[-20:]
        except InvalidRequestError:
            return "never"
        return "always" if tail.rstrip().endswith("<think>") else "never"

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        mark_control_tokens: bool = False,
    ) -> RenderedChat:
        """Render a dialogue.

        With ``continue_final_message`` the text ends right after the last message's content, so the model
        goes on writing it. Raises InvalidRequestError where the template refuses the messages.
        """
        marks = self._choose_marks(messages, tools) if mark_control_tokens else None
        if marks is not None:
            messages = [self._mark_message(message, marks) for message in messages]
            tools = cast("list[ToolSpec] | None", _mark(tools, self._any_control, marks))
        end_mark = None
        if continue_final_message:
            end_mark = _unused_marks(json.dumps([messages, tools], ensure_ascii=False), 1)[0]
            last = dict(messages[-1])
            last["content"] = (last.get("content") or "") + end_mark
            messages = [*messages[:-1], last]
        variables: dict[str, Any] = {**self._special_tokens, **(template_kwargs or {})}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **variables,
            )
        except SecurityError:
            raise InvalidRequestError("The chat template did something unsafe.", param="messages") from None
        except _TEMPLATE_FAILURES as error:
            reason = str(error)[:200] or type(error).__name__
            raise InvalidRequestError(
                f"The chat template refuses these messages: {reason}", param="messages"
            ) from None
        if end_mark is not None:
            text = text[: text.rindex(end_mark)] if end_mark in text else text
        return RenderedChat(text, marks)

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse template variables that are Helios's own or that this template never reads."""
        for name in kwargs:
            param = f"chat_template_kwargs.{name[:100]}"
            if name in _RESERVED_VARIABLES:
                raise UnsupportedParameterError(f"'{param}' cannot be set by a request.", param=param)
            if name not in self.variables and kwargs[name] is not None:
                raise UnsupportedParameterError(
                    f"'{param}' has no effect: this model's chat template does not read it.",
                    param=param,
                )

    def _choose_marks(
        self, messages: list[Message], tools: list[ToolSpec] | None
    ) -> ControlTokenMarks | None:
        """Marks for this request, or None where no string of the caller holds a control token."""
        if not any(_contains(message, self._any_control) for message in messages) and not (
            tools and _contains(tools, self._any_control)
        ):
            return None
        before, after = _unused_marks(json.dumps([messages, tools], ensure_ascii=False), 2)
        return ControlTokenMarks(before, after)

    def _mark_message(self, message: Message, marks: ControlTokenMarks) -> Message:
        # An assistant's turn is model output sent back: its <think> and <tool_call> mean what they say,
        # and templates look for them. What ends a turn (special tokens) never does.
        pattern = self._special_control if message.get("role") == "assistant" else self._any_control
        return {
            key: value if key == "role" else _mark(value, pattern, marks) for key, value in message.items()
        }


def _alternation(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _contains(value: Any, pattern: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return any(_contains(key, pattern) or _contains(entry, pattern) for key, entry in entries.items())
    if isinstance(value, list):
        return any(_contains(entry, pattern) for entry in cast("list[Any]", value))
    return False


def _mark(value: Any, pattern: re.Pattern[str], marks: ControlTokenMarks) -> Any:
    if isinstance(value, str):

        def beside(match: re.Match[str]) -> str:
            token = match[0]
            return marks.before + token if token.startswith("</") else token + marks.after

        return pattern.sub(beside, value)
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {_mark(key, pattern, marks): _mark(entry, pattern, marks) for key, entry in entries.items()}
    if isinstance(value, list):
        return [_mark(entry, pattern, marks) for entry in cast("list[Any]", value)]
    return value


def _unused_marks(text: str, count: int) -> list[str]:
    free = [mark for mark in _MARK_CANDIDATES if mark not in text][:count]
    if len(free) < count:
        raise InvalidRequestError("The messages use every Unicode noncharacter.", param="messages")
    return free


def load_chat_template(folder: Path, control_tokens: Mapping[str, bool]) -> ChatTemplate | None:
    """Read the template of a model folder, or None where the model has none (a base model).

    ``chat_template.jinja`` wins over the entry in ``tokenizer_config.json``; of several named ones the
    ``default`` is taken.
    """
    config_path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
    source: Any = config.get("chat_template")
    template_path = folder / "chat_template.jinja"
    if template_path.exists():
        source = template_path.read_text("utf-8")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", source)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return ChatTemplate(source, special_tokens=special, control_tokens=control_tokens)
