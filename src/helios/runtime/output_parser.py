"""Splits a model's output into reasoning, content and tool calls while it streams.

Structure is recognised by token id: the engine reports where in the text each structural token
(``<think>``, ``</think>``, ``<tool_call>``, ``</tool_call>``) stands, and only those places count. The
same characters spelled by ordinary tokens are plain text, and a structural token can never be cut in two
by the way the text was released.

A tool call's body is ``{"name": …, "arguments": {…}}``. Its name is sent as soon as it is complete and
its arguments as they arrive (the model's own characters, not re-serialised). A body that is not of this
form comes back as content, markers included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from helios.runtime.prompt_encoder import StructuralTokens


class DeltaKind(Enum):
    """What a piece of output is."""

    REASONING = auto()
    CONTENT = auto()
    TOOL_START = auto()  # ``text`` is the function's name
    TOOL_ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of output. ``tool`` is the tool call's index."""

    kind: DeltaKind
    text: str
    tool: int = -1


# The body's opening, up to where the value of "arguments" begins.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class _JsonObjectScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    __slots__ = ("_depth", "_escaped", "_in_string", "complete")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def take(self, text: str) -> int:
        """How many characters of ``text`` belong to the object."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return position + 1
        return len(text)


class _ToolCall:
    """One tool call while its body arrives."""

    __slots__ = ("_unsent", "body", "scanner", "started")

    def __init__(self) -> None:
        self.body = ""
        self._unsent = ""
        self.started = False
        self.scanner = _JsonObjectScanner()

    def add(self, text: str, index: int) -> list[Delta]:
        """Take more of the body; return what can be sent of it already."""
        self.body += text
        if self.started:
            return self._arguments(text, index)
        header = _HEADER.match(self.body)
        name = _json_string(header[1]) if header else None
        if header is None or not name:
            return []
        self.started = True
        start = Delta(DeltaKind.TOOL_START, name, index)
        return [start, *self._arguments(self.body[header.end() :], index)]

    def _arguments(self, text: str, index: int) -> list[Delta]:
        if self.scanner.complete:
            return []
        text = text[: self.scanner.take(text)]
        return [Delta(DeltaKind.TOOL_ARGUMENTS, text, index)] if text else []


def _json_string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def parse_tool_body(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a complete body, or None where it is not a tool call.

    Arguments that are missing, null or an empty string are ``{}``; ``parameters`` is read as well, since
    models trained on other formats write it.
    """
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    fields = cast("dict[str, Any]", call)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return None
    header = _HEADER.match(body)
    if header is not None and _json_string(header[1]) == name:
        rest = body[header.end() :]
        return name, rest[: _JsonObjectScanner().take(rest)]
    arguments = fields.get("arguments", fields.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        parsed = _loads_object(arguments)
        return (name, arguments) if parsed else None
    if arguments in (None, ""):
        return name, "{}"
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _loads_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class _Mode(Enum):
    CONTENT = auto()
    REASONING = auto()
    TOOL = auto()


class OutputParser:
    """Parses one choice's output.

    ``token_lengths`` gives, for each structural id, how many characters its text takes in the output.
    ``incremental`` sends tool arguments as they come; without it a body is judged when it is whole, so a
    truncated call is content instead of half a call.
    """

    def __init__(
        self,
        tokens: StructuralTokens,
        token_lengths: Mapping[int, int],
        *,
        reasoning: bool = True,
        tools: bool = False,
        starts_in_thinking: bool = False,
        incremental: bool = True,
    ) -> None:
        self._tokens = tokens
        self._lengths = token_lengths
        self._reasoning = reasoning
        self._tools = tools
        self._incremental = incremental
        self._mode = _Mode.REASONING if starts_in_thinking and reasoning else _Mode.CONTENT
        self._position = 0  # offset of the first character of _buffer in the whole output
        self._buffer = ""
        self._markers: list[tuple[int, int]] = []
        # Newlines next to a structural token are layout: the ones before it wait here until ordinary text
        # follows, the ones after it are dropped.
        self._newlines = ""
        self._at_start = self._mode is _Mode.REASONING
        self._after_tool = False
        self._call: _ToolCall | None = None
        self._counting_reasoning = self._mode is _Mode.REASONING
        self.num_tool_calls = 0
        self.reasoning_tokens = 0

    def feed(self, text: str, markers: tuple[tuple[int, int], ...] = ()) -> list[Delta]:
        """Take released text and the structural tokens reported with it; return the finished pieces."""
        if (
            not markers
            and not self._markers
            and self._mode is _Mode.CONTENT
            and not self._tools
            and not self._at_start
            and not self._buffer
        ):
            self._position += len(text)
            return [Delta(DeltaKind.CONTENT, text)] if text else []
        self._markers.extend(markers)
        self._buffer += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """End of output: release what was held."""
        deltas = self._advance(final=True)
        if self._mode is _Mode.TOOL:
            deltas += self._end_tool(closed=False)
        elif self._newlines and not self._after_tool and not self._at_start:
            if self._mode is _Mode.CONTENT and not self.num_tool_calls:
                deltas.append(Delta(DeltaKind.CONTENT, self._newlines))
            self._newlines = ""
        return deltas

    def count(self, token_ids: list[int], has_markers: bool) -> None:
        """Count the tokens of an event that belong to reasoning."""
        if not has_markers:
            if self._counting_reasoning:
                self.reasoning_tokens += len(token_ids)
            return
        for token_id in token_ids:
            if token_id == self._tokens.think:
                self._counting_reasoning = self._reasoning
            elif token_id == self._tokens.think_end or (token_id == self._tokens.tool_call and self._tools):
                self._counting_reasoning = False
            elif self._counting_reasoning:
                self.reasoning_tokens += 1

    def reported_stop(self, match: str | int | None) -> str | int | None:
        """The stop to report: the end of a single tool call is this parser's own business."""
        return None if self._tools and match == self._tokens.tool_call_end else match

    def _advance(self, final: bool = False) -> list[Delta]:
        deltas: list[Delta] = []
        while self._markers:
            offset, token_id = self._markers[0]
            length = self._lengths.get(token_id, 0)
            available = self._position + len(self._buffer)
            if available < offset + length and not final:
                break
            del self._markers[0]
            deltas += self._plain(self._take(offset - self._position))
            deltas += self._structural(token_id, self._take(length))
        if not self._markers:
            deltas += self._plain(self._take(len(self._buffer)))
        else:
            before = self._markers[0][0] - self._position
            deltas += self._plain(self._take(min(before, len(self._buffer))))
        return deltas

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._position += len(taken)
        return taken

    def _plain(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._mode is _Mode.TOOL and self._call is not None:
            if self._incremental:
                return self._call.add(text, self.num_tool_calls)
            self._call.body += text
            return []
        if self._after_tool:
            # Between two calls there is only layout.
            text = text.lstrip()
        elif self._at_start:
            text = text.lstrip("\n")
        if not text:
            return []
        self._at_start = self._after_tool = False
        text = self._newlines + text
        self._newlines = ""
        if self._mode is _Mode.REASONING or self._tools:
            kept = text.rstrip("\n")
            self._newlines = text[len(kept) :]
            text = kept
        if not text:
            return []
        kind = DeltaKind.REASONING if self._mode is _Mode.REASONING else DeltaKind.CONTENT
        return [Delta(kind, text)]

    def _structural(self, token_id: int, text: str) -> list[Delta]:
        tokens = self._tokens
        if token_id == tokens.think_end and self._mode is _Mode.REASONING:
            self._enter(_Mode.CONTENT)
            return []
        if token_id == tokens.think and self._reasoning and self._mode is _Mode.CONTENT:
            self._enter(_Mode.REASONING)
            return []
        # A call inside unfinished thinking ends the thinking: models do forget to close it.
        if token_id == tokens.tool_call and self._tools and self._mode is not _Mode.TOOL:
            self._enter(_Mode.TOOL)
            self._call = _ToolCall()
            return []
        if token_id == tokens.tool_call_end and self._mode is _Mode.TOOL:
            return self._end_tool(closed=True)
        return self._plain(text)

    def _enter(self, mode: _Mode) -> None:
        self._mode = mode
        self._newlines = ""
        self._at_start = True
        self._after_tool = False

    def _end_tool(self, *, closed: bool) -> list[Delta]:
        call = self._call
        self._call = None
        self._enter(_Mode.CONTENT)
        if call is None:
            return []
        if call.started:
            self.num_tool_calls += 1
            self._after_tool = True
            return []
        parsed = parse_tool_body(call.body)
        if parsed is None:
            self._at_start = False
            text = f"<tool_call>{call.body}{'</tool_call>' if closed else ''}"
            return [Delta(DeltaKind.CONTENT, text)]
        name, arguments = parsed
        index = self.num_tool_calls
        self.num_tool_calls += 1
        self._after_tool = True
        return [
            Delta(DeltaKind.TOOL_START, name, index),
            Delta(DeltaKind.TOOL_ARGUMENTS, arguments, index),
        ]
