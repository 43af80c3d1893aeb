"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from helios.api.schemas.common import SamplingFields, StructuredFields, TokenId
from helios.config import Settings
from helios.errors import InvalidRequestError

MAX_PROMPTS = 2048


class CompletionRequest(SamplingFields, StructuredFields):
    """A text completion request. ``max_tokens`` 0 is allowed with ``echo``, to score a text."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    def check(self, settings: Settings) -> None:
        """The rules that span fields. Raises InvalidRequestError."""
        super().check(settings)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "Invalid 'max_tokens': integer below minimum value. "
                "Expected a value >= 1, but got 0 instead.",
                param="max_tokens",
                code="integer_below_min_value",
            )
        choices = len(self.prompts()) * (self.n or 1)
        if choices > MAX_PROMPTS:
            raise InvalidRequestError(
                f"Invalid 'n': {choices} choices in all are more than {MAX_PROMPTS}.", param="n"
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):  # then all are, as validated
            return [cast("list[int]", prompt)]
        return cast("list[str | list[int]]", prompt)
