"""From a checked chat request to what the model is asked: rendering, thinking, tools, constraint.

The routes and the library both go through here, so a dialogue means the same to either.
"""

from __future__ import annotations

import json
from dataclasses import replace

from helios.api.schemas.chat import ChatRequest, NamedToolChoice, Tool
from helios.api.schemas.common import JsonObject
from helios.errors import InvalidRequestError, UnsupportedParameterError
from helios.runtime.chat import ChatTemplate, Message, ToolSpec
from helios.runtime.job_builder import ChatOptions, Prompt
from helios.runtime.prompt_encoder import StructuralTokens
from helios.runtime.request import Grammar, SamplingParams
from helios.runtime.tool_grammar import tool_call_grammar, tool_call_or_json_grammar


def rendering(
    body: ChatRequest, template: ChatTemplate, default_thinking: bool
) -> tuple[list[Message], list[ToolSpec] | None, ChatOptions]:
    """Messages, tools and options for the template. Raises RequestError for what it cannot do."""
    kwargs = dict(body.chat_template_kwargs or {})
    enable_thinking = body.thinking(template, default_thinking)
    kwargs.pop("enable_thinking", None)
    template.check_kwargs(kwargs)
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        enable_thinking=enable_thinking,
        template_kwargs=kwargs,
    )
    messages, tools = body.template_messages(template), body.template_tools()
    if tools and "tools" not in template.variables:
        raise UnsupportedParameterError("This model's chat template has no tools.", param="tools")
    return messages, tools, options


def will_think(options: ChatOptions, template: ChatTemplate, prompt: Prompt) -> bool:
    """Whether the answer begins with thinking, or may."""
    if options.continue_final_message:
        return prompt.starts_in_thinking
    return options.enable_thinking if options.enable_thinking is not None else template.thinking == "always"


def uses_tools(body: ChatRequest) -> bool:
    """Whether the answer may call a tool."""
    return bool(body.tools) and body.tool_choice != "none"


def stop_after_one_call(
    body: ChatRequest, params: SamplingParams, tokens: StructuralTokens
) -> SamplingParams:
    """The parameters, with an end after the first tool call where only one is wanted."""
    end = tokens.tool_call_end
    if uses_tools(body) and body.parallel_tool_calls is False and end is not None:
        return replace(params, stop_token_ids=(*params.stop_token_ids, end))
    return params


def thinking_budget(body: ChatRequest, thinks: bool) -> int | None:
    """The limit on thinking. Raises UnsupportedParameterError where there is no thinking."""
    for param, budget in (
        ("thinking_budget", body.thinking_budget),
        ("thinking_token_budget", body.thinking_token_budget),
    ):
        if budget is not None:
            check_thinking_budget(thinks, param)
            return budget
    return None


def check_thinking_budget(thinks: bool, param: str = "thinking_budget") -> None:
    """Raises UnsupportedParameterError where there is no thinking."""
    if not thinks:
        raise UnsupportedParameterError(
            f"'{param}' has no effect: thinking is off for this request.", param=param
        )


def with_tools(
    body: ChatRequest, grammar: Grammar | None, param: str, tokens: StructuralTokens, thinks: bool
) -> tuple[Grammar | None, str]:
    """The constraint of an answer that may also call tools, and the field that asks for it.

    ``grammar`` is the constraint asked for by ``param``, if any. Raises RequestError.
    """
    choice = body.tool_choice
    if choice == "none" or not body.tools:
        return grammar, param
    if choice in (None, "auto"):
        if grammar is not None and grammar.kind in ("json_schema", "json_object"):
            # Agents ask for both: the model may call tools first and must answer in JSON in the end.
            schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
            functions = [_function(tool) for tool in body.tools]
            return tool_call_or_json_grammar(functions, schema, tokens, after_thinking=thinks), param
        return grammar, param
    if grammar is not None:
        raise InvalidRequestError(
            "A forced tool call and a constrained output cannot be used together.", param="tool_choice"
        )
    tools = body.tools
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        parallel = False
    forced = tool_call_grammar(
        [_function(tool) for tool in tools],
        tokens,
        parallel=parallel,
        after_thinking=thinks and tokens.think_end is not None,
    )
    return forced, "tools"


def _function(tool: Tool) -> JsonObject:
    return {"name": tool.function.name, "parameters": tool.function.parameters}
