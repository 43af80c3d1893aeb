"""``POST /v1/responses``, the stateless subset."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.chat_answer import ChatCollector
from helios.api.errors import validate
from helios.api.responses_answer import ResponseShape, ResponseStream, collect_response
from helios.api.routes.chat import start_chat
from helios.api.routes.common import BODY_ERRORS, body_schema, json_response, read_request, usage_note
from helios.api.schemas.chat import ChatRequest
from helios.api.schemas.responses import ResponsesRequest
from helios.api.sse import EventStream, cancel_on_disconnect

router = APIRouter()


@router.post(
    "/v1/responses",
    tags=["OpenAI"],
    summary="Answer a conversation (Responses API)",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("ResponsesRequest"),
)
async def responses(request: Request) -> Response:
    """One response object, or with ``stream`` its events. Nothing is stored."""
    frontend, raw = await read_request(request, "input")
    body = validate(ResponsesRequest, raw)
    fields = body.chat_fields()
    chat_body = validate(ChatRequest, fields)
    chat_body.keep_raw_tools(fields)
    chat = await start_chat(frontend, chat_body, incremental=body.streams, id_prefix="resp_")
    note = usage_note(request, chat.identity.id, chat.generation)
    shape = ResponseShape(chat.identity, chat.generation, body)
    if body.streams:
        encoder = ResponseStream(shape, chat.parsers[0])
        return EventStream(chat.generation, encoder, frontend.settings.sse_keepalive_seconds, note)
    async with cancel_on_disconnect(request.receive, chat.generation, note):
        collector = ChatCollector(chat.identity, chat.generation, chat.parsers, frontend.encoder, None)
        answer = await collect_response(shape, collector)
    return json_response(answer)
