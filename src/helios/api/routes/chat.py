"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.answer import AnswerIdentity
from helios.api.chat_answer import ChatCollector, ChatStream
from helios.api.errors import validate
from helios.api.routes.common import (
    BODY_ERRORS,
    body_schema,
    check_model,
    json_response,
    read_request,
    usage_note,
)
from helios.api.schemas.chat import ChatRequest, NamedToolChoice, Tool
from helios.api.schemas.common import JsonObject
from helios.api.sse import EventStream, cancel_on_disconnect
from helios.errors import InvalidRequestError, UnsupportedParameterError
from helios.runtime.frontend import ChatOptions, Frontend, Prompt
from helios.runtime.generation import Generation
from helios.runtime.output_parser import OutputParser
from helios.runtime.request import Grammar
from helios.runtime.tool_grammar import tool_call_grammar, tool_call_or_json_grammar

router = APIRouter()


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat that has been queued."""

    identity: AnswerIdentity
    generation: Generation
    parsers: list[OutputParser]


async def render_chat(frontend: Frontend, body: ChatRequest) -> tuple[Prompt, bool]:
    """The prompt of a checked chat request, and whether the model will think. Raises RequestError."""
    template = frontend.template
    if template is None:
        raise InvalidRequestError(
            "This model has no chat template; use /v1/completions.",
            param="messages",
            code="unsupported_value",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    enable_thinking = body.thinking(template, frontend.settings.enable_thinking)
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
    prompt = await frontend.encode_chat(messages, tools, options)
    thinks = enable_thinking if enable_thinking is not None else template.thinking == "always"
    if options.continue_final_message:
        thinks = prompt.starts_in_thinking
    return prompt, thinks


async def start_chat(
    frontend: Frontend,
    body: ChatRequest,
    *,
    incremental: bool,
    id_prefix: str = "chatcmpl-",
    clamp: bool = False,
) -> StartedChat:
    """Check a chat request, tokenize it and queue it. Raises RequestError.

    ``incremental`` is for streams; ``clamp`` shortens an answer that does not fit instead of refusing it.
    """
    info = frontend.model
    settings = frontend.settings
    check_model(body.model, info)
    body.check(settings)
    prompt, thinks = await render_chat(frontend, body)
    grammar, grammar_param = _grammar(frontend, body, thinks)
    await frontend.check_grammar(grammar, grammar_param)
    params = body.sampling_params(
        info,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_budget=_thinking_budget(body, thinks),
        grammar=grammar,
    )
    uses_tools = bool(body.tools) and body.tool_choice != "none"
    call_end = frontend.encoder.structural.tool_call_end
    if uses_tools and body.parallel_tool_calls is False and call_end is not None:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, call_end))
    options = replace(body.job_options(body.answer_tokens(), settings, "messages"), clamp=clamp)
    identity = AnswerIdentity.new(id_prefix, info.name)
    generation = frontend.submit([prompt], params, options, identity.id)
    parsers = [
        frontend.output_parser(
            tools=uses_tools,
            starts_in_thinking=prompt.starts_in_thinking,
            incremental=incremental,
        )
        for _ in range(params.n)
    ]
    return StartedChat(identity, generation, parsers)


def _thinking_budget(body: ChatRequest, thinks: bool) -> int | None:
    for param, budget in (
        ("thinking_budget", body.thinking_budget),
        ("thinking_token_budget", body.thinking_token_budget),
    ):
        if budget is not None:
            if not thinks:
                raise UnsupportedParameterError(
                    f"'{param}' has no effect: thinking is off for this request.", param=param
                )
            return budget
    return None


def _grammar(frontend: Frontend, body: ChatRequest, thinks: bool) -> tuple[Grammar | None, str]:
    tokens = frontend.encoder.structural
    after = tokens.think_end if thinks else None
    grammar, param = body.grammar(after)
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
        after_thinking=after is not None,
    )
    return forced, "tools"


def _function(tool: Tool) -> JsonObject:
    return {"name": tool.function.name, "parameters": tool.function.parameters}


@router.post(
    "/v1/chat/completions",
    tags=["OpenAI"],
    summary="Answer a dialogue",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("ChatRequest"),
)
async def chat_completions(request: Request) -> Response:
    """One JSON body, or with ``stream`` a series of events."""
    frontend, raw = await read_request(request)
    body = validate(ChatRequest, raw)
    body.keep_raw_tools(raw)
    chat = await start_chat(frontend, body, incremental=body.streams)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    note = usage_note(request, chat.identity.id, chat.generation)
    if body.streams:
        stream_options = body.stream_options
        encoder = ChatStream(
            chat.identity,
            chat.generation,
            chat.parsers,
            frontend.encoder,
            num_top_logprobs=num_top,
            include_usage=bool(stream_options and stream_options.include_usage),
            continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        )
        return EventStream(chat.generation, encoder, frontend.settings.sse_keepalive_seconds, note)
    async with cancel_on_disconnect(request.receive, chat.generation, note):
        collector = ChatCollector(chat.identity, chat.generation, chat.parsers, frontend.encoder, num_top)
        answer = await collector.collect()
    return json_response(answer)
