"""Prompts to jobs: rendering, tokenization, lengths. One code for the server and for the library.

Everything here is synchronous and safe to use from several threads; nothing imports FastAPI or touches a
tensor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helios.config import Settings
from helios.errors import ContextLengthError, InvalidRequestError
from helios.runtime.chat import ChatTemplate, Message, ToolSpec
from helios.runtime.prompt_encoder import PromptEncoder, context_error
from helios.runtime.request import Job, SamplingParams, Timings


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values of a request that names none. ``max_tokens=0`` means all the room left."""

    temperature: float = 0.2
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients may know of the served model. ``created`` is in Unix seconds."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    revision: str | None = None
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a dialogue is rendered. ``enable_thinking=None`` leaves it to the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    enable_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Prompt:
    """A prompt ready to be queued."""

    ids: list[int]
    timings: Timings
    starts_in_thinking: bool = False
    text: str | None = None  # as it was written, for a completion's echo


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a request asks of its jobs beside the sampling. ``max_tokens=None`` takes the default, clamped
    to the room left; a number that does not fit is refused."""

    max_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout_seconds: float | None = None
    param: str = "messages"  # the field that error messages name
    # Shorten a max_tokens that does not fit instead of refusing it, for protocols that demand a number.
    clamp: bool = False


class JobBuilder:
    """Makes the jobs of one model."""

    def __init__(
        self, settings: Settings, template: ChatTemplate | None, encoder: PromptEncoder, model: ModelInfo
    ) -> None:
        self.settings = settings
        self.template = template
        self.encoder = encoder
        self.model = model

    def require_template(self) -> ChatTemplate:
        """Raises InvalidRequestError for a model that cannot chat."""
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.",
                param="messages",
                code="unsupported_value",
            )
        return self.template

    def chat_prompt(
        self,
        messages: list[Message],
        tools: list[ToolSpec] | None,
        options: ChatOptions,
        timings: Timings | None = None,
    ) -> Prompt:
        """Render and tokenize a dialogue. Raises InvalidRequestError and ContextLengthError."""
        timings = timings or Timings()
        rendered = self.require_template().render(
            messages,
            tools=tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            enable_thinking=options.enable_thinking,
            template_kwargs=options.template_kwargs,
            mark_control_tokens=True,
        )
        ids = self.encoder.encode_chat(rendered)
        timings.tokenized = time.perf_counter()
        return Prompt(ids, timings, self.encoder.starts_in_thinking(ids))

    def prompt(self, prompt: str | list[int], param: str, received: float) -> Prompt:
        """Tokenize a raw prompt; token ids are checked and taken as they are. Raises InvalidRequestError
        and ContextLengthError. ``received`` is a ``perf_counter`` reading."""
        if isinstance(prompt, str):
            ids, text = self.encoder.encode_text(prompt, param), prompt
        else:
            ids, text = prompt, None
            self._check_ids(ids, param)
        if not ids:
            raise InvalidRequestError(f"Invalid '{param}': the prompt is empty.", param=param)
        timings = Timings(received=received, tokenized=time.perf_counter())
        return Prompt(ids, timings, self.encoder.starts_in_thinking(ids), text)

    def prompts(self, prompts: Sequence[str | list[int]], param: str = "prompt") -> list[Prompt]:
        """Tokenize several raw prompts of one request."""
        received = time.perf_counter()
        return [self.prompt(prompt, param, received) for prompt in prompts]

    def _check_ids(self, ids: list[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.model.vocab_size:
            raise InvalidRequestError(
                f"Invalid '{param}': token ids must be from 0 to {self.model.vocab_size - 1}.", param=param
            )

    def job(self, prompt: Prompt, params: SamplingParams, options: JobOptions, job_id: str) -> Job:
        """The job of one prompt. Raises ContextLengthError."""
        max_tokens = self.answer_length(len(prompt.ids), options)
        timeout = options.timeout_seconds or self.settings.request_timeout_seconds
        return Job(
            job_id,
            prompt.ids,
            params if params.max_tokens == max_tokens else replace(params, max_tokens=max_tokens),
            max_tokens=max_tokens,
            cache_salt=options.cache_salt,
            priority=options.priority,
            deadline=prompt.timings.received + timeout if timeout else None,
            timings=prompt.timings,
        )

    def answer_length(self, prompt_tokens: int, options: JobOptions) -> int:
        """How many tokens the answer may have. Raises ContextLengthError with the true numbers."""
        asked, param = options.max_tokens, options.param
        context = self.model.max_model_len
        room = context - prompt_tokens
        if room < 1:
            raise context_error(context, str(prompt_tokens), param)
        if asked is None:
            default = self.model.generation_defaults.max_tokens or room
            return min(default, room, self.settings.max_tokens_limit or room)
        if asked > room and options.clamp:
            return room
        if asked > room:
            noun = "messages" if param == "messages" else "prompt"
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt_tokens + asked} tokens ({prompt_tokens} in the {noun}, {asked} in the completion). "
                f"Please reduce the length of the {noun} or completion.",
                param=param,
            )
        return asked
