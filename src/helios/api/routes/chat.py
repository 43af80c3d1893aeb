"""``POST /v1/chat/completions``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.answer import AnswerIdentity
from helios.api.chat_answer import ChatCollector, ChatStream
from helios.api.chat_request import (
    rendering,
    stop_after_one_call,
    thinking_budget,
    uses_tools,
    will_think,
    with_tools,
)
from helios.api.errors import validate
from helios.api.routes.common import (
    BODY_ERRORS,
    body_schema,
    check_model,
    json_response,
    read_request,
    usage_note,
)
from helios.api.schemas.chat import ChatRequest
from helios.api.sse import EventStream, cancel_on_disconnect
from helios.runtime.frontend import Frontend
from helios.runtime.generation import Generation
from helios.runtime.job_builder import Prompt
from helios.runtime.output_parser import OutputParser

router = APIRouter()


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat that has been queued."""

    identity: AnswerIdentity
    generation: Generation
    parsers: list[OutputParser]


async def render_chat(frontend: Frontend, body: ChatRequest) -> tuple[Prompt, bool]:
    """The prompt of a checked chat request, and whether the model will think. Raises RequestError."""
    template = frontend.builder.require_template()
    messages, tools, options = rendering(body, template, frontend.settings.enable_thinking)
    prompt = await frontend.encode_chat(messages, tools, options)
    return prompt, will_think(options, template, prompt)


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
    tokens = frontend.encoder.structural
    asked, grammar_param = body.grammar(tokens.think_end if thinks else None)
    grammar, grammar_param = with_tools(body, asked, grammar_param, tokens, thinks)
    await frontend.check_grammar(grammar, grammar_param)
    params = body.sampling_params(
        info,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_budget=thinking_budget(body, thinks),
        grammar=grammar,
    )
    params = stop_after_one_call(body, params, tokens)
    options = replace(body.job_options(body.answer_tokens(), settings, "messages"), clamp=clamp)
    identity = AnswerIdentity.new(id_prefix, info.name)
    generation = frontend.submit([prompt], params, options, identity.id)
    parsers = [
        frontend.output_parser(
            tools=uses_tools(body),
            starts_in_thinking=prompt.starts_in_thinking,
            incremental=incremental,
        )
        for _ in range(params.n)
    ]
    return StartedChat(identity, generation, parsers)


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
