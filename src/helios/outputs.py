"""What the library returns: whole results and the pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helios.errors import RequestError
from helios.runtime.reporting import TimingReport
from helios.runtime.request import TokenLogprob


@dataclass(slots=True)
class CompletionOutput:
    """One choice of an answer. In a chat ``text`` is what the model says, without thinking and tool calls."""

    index: int
    text: str
    token_ids: list[int]  # of everything that was generated, the end token included
    finish_reason: str  # stop, length, tool_calls, abort or error
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprob] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to append to a dialogue."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. What concerns a single choice can be read here directly, for the first one.

    ``error`` is set where the engine failed; ``outputs`` then hold what had been generated. ``timings`` are
    those of the HTTP API, in seconds and tokens per second.
    """

    request_id: str
    prompt: str | None  # as it was written; None for token ids and dialogues
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    timings: TimingReport
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: RequestError | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def reasoning(self) -> str | None:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        return self.outputs[0].message


@dataclass(slots=True)
class Delta:
    """What one tick added to one choice of one request.

    ``text`` is safe to print: whole characters and no part of a stop string. ``output`` is the whole result,
    on the last delta of a request and nowhere else.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    reasoning: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    output: RequestOutput | None = None
