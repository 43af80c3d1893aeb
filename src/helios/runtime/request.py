"""What travels between the rooms: sampling parameters, jobs, sequences and token events.

A *job* is one request after tokenization; it owns one *sequence* per choice (``n``). A sequence has a
single progress counter, ``num_computed_tokens``: it is in prefill while more than one of its tokens is
uncomputed and decodes while exactly one is. Nothing here imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from helios.errors import InvalidRequestError, RequestError
from helios.runtime.sampling_rules import MAX_GRAMMAR_CHARACTERS, normalized

if TYPE_CHECKING:
    from helios.runtime.detokenizer import Detokenizer
    from helios.runtime.grammar import GrammarMatcher


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # cancelled by the client
    ERROR = "error"  # the job's ``error`` says why


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output, compiled by the grammar room. ``kind`` is json_schema, json_object,
    regex, choice or lark; ``text`` its source (JSON text for a schema, a JSON list for a choice)."""

    kind: str
    text: str
    # Token id after which the constraint starts (``</think>``), or None to constrain from the first token.
    starts_after: int | None = None

    @classmethod
    def of(
        cls, kind: str, value: object, *, param: str = "grammar", starts_after: int | None = None
    ) -> Grammar:
        """From a schema, a list or a text. Raises InvalidRequestError naming ``param`` if it is too long."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequestError(
                f"Invalid '{param}': longer than {MAX_GRAMMAR_CHARACTERS} characters.", param=param
            )
        return cls(kind, text, starts_after)

    @classmethod
    def json_schema(cls, schema: Any) -> Grammar:
        """JSON that follows a schema: a dictionary, its JSON text, or a pydantic model class."""
        described = getattr(schema, "model_json_schema", None)
        return cls.of("json_schema", described() if described is not None else schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", "{}")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole."""
        return cls.of("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Grammar:
        """One of some strings."""
        return cls.of("choice", list(options))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The defaults are the server's (temperature 0.2, top_p 0.95, 256 tokens). ``max_tokens=None`` means
    all the room that the context leaves. ``logprobs`` is None for none, otherwise how many alternatives
    to report beside the chosen token (0 to 20); ``prompt_logprobs`` likewise for the prompt's tokens.
    Values have the bounds of the HTTP API; ``stop`` may also be given as one string or a list, the other
    tuples as lists, ``logit_bias`` as a dictionary. Raises InvalidRequestError naming the field.
    """

    max_tokens: int | None = 256
    temperature: float = 0.2
    top_p: float = 0.95
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    # At most this many tokens of thinking; then the engine writes the end-of-thinking tokens itself.
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        for name, value in normalized(self).items():
            object.__setattr__(self, name, value)

    @property
    def needs_logit_edits(self) -> bool:
        """True when logits are changed before sampling (penalties, bias, minimum length, grammar)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
            or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token and of the most likely alternatives, in nats."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenEvent:
    """What one tick added to one sequence. One event per sequence and tick, in token order."""

    job: Job
    index: int  # the choice
    token_ids: list[int]
    text: str  # text that is now safe to send: whole characters, no part of a stop string
    # (offset into the sequence's whole output text, token id) of structural tokens such as <think>;
    # an offset may lie beyond the text released so far.
    markers: tuple[tuple[int, int], ...] = ()
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    # The stop string or stop token id that ended the sequence, if one did.
    stop_match: str | int | None = None


class EventSink(Protocol):
    """Receives a job's events on the event-loop side."""

    def put(self, event: TokenEvent) -> None: ...


@dataclass(slots=True)
class Timings:
    """Clock readings (``time.perf_counter`` seconds) and sums for one job.

    ``*_compute_seconds`` cover the model forwards in which the job took part: the duration of a mixed
    forward is charged to every participant's current phase, so these are not isolated costs and must not
    be added up over requests.
    """

    received: float = field(default_factory=time.perf_counter)
    tokenized: float = 0.0
    queued: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    prefix_lookup_seconds: float = 0.0
    restore_seconds: float = 0.0
    cache_store_seconds: float = 0.0
    prefill_compute_seconds: float = 0.0
    decode_compute_seconds: float = 0.0
    preemptions: int = 0


class SequenceStatus(StrEnum):
    """Where a sequence is. RUNNING covers prefill and decode: only the counter tells them apart."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One choice of a job: its tokens, its pages and how far it is computed."""

    __slots__ = (
        "aged_since",
        "block_hashes",
        "detokenizer",
        "finish_reason",
        "forced",
        "grammar",
        "index",
        "job",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_sealed_blocks",
        "page_table",
        "row",
        "sample_seed",
        "status",
        "stop_match",
        "thinking_tokens",
        "token_ids",
    )

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.token_ids: list[int] = list(job.prompt_ids)
        self.num_prompt_tokens = len(job.prompt_ids)
        self.num_computed_tokens = 0  # counting tokens of forwards that have been launched
        self.num_pending_tokens = 0  # sampled on the device and not yet read back; not in token_ids
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache
        self.page_table: list[int] = []
        self.block_hashes: list[bytes] = []  # of the full blocks hashed so far
        # Leading full blocks that are computed and perhaps shared: their pages are never written again.
        self.num_sealed_blocks = 0
        self.num_published_blocks = 0  # leading full blocks that were offered to the prefix cache
        self.status = SequenceStatus.WAITING
        self.row = -1  # batch row while running
        self.aged_since = 0.0  # perf_counter when its prompt last made progress
        self.sample_seed = 0  # 64-bit key of its random numbers
        self.detokenizer: Detokenizer | None = None
        self.grammar: GrammarMatcher | None = None
        self.forced: list[int] = []  # tokens to write instead of sampling, next one last
        self.thinking_tokens = -1  # tokens of the open thinking block; -1 outside of one
        self.finish_reason: FinishReason | None = None
        self.stop_match: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def wants_tokens(self) -> bool:
        """False once the tokens on their way use up the answer's length."""
        outputs = len(self.token_ids) + self.num_pending_tokens - self.num_prompt_tokens
        return outputs < self.job.max_tokens

    @property
    def needs_host(self) -> bool:
        """True when its next token can only be chosen knowing the last: constrained or forced output."""
        return self.grammar is not None or self.job.params.thinking_budget is not None

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


class Job:
    """One accepted request: a tokenized prompt, its parameters and its sequences.

    ``max_tokens`` is the resolved limit on output tokens. ``deliver`` hands a tick's events to the
    consumer; ``cancelled`` may be set from any thread and is honoured within a tick.
    """

    def __init__(
        self,
        job_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        sink: EventSink | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.job_id = job_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.max_tokens = max_tokens
        self.sink = sink
        self.cache_salt = cache_salt
        self.priority = priority
        self.deadline = deadline  # perf_counter seconds, or None
        self.timings = timings if timings is not None else Timings()
        self.cancelled = False
        self.error: RequestError | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.sequences = [Sequence(self, index) for index in range(params.n)]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self.sequences[0].num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended; the first computes the prompt for the others."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


Deliver = Callable[[list[TokenEvent]], None]
