"""What LLM and AsyncLLM share: settings, checks, and a request from its prompt to its result."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, cast

from helios.api.answer import finish_name
from helios.api.chat_answer import CollectedChoice
from helios.api.chat_request import (
    check_thinking_budget,
    rendering,
    stop_after_one_call,
    uses_tools,
    will_think,
    with_tools,
)
from helios.api.errors import validate
from helios.api.schemas.chat import ChatRequest
from helios.api.schemas.common import above_maximum, check_priority
from helios.config import Settings, load
from helios.errors import InvalidRequestError, RequestError, StartupError
from helios.outputs import CompletionOutput, Delta, RequestOutput
from helios.runtime.chat import Message
from helios.runtime.grammar import GrammarCompiler
from helios.runtime.job_builder import JobBuilder, JobOptions, ModelInfo, Prompt
from helios.runtime.output_parser import DeltaKind, OutputParser
from helios.runtime.reporting import timings_report
from helios.runtime.request import FinishReason, Job, SamplingParams, TokenEvent, TokenLogprob
from helios.runtime.request import Sequence as Choice
from helios.runtime.sampling_rules import BOUNDS, check_integer, check_token_ids

TextOrIds = str | list[int]
Prompts = TextOrIds | Sequence[TextOrIds]
Item = TypeVar("Item")


class ChatFields(TypedDict, total=False):
    """How a dialogue is rendered and what the answer may do; the fields of the HTTP API."""

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: dict[str, Any]
    enable_thinking: bool
    add_generation_prompt: bool
    continue_final_message: bool


def library_settings(model: str | Path | None, given: dict[str, Any]) -> Settings:
    """Settings from keyword arguments, over the environment and ``.env``. Raises StartupError naming the
    setting."""
    for name in given:
        if name not in Settings.model_fields or name == "model_id":
            near = difflib.get_close_matches(name, Settings.model_fields, 1)
            hint = f"; did you mean {near[0]}?" if near and name != "model_id" else ""
            raise StartupError(f"there is no setting named {name!r}{hint}")
    named = {} if model is None else {"model_id": str(model)}
    return load(**named, **given)


def as_prompts(prompts: Prompts) -> list[TextOrIds]:
    """One prompt or several as a list. Raises InvalidRequestError for what is no prompt."""
    if isinstance(prompts, str):
        return [prompts]
    entries = list(cast("Iterable[Any]", prompts))
    if entries and all(_is_id(entry) for entry in entries):
        return [cast("list[int]", entries)]
    return [_as_prompt(entry, f"prompts[{index}]") for index, entry in enumerate(entries)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_prompt(value: Any, param: str) -> TextOrIds:
    if isinstance(value, str):
        return value
    ids: list[Any] = list(value) if isinstance(value, list | tuple) else [None]  # pyright: ignore[reportUnknownArgumentType]
    if not all(_is_id(entry) for entry in ids):
        raise InvalidRequestError(
            f"Invalid type for '{param}': expected a string or a list of token ids.",
            param=param,
            code="invalid_type",
        )
    return ids


def one_each(name: str, values: Item | Sequence[Item], count: int, kind: type[Any]) -> list[Item]:
    """``values`` for each of ``count`` prompts: a single value serves all. Raises InvalidRequestError."""
    if isinstance(values, kind) or values is None:
        return [cast("Item", values)] * count
    several = list(cast("Sequence[Item]", values))
    if len(several) != count:
        raise InvalidRequestError(f"Invalid '{name}': {len(several)} for {count} prompts.", param=name)
    return several


def at_index(error: RequestError, name: str, index: int) -> RequestError:
    """The same error, saying which of several prompts it is about."""
    error.message = f"{name}[{index}]: {error.message}"
    error.args = (error.message,)
    return error


class MakesParser(Protocol):
    """Makes the parser of one choice of a chat."""

    def __call__(self, *, incremental: bool) -> OutputParser: ...


@dataclass(slots=True)
class Prepared:
    """A checked and tokenized request."""

    prompt: Prompt
    params: SamplingParams
    options: JobOptions
    parser: MakesParser | None = None  # of a chat


class Preparer:
    """Checks and tokenizes requests for one model. Safe to use from several threads."""

    def __init__(self, builder: JobBuilder, grammars: GrammarCompiler) -> None:
        self.builder = builder
        self.settings = builder.settings
        self.model: ModelInfo = builder.model
        self._grammars = grammars
        defaults = self.model.generation_defaults
        self.default_params = SamplingParams(
            max_tokens=defaults.max_tokens or None,
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def completion(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> Prepared:
        """A request for the continuation of a tokenized prompt. Raises RequestError."""
        options = self._options(params, priority, "prompt")
        params = params or self.default_params
        if params.grammar is not None:
            self._grammars.compile(params.grammar, "grammar")
        return Prepared(prompt, params, options)

    def request(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None,
        priority: int,
        fields: ChatFields,
    ) -> Prepared:
        """A request for a text, token ids, or (a list of dictionaries) a dialogue. Raises RequestError."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return self.chat(cast("list[Message]", prompt), params, priority, fields)
        if fields:
            name = next(iter(fields))
            raise InvalidRequestError(f"Invalid '{name}': only a dialogue has it.", param=name)
        checked = _as_prompt(prompt, "prompt")
        return self.completion(self.builder.prompts([checked])[0], params, priority)

    def chat(
        self, messages: list[Message], params: SamplingParams | None, priority: int, fields: ChatFields
    ) -> Prepared:
        """A request for the answer to a dialogue. Raises RequestError."""
        raw = {"messages": messages, **fields}
        body = validate(ChatRequest, raw)
        body.keep_raw_tools(raw)
        body.check(self.settings)
        template, encoder = self.builder.require_template(), self.builder.encoder
        rendered, tools, chat_options = rendering(body, template, self.settings.enable_thinking)
        prompt = self.builder.chat_prompt(rendered, tools, chat_options)
        thinks = will_think(chat_options, template, prompt)
        options = self._options(params, priority, "messages")
        params = params or self.default_params
        if params.thinking_budget is not None:
            check_thinking_budget(thinks)
        tokens, asked = encoder.structural, params.grammar
        if asked is not None and thinks and asked.starts_after is None:
            asked = replace(asked, starts_after=tokens.think_end)
        grammar, param = with_tools(body, asked, "grammar", tokens, thinks)
        if grammar is not None:
            self._grammars.compile(grammar, param)
        params = stop_after_one_call(body, replace(params, grammar=grammar), tokens)

        def parser(*, incremental: bool) -> OutputParser:
            return OutputParser(
                tokens,
                encoder.marker_lengths,
                tools=uses_tools(body),
                starts_in_thinking=prompt.starts_in_thinking,
                incremental=incremental,
            )

        return Prepared(prompt, params, options, parser)

    def texts(self, prompts: list[TextOrIds], name: str = "prompts") -> list[Prompt]:
        """Tokenize many prompts. Raises RequestError that names the place in the list."""
        received = time.perf_counter()
        encoded: list[Prompt] = []
        for index, prompt in enumerate(prompts):
            try:
                encoded.append(self.builder.prompt(prompt, "prompt", received))
            except RequestError as error:
                raise (at_index(error, name, index) if len(prompts) > 1 else error) from None
        return encoded

    def _options(self, params: SamplingParams | None, priority: int, param: str) -> JobOptions:
        """Check what concerns this model and server; lengths as the HTTP API takes them."""
        check_integer("priority", priority, BOUNDS["priority"])
        check_priority(priority, self.settings)
        if params is None:
            return JobOptions(priority=priority, param=param)
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError("Invalid type for 'params': expected SamplingParams.", param="params")
        check_token_ids("stop_token_ids", params.stop_token_ids, self.model.vocab_size)
        check_token_ids("logit_bias", (token for token, _ in params.logit_bias), self.model.vocab_size)
        if params.max_tokens is None:  # all the room
            return JobOptions(self.model.max_model_len, priority=priority, param=param, clamp=True)
        if params.min_tokens > params.max_tokens:
            raise above_maximum("min_tokens", params.min_tokens, params.max_tokens)
        return JobOptions(params.max_tokens, priority=priority, param=param)


