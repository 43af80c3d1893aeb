"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.answer import AnswerIdentity
from helios.api.completion_answer import CompletionAnswer, CompletionOptions
from helios.api.errors import validate
from helios.api.routes.common import (
    BODY_ERRORS,
    body_schema,
    check_model,
    json_response,
    read_request,
    usage_note,
)
from helios.api.schemas.completions import CompletionRequest
from helios.api.sse import EventStream, cancel_on_disconnect

router = APIRouter()


@router.post(
    "/v1/completions",
    tags=["OpenAI"],
    summary="Continue texts",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("CompletionRequest"),
)
async def completions(request: Request) -> Response:
    """One JSON body, or with ``stream`` a series of events. Several prompts are taken or refused together."""
    frontend, raw = await read_request(request)
    body = validate(CompletionRequest, raw)
    info, settings = frontend.model, frontend.settings
    check_model(body.model, info)
    body.check(settings)
    hide_output = body.max_tokens == 0
    echo = bool(body.echo)
    grammar, grammar_param = body.grammar()
    await frontend.check_grammar(grammar, grammar_param)
    params = body.sampling_params(
        info,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if echo else None,
        grammar=grammar,
    )
    options = body.job_options(1 if hide_output else body.max_tokens, settings, "prompt")
    prompts = await frontend.encode_prompts(body.prompts())
    identity = AnswerIdentity.new("cmpl-", info.name)
    generation = frontend.submit(prompts, params, options, identity.id)
    stream_options = body.stream_options
    answer = CompletionAnswer(
        identity,
        generation,
        prompts,
        frontend.encoder,
        CompletionOptions(
            echo=echo,
            num_logprobs=body.logprobs,
            hide_output=hide_output,
            include_usage=bool(stream_options and stream_options.include_usage),
            continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        ),
    )
    note = usage_note(request, identity.id, generation)
    if body.streams:
        return EventStream(generation, answer, settings.sse_keepalive_seconds, note)
    async with cancel_on_disconnect(request.receive, generation, note):
        content = await answer.collect()
    return json_response(content)
