"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.chat_answer import ChatCollector
from helios.api.errors import validate
from helios.api.messages_answer import MessageStream, collect_message
from helios.api.routes.chat import render_chat, start_chat
from helios.api.routes.common import (
    BODY_ERRORS,
    body_schema,
    check_model,
    json_response,
    read_request,
    usage_note,
)
from helios.api.schemas.chat import ChatRequest
from helios.api.schemas.messages import CountTokensRequest, MessagesRequest
from helios.api.sse import EventStream, cancel_on_disconnect
from helios.runtime.frontend import Frontend

router = APIRouter(tags=["Anthropic"])


def _chat_request(frontend: Frontend, body: CountTokensRequest) -> ChatRequest:
    template = frontend.template
    fields = body.chat_fields(can_think=template is not None and template.thinking != "never")
    chat = validate(ChatRequest, fields)
    chat.keep_raw_tools(fields)
    return chat


@router.post(
    "/v1/messages",
    summary="Answer a dialogue (Anthropic's form)",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("MessagesRequest"),
)
async def messages(request: Request) -> Response:
    """One message, or with ``stream`` its events."""
    frontend, raw = await read_request(request)
    body = validate(MessagesRequest, raw)
    chat = await start_chat(
        frontend,
        _chat_request(frontend, body),
        incremental=bool(body.stream),
        id_prefix="msg_",
        clamp=True,  # max_tokens must be sent here, and agents send what their largest model can
    )
    note = usage_note(request, chat.identity.id, chat.generation)
    if body.stream:
        encoder = MessageStream(chat.identity, chat.generation, chat.parsers[0])
        return EventStream(chat.generation, encoder, frontend.settings.sse_keepalive_seconds, note)
    async with cancel_on_disconnect(request.receive, chat.generation, note):
        collector = ChatCollector(chat.identity, chat.generation, chat.parsers, frontend.encoder, None)
        answer = await collect_message(chat.identity, chat.generation, collector)
    return json_response(answer)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count a dialogue's prompt tokens",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("CountTokensRequest"),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt has."""
    frontend, raw = await read_request(request)
    body = validate(CountTokensRequest, raw)
    check_model(body.model, frontend.model)
    chat = _chat_request(frontend, body)
    chat.check(frontend.settings)
    prompt, _ = await render_chat(frontend, chat)
    return json_response({"input_tokens": len(prompt.ids)})
