"""Text completion answers: the JSON body and the stream of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helios.api.answer import (
    DONE,
    AnswerIdentity,
    CompletionLogprobs,
    error_event,
    to_json,
    usage_and_timings,
)
from helios.errors import RequestError
from helios.runtime.generation import Generation
from helios.runtime.job_builder import Prompt
from helios.runtime.prompt_encoder import PromptEncoder
from helios.runtime.reporting import usage_report
from helios.runtime.request import TokenEvent

OBJECT = "text_completion"
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """How a completion is reported. ``hide_output`` is ``max_tokens: 0``: the engine needs one step to
    score a prompt, and the token that it yields is not reported."""

    echo: bool = False
    num_logprobs: int | None = None
    hide_output: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class CompletionAnswer:
    """One completion request's choices, streamed or collected."""

    def __init__(
        self,
        identity: AnswerIdentity,
        generation: Generation,
        prompts: list[Prompt],
        encoder: PromptEncoder,
        options: CompletionOptions,
    ) -> None:
        self._identity = identity
        self._generation = generation
        self._prompts = prompts
        self._encoder = encoder
        self._options = options
        self._choices_per_prompt = generation.num_choices // len(prompts)
        self._logprobs = (
            [CompletionLogprobs(encoder, options.num_logprobs) for _ in range(generation.num_choices)]
            if options.num_logprobs is not None
            else []
        )
        self._started = [False] * generation.num_choices
        head = {"id": identity.id, "object": OBJECT, "created": identity.created, "model": identity.model}
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        # Nearly every chunk of a stream is this with a text in the middle.
        self._plain = not (self._logprobs or options.hide_output or options.continuous_usage)
        self._plain_heads = [
            self._head + b'{"index":%d,"text":' % choice for choice in range(len(self._started))
        ]

    def _opening_text(self, choice: int) -> str:
        """The echoed prompt before a choice's first text; also starts its logprobs."""
        self._started[choice] = True
        if not self._options.echo:
            return ""
        number = choice // self._choices_per_prompt
        prompt, job = self._prompts[number], self._generation.jobs[number]
        text = prompt.text
        if text is None:
            text = self._encoder.vocabulary.decode(prompt.ids, skip_special_tokens=False)
        if self._logprobs:
            self._logprobs[choice].add_prompt(prompt.ids, job.prompt_logprobs or [])
        return text

    def _take(self, choice: int, event: TokenEvent) -> str:
        text = "" if self._started[choice] else self._opening_text(choice)
        if self._options.hide_output:
            return text
        if self._logprobs:
            self._logprobs[choice].add(event)
        return text + event.text

    def _finish(self, event: TokenEvent) -> str | None:
        if event.finish_reason is None:
            return None
        return "length" if self._options.hide_output else event.finish_reason.value

    def _report(self) -> dict[str, Any]:
        report = usage_and_timings(self._generation)
        if self._options.hide_output:
            report["usage"] = usage_report(self._generation.prompt_tokens, 0, self._generation.cached_tokens)
        return report

    # Streaming

    def encode(self, events: list[tuple[int, TokenEvent]]) -> bytes:
        """Chunks for some events."""
        if len(events) == 1:
            return self._chunk(*events[0])
        return b"".join([self._chunk(choice, event) for choice, event in events])

    def _chunk(self, choice: int, event: TokenEvent) -> bytes:
        # A token whose text waits for the bytes of the next one has a chunk too: clients that time chunks, and
        # those that show progress, see every token when it comes.
        if self._plain and event.token_ids and event.finish_reason is None and self._started[choice]:
            return self._plain_heads[choice] + to_json(event.text) + _PLAIN_TAIL
        text = self._take(choice, event)
        finish = self._finish(event)
        if not text and finish is None and (self._options.hide_output or not event.token_ids):
            return b""
        logprobs = b"null"
        if self._logprobs:
            logprobs = to_json(self._logprobs[choice].take())
        end = b"null"
        if finish is not None:
            end = to_json(finish) + b',"stop_reason":' + to_json(event.stop_match)
        chunk = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]' % (
            choice,
            to_json(text),
            logprobs,
            end,
        )
        if self._options.continuous_usage:
            generation = self._generation
            usage = usage_report(
                generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens
            )
            chunk += b',"usage":' + to_json(usage)
        return self._head + chunk + b"}\n\n"

    def end(self) -> bytes:
        """The usage chunk, where it was asked for, and ``[DONE]``."""
        if not self._options.include_usage:
            return DONE
        return self._head + b"]," + to_json(self._report())[1:] + b"\n\n" + DONE

    def error(self, error: RequestError) -> bytes:
        """An error event and the end."""
        return error_event(error)

    # One body

    async def collect(self) -> dict[str, Any]:
        """Wait for the end. Raises the RequestError that ended the request."""
        count = self._generation.num_choices
        texts: list[list[str]] = [[] for _ in range(count)]
        finishes: list[tuple[str | None, str | int | None]] = [(None, None)] * count
        while not self._generation.ended:
            for choice, event in await self._generation.next_events():
                texts[choice].append(self._take(choice, event))
                if event.finish_reason is not None:
                    finishes[choice] = (self._finish(event), event.stop_match)
        return {
            "id": self._identity.id,
            "object": OBJECT,
            "created": self._identity.created,
            "model": self._identity.model,
            "choices": [
                {
                    "index": choice,
                    "text": "".join(texts[choice]),
                    "logprobs": self._logprobs[choice].take() if self._logprobs else None,
                    "finish_reason": finish,
                    "stop_reason": stop,
                }
                for choice, (finish, stop) in enumerate(finishes)
            ],
            **self._report(),
        }