@dataclass(slots=True)
class _Collected:
    """One choice while it runs."""

    logprobs: list[TokenLogprob] | None
    markers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    parser: OutputParser | None = None
    chat: CollectedChoice = field(default_factory=CollectedChoice)


class Running:
    """A request that runs: takes its events and becomes a :class:`RequestOutput`.

    With ``emit`` every event becomes a :class:`Delta` handed to it; without, only what the result needs is
    kept, and ``put`` need not see events that are neither an end nor carry log probabilities or markers.
    """

    __slots__ = ("_choices", "_emit", "_open", "_parser", "_prompt", "job", "on_end", "output", "wants_all")

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        emit: Callable[[Delta], object] | None = None,
        on_end: Callable[[Running], object] | None = None,
    ) -> None:
        self.job = job
        self.wants_all = emit is not None
        self.output: RequestOutput | None = None
        self.on_end = on_end
        self._emit = emit
        self._prompt = prepared.prompt
        self._parser = prepared.parser
        self._open = job.params.n
        wants_logprobs = job.params.logprobs is not None
        self._choices = [_Collected([] if wants_logprobs else None) for _ in job.sequences]
        if emit is not None and prepared.parser is not None:
            for choice in self._choices:
                choice.parser = prepared.parser(incremental=True)

    def put(self, event: TokenEvent) -> None:
        """Take one event."""
        choice = self._choices[event.index]
        if event.logprobs is not None and choice.logprobs is not None:
            choice.logprobs += event.logprobs
        ended = event.finish_reason is not None
        self._open -= ended
        delta = None
        if self._emit is not None:
            delta = self._delta(choice, event)
        else:
            choice.markers += event.markers
        if ended and not self._open:
            self.output = self._result()
        if delta is not None and self._emit is not None:
            delta.output = self.output
            self._emit(delta)
        if self.output is not None and self.on_end is not None:
            self.on_end(self)

    def _delta(self, choice: _Collected, event: TokenEvent) -> Delta:
        delta = Delta(self.job.job_id, event.index, event.text, event.token_ids, logprobs=event.logprobs)
        parser, reason = choice.parser, event.finish_reason
        if parser is not None:
            parser.count(event.token_ids, bool(event.markers))
            pieces = parser.feed(event.text, event.markers)
            if reason is not None:
                pieces = pieces + parser.finish()
            for piece in pieces:
                choice.chat.add(piece)
            delta.text = "".join(piece.text for piece in pieces if piece.kind is DeltaKind.CONTENT)
            delta.reasoning = "".join(piece.text for piece in pieces if piece.kind is DeltaKind.REASONING)
        if reason is not None:
            delta.finish_reason = finish_name(reason, parser.num_tool_calls if parser is not None else 0)
        return delta

    def _result(self) -> RequestOutput:
        job = self.job
        return RequestOutput(
            job.job_id,
            self._prompt.text,
            job.prompt_ids,
            [self._choice(*pair) for pair in zip(self._choices, job.sequences, strict=True)],
            job.num_cached_tokens,
            timings_report([job]),
            job.prompt_logprobs,
            job.error,
        )

    def _choice(self, choice: _Collected, sequence: Choice) -> CompletionOutput:
        text = sequence.detokenizer.text if sequence.detokenizer is not None else ""
        ids = sequence.token_ids[sequence.num_prompt_tokens :]
        reason = sequence.finish_reason or FinishReason.ERROR
        output = CompletionOutput(
            sequence.index, text, ids, reason.value, sequence.stop_match, choice.logprobs
        )
        parser = choice.parser
        if self._parser is not None and parser is None:
            parser = self._parser(incremental=False)
            for piece in parser.feed(text, tuple(choice.markers)) + parser.finish():
                choice.chat.add(piece)
        if parser is not None:
            output.text = "".join(choice.chat.content)
            output.reasoning = "".join(choice.chat.reasoning) or None
            output.tool_calls = choice.chat.tool_calls
            output.finish_reason = finish_name(reason, parser.num_tool_calls)
            output.stop_reason = parser.reported_stop(sequence.stop_match)
        return output
