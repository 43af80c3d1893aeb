"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.errors import validate
from helios.api.routes.chat import render_chat
from helios.api.routes.common import BODY_ERRORS, body_schema, check_model, json_response, read_request
from helios.api.schemas.chat import ChatRequest
from helios.api.schemas.common import check_unknown
from helios.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from helios.errors import InvalidRequestError

router = APIRouter(tags=["Operation"])


@router.post(
    "/tokenize",
    summary="Text or dialogue to token ids",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("TokenizeRequest"),
)
async def tokenize(request: Request) -> Response:
    """The ids that a completion (``prompt``) or a chat (``messages`` …) would start from."""
    frontend, raw = await read_request(request)
    body = validate(TokenizeRequest, raw)
    check_model(body.model, frontend.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either 'prompt' or 'messages'.", param="prompt")
    if body.prompt is not None:
        check_unknown(body)
        ids = frontend.encoder.encode_text(body.prompt) if body.prompt else []
    else:
        fields = {name: value for name, value in body.sent.items() if name != "return_token_strs"}
        chat = validate(ChatRequest, fields)
        chat.keep_raw_tools(fields)
        chat.check(frontend.settings)
        ids = (await render_chat(frontend, chat))[0].ids
    answer: dict[str, object] = {
        "count": len(ids),
        "max_model_len": frontend.model.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [frontend.encoder.token_text(token) for token in ids]
    return json_response(answer)


@router.post(
    "/detokenize",
    summary="Token ids to text",
    responses=BODY_ERRORS,
    openapi_extra=body_schema("DetokenizeRequest"),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    frontend, raw = await read_request(request)
    body = validate(DetokenizeRequest, raw)
    check_unknown(body)
    check_model(body.model, frontend.model)
    size = frontend.model.vocab_size
    if any(token >= size for token in body.tokens):
        raise InvalidRequestError(f"Invalid 'tokens': ids must be from 0 to {size - 1}.", param="tokens")
    text = frontend.encoder.vocabulary.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
