"""The bodies of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from helios.api.schemas.common import JsonObject, RequestModel, TokenId


class TokenizeRequest(RequestModel):
    """A ``prompt``, or ``messages`` with every field of a chat that shapes its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Accepted; these tokenizers add none.")

    @property
    def sent(self) -> dict[str, Any]:
        """The fields as they were sent."""
        return self.model_dump(exclude_unset=True)


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]
