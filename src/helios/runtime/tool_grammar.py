"""The grammar of a forced tool call.

``tool_choice`` "required" or a named function binds the output to one or more calls in the form that Qwen
models are trained on: the ``<tool_call>`` token, a line with the JSON of the call, the ``</tool_call>``
token. The text is llguidance's Lark dialect; tokens are named by id, so their spelling in ordinary
characters does not satisfy it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from helios.errors import UnsupportedParameterError
from helios.runtime.prompt_encoder import StructuralTokens
from helios.runtime.request import Grammar

# One fixed layout: what the model learned, and no room for a loop of white space.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_call_grammar(
    functions: Sequence[dict[str, Any]],
    tokens: StructuralTokens,
    *,
    parallel: bool,
    after_thinking: bool,
) -> Grammar:
    """A grammar that allows calls of these functions only.

    ``functions`` are OpenAI's function objects (``name``, ``parameters``). With ``after_thinking`` it
    binds from ``</think>`` on. Raises UnsupportedParameterError for a model without tool-call tokens.
    """
    calls = 'call ("\\n" call)*' if parallel else "call"
    rules = _call_rules(functions, tokens)
    return _grammar(calls, rules, tokens, after_thinking)


def tool_call_or_json_grammar(
    functions: Sequence[dict[str, Any]],
    schema: dict[str, Any],
    tokens: StructuralTokens,
    *,
    after_thinking: bool,
) -> Grammar:
    """A grammar that allows calls of these functions, or an answer that follows the JSON schema."""
    answer = json.dumps({**schema, "x-guidance": _LAYOUT}, ensure_ascii=False)
    rules = [*_call_rules(functions, tokens), f"answer: %json {answer}"]
    return _grammar('(call ("\\n" call)* | answer)', rules, tokens, after_thinking)


def _grammar(start: str, rules: list[str], tokens: StructuralTokens, after_thinking: bool) -> Grammar:
    # After </think> models write an empty line first.
    gap = "/\\n{0,2}/ " if after_thinking else ""
    text = "\n".join([f"start: {gap}{start}", *rules]) + "\n"
    return Grammar("lark", text, tokens.think_end if after_thinking else None)


def _call_rules(functions: Sequence[dict[str, Any]], tokens: StructuralTokens) -> list[str]:
    if tokens.tool_call is None or tokens.tool_call_end is None:
        raise UnsupportedParameterError("This model has no tool-call tokens.", param="tool_choice")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, f"{index}_", definitions) for index, function in enumerate(functions)]
    body = json.dumps({"x-guidance": _LAYOUT, "anyOf": calls, "$defs": definitions}, ensure_ascii=False)
    return [
        f'call: <[{tokens.tool_call}]> "\\n" body "\\n" <[{tokens.tool_call_end}]>',
        f"body: %json {body}",
    ]


def _call_schema(function: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] | None = function.get("parameters")
    parameters: dict[str, Any] = dict(given or {"type": "object", "properties": {}})
    if not parameters.get("properties") and "additionalProperties" not in parameters:
        # A function that lists no parameters is called with {} and not with invented ones.
        parameters["additionalProperties"] = False
    for key in ("$defs", "definitions"):
        for name, definition in cast("dict[str, Any]", parameters.pop(key, None) or {}).items():
            definitions[prefix + name] = _point_to_root(definition, prefix)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": _point_to_root(parameters, prefix)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _point_to_root(schema: Any, prefix: str) -> Any:
    """References follow their definitions to the root of the combined schema."""
    if isinstance(schema, list):
        return [_point_to_root(entry, prefix) for entry in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _point_to_root(value, prefix) for key, value in cast("dict[str, Any]", schema).items()}
    reference = moved.get("$ref")
    if isinstance(reference, str):
        for old in ("#/$defs/", "#/definitions/"):
            if reference.startswith(old):
                moved["$ref"] = "#/$defs/" + prefix + reference.removeprefix(old)
    return moved
