"""The engine: one tick at a time, owned by one thread.

    step: drop what was cancelled → admit → policy.plan → give pages → launch this tick → commit

With lookahead (on a GPU) a step launches the next tick before it commits the last one, so the device never
waits for Python: a sequence is planned with its newest token still on the device. Only the end of a
sequence that a token decides is then seen one tick late; the row it computed in vain is dropped, and
since all device work is on one stream, its pages may be handed on at once.

The engine knows sequences, pages and token ids; the :class:`Runner` knows tensors. A sequence finishes in
exactly one place, :meth:`Engine._finish`, and a job is put back in one, :meth:`Engine._preempt`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from helios.config import PAGE_SIZE
from helios.errors import ContextLengthError, DeadlineError, InternalError, InvalidRequestError, RequestError
from helios.runtime import policy
from helios.runtime.cost_model import CostModel, pairs
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.grammar import CompiledGrammar
from helios.runtime.interfaces import Grammars, PageStore, Runner, StepResult, TickRecord
from helios.runtime.kv_manager import KVManager
from helios.runtime.policy import RowPlan, Rules
from helios.runtime.request import (
    FinishReason,
    Job,
    Sequence,
    SequenceStatus,
    TokenEvent,
)
from helios.runtime.token_intake import TokenIntake

log = logging.getLogger("helios.engine")

# Behind a tick that only decodes, the next is launched when this share of it has passed, less what planning and
# launching may take: until then what arrives can still be in it.
LATEST_LAUNCH = 0.9
LAUNCH_SECONDS = 5e-4
LAUNCH_SECONDS_A_ROW = 2e-5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and rules of one engine. Times in seconds."""

    max_batch_size: int
    prefill_chunk_size: int
    num_pages: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    prefill_age: float = 0.1
    prefix_cache: bool = True
    prefix_cache_ttl: float = 300.0
    # Launch a tick before the one before it is committed.
    lookahead: bool = False
    late_launch: bool = True  # with lookahead: not before it has to be, where the tick before only decodes
    # Written by the engine when a thinking budget is used up: a newline, </think>, an empty line.
    end_thinking_ids: tuple[int, ...] = ()
    # Pages for the tokens there are, and preemption; otherwise pages for the longest answer at admission.
    on_demand: bool = False
    by_priority: bool = False
    priority_age: float = 30.0
    prefill_first: bool = False
    long_prefill_token_threshold: int = 0
    max_prompts: int = 0  # in a tick; 0: no bound
    target_itl: float = 0.0  # 0: chunks are not cut by time
    tick_log: int = 0  # ticks kept

    @property
    def rules(self) -> Rules:
        """What :mod:`helios.runtime.policy` needs to know."""
        return Rules(
            self.prefill_chunk_size, self.prefill_age, self.prefill_first, self.long_prefill_token_threshold,
            self.by_priority, self.priority_age, self.max_prompts,
        )  # fmt: skip


@dataclass(slots=True)
class _Tick:
    """A tick between its launch (clock seconds) and its commit."""

    rows: list[RowPlan]
    samplers: list[int]
    pending: object
    sampled: bool  # False while sampling waits for the last tick's tokens
    decode_rows: int
    prompt_tokens: int
    million_pairs: float
    launched: float
    began: float  # on the device, as far as the host can tell


class Engine:
    """Continuous batching over a paged KV pool. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        vocabulary: Vocabulary,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        cost: CostModel | None = None,
        store: PageStore | None = None,
    ) -> None:
        self.config = config
        self.kv = KVManager(
            config.num_pages, config.prefix_cache_ttl, config.prefix_cache, clock,
            on_demand=config.on_demand, store=store,
        )  # fmt: skip
        self.pool, self.prefix_cache = self.kv.pool, self.kv.prefix_cache
        self.cost = cost or CostModel()
        self.running: list[Sequence] = []  # in admission order
        self.waiting: deque[Job] = deque()
        self.num_ticks = 0
        self.num_finished_jobs = 0
        self.num_preemptions = 0
        # Called once a tick with its prompt tokens and sampled tokens.
        self.on_tick: Callable[[int, int], None] | None = None
        self.tick_log: deque[TickRecord] = deque(maxlen=config.tick_log)
        self._rules = config.rules
        self._runner = runner
        self._intake = TokenIntake(vocabulary, config.eos_token_ids, config.end_thinking_ids)
        self._grammars = grammars
        self._clock = clock
        self._free_rows = list(range(config.max_batch_size - 1, -1, -1))
        self._in_flight: _Tick | None = None
        self._last_decode = (0, 0.0)  # rows and seconds of the last tick without prompts
        self._jobs: dict[Job, None] = {}  # admitted and not finished, in admission order
        self._unforked: list[Sequence] = []  # further choices that wait for their prompt to be computed
        self._blocked_job: Job | None = None  # whose wait for memory has been logged

    # -- the door ---------------------------------------------------------------------------------

    def check_fits(self, job: Job) -> None:
        """Raise ContextLengthError or InvalidRequestError if ``job`` could never run. Any thread."""
        config = self.config
        wanted = job.num_prompt_tokens + job.max_tokens
        if wanted > config.max_model_len:
            raise ContextLengthError(
                f"This server's maximum context length is {config.max_model_len} tokens. However, your request "
                f"asks for {wanted} tokens ({job.num_prompt_tokens} in the prompt, {job.max_tokens} for the "
                f"answer). Please shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if job.params.n > config.max_batch_size:
            raise InvalidRequestError(
                f"n is {job.params.n}, but this server runs at most {config.max_batch_size} sequences at once.",
                param="n",
            )
        pages = sum(self.kv.pages_wanted(sequence) for sequence in job.sequences)
        if pages > config.num_pages:
            raise ContextLengthError(
                f"The request needs {pages} KV pages of {PAGE_SIZE} tokens, but this server has "
                f"{config.num_pages}. Please shorten the prompt, lower max_tokens or n.",
                param="max_tokens",
            )

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._in_flight or self.kv.any_loading)

    def seconds_until_due(self) -> float:
        """How long the next :meth:`step` may wait without leaving the device idle. Its tick would stand behind
        the one on the device all the same, but without the jobs that arrive meanwhile.

        Not behind prompts: whoever came then would only take the longest one's place in the next chunk.
        """
        tick = self._in_flight
        if tick is None or tick.prompt_tokens or not self.config.late_launch:
            return 0.0
        rows, seconds = self._last_decode
        if not seconds or rows > tick.decode_rows:  # of more rows: this one may take less
            return 0.0
        launch = LAUNCH_SECONDS + LAUNCH_SECONDS_A_ROW * tick.decode_rows
        return tick.began + LATEST_LAUNCH * seconds - launch - self._clock()

    # -- one tick ---------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one tick. Returns the events of every sequence that gained a token or ended."""
        now = self._clock()
        events: list[TokenEvent] = []
        self._drop_ended(now, events)
        self.kv.poll_host()
        self._admit(now, events)
        for sequence in self.running:
            if sequence.num_computed_tokens % PAGE_SIZE == 0 and self.kv.match_further(sequence, now):
                self._runner.set_pages(sequence)
        rows = self._give_pages(self._plan(now), now, events)
        last, self._in_flight = self._in_flight, None
        tick = self._launch(rows, events) if rows else None
        if last is not None:
            self._commit(last, events)
        if tick is not None:
            if last is not None:
                tick.began = self._clock()
            if not tick.sampled:
                self._guarded(tick.rows, lambda: self._runner.sample(tick.pending), events)
            if self.config.lookahead:
                self._in_flight = tick
            else:
                self._commit(tick, events)
        elif last is None and not events:
            self.kv.poll_host(wait=True)  # nothing can run before a page has come back
        return events

    def _plan(self, now: float) -> list[RowPlan]:
        runnable = [sequence for sequence in self.running if sequence.wants_tokens]
        if self.kv.any_loading:
            runnable = [sequence for sequence in runnable if not self.kv.is_loading(sequence)]
        target = self.config.target_itl
        time_beside = partial(self.cost.budget, target) if target else None
        return policy.plan(runnable, self._rules, now, time_beside)

    def _launch(self, rows: list[RowPlan], events: list[TokenEvent]) -> _Tick | None:
        """Start a tick on the device. The books move on as if it had succeeded."""
        self.num_ticks += 1
        samplers = [
            index for index, row in enumerate(rows) if row.sequence.num_uncomputed_tokens == row.count
        ]
        host_first = self._in_flight_tokens(rows) and any(
            rows[index].sequence.needs_host for index in samplers
        )
        started: list[object] = []
        launched = self._clock()

        def start() -> None:
            started.append(self._runner.forward(rows, samplers))
            if not host_first:
                self._runner.sample(started[0])

        if not self._guarded(rows, start, events):
            return None
        decode_rows, prompt_tokens, million_pairs = 0, 0, 0.0
        for row in rows:
            row.sequence.num_computed_tokens = row.end
            if row.count == 1:
                decode_rows += 1
            else:
                prompt_tokens += row.count
                million_pairs += pairs(row.start, row.count)
        for index in samplers:
            rows[index].sequence.num_pending_tokens += 1
        return _Tick(
            rows, samplers, started[0], not host_first, decode_rows, prompt_tokens, million_pairs, launched, launched
        )  # fmt: skip

    @staticmethod
    def _in_flight_tokens(rows: list[RowPlan]) -> bool:
        return any(row.sequence.num_pending_tokens for row in rows)

    def _guarded(self, rows: list[RowPlan], work: Callable[[], None], events: list[TokenEvent]) -> bool:
        """Run device work; if it breaks, only the jobs of ``rows`` fail."""
        try:
            work()
        except Exception:
            jobs = {row.sequence.job for row in rows if not row.sequence.is_finished}
            log.exception("tick failed requests=%s", ",".join(sorted(job.job_id for job in jobs)))
            for job in jobs:
                self._fail(job, InternalError("The engine failed while computing this request."), events)
            return False
        return True

    def _commit(self, tick: _Tick, events: list[TokenEvent]) -> None:
        """Take in a tick's results: publish full blocks, append tokens, end sequences."""
        results: list[StepResult] = []
        if not self._guarded(tick.rows, lambda: results.append(self._runner.collect(tick.pending)), events):
            return
        result, rows = results[0], tick.rows
        now = self._clock()
        self.cost.observe(tick.decode_rows, tick.prompt_tokens, tick.million_pairs, result.forward_seconds)
        if not tick.prompt_tokens:
            self._last_decode = (tick.decode_rows, result.forward_seconds)
        prompt_tokens = self._take_rows(tick, result, now, events)
        sampled = 0
        for position, index in enumerate(tick.samplers):
            sequence = rows[index].sequence
            if sequence.is_finished:
                continue  # ended while this tick was on the device
            sequence.num_pending_tokens -= 1
            if not result.finite[position]:
                why = sequence.grammar.error if sequence.grammar is not None else None
                error = InternalError(why or "The model's output for this request is not a number.")
                self._fail(sequence.job, error, events)
                continue
            sampled += 1
            event = self._intake.add(sequence, result.token_ids[position], result.logprobs[position], now)
            events.append(event)
            if event.finish_reason is not None:
                self._finish(sequence, event.finish_reason, now)
        if self.on_tick is not None:
            self.on_tick(prompt_tokens, sampled)
        if self.config.tick_log:
            self.tick_log.append(
                TickRecord(
                    tick.launched,
                    now,
                    tick.decode_rows,
                    tick.prompt_tokens,
                    len(self.running),
                    len(self.waiting),
                )
            )

    def _take_rows(self, tick: _Tick, result: StepResult, now: float, events: list[TokenEvent]) -> int:
        """Charge the forward to its jobs, publish full blocks, start further choices. Returns the tick's prompt
        tokens."""
        charged: set[tuple[Job, bool]] = set()
        prompt_tokens = 0
        for row in tick.rows:
            sequence, job = row.sequence, row.sequence.job
            decoding = row.start >= sequence.num_prompt_tokens
            prompt_tokens += 0 if decoding or sequence.index else row.count
            if sequence.is_finished:
                continue
            # Once per job and phase, however many choices it has.
            if job.params.n == 1 or (job, decoding) not in charged:
                if job.params.n > 1:
                    charged.add((job, decoding))
                if decoding:
                    job.timings.decode_compute_seconds += result.forward_seconds
                else:
                    job.timings.prefill_compute_seconds += result.forward_seconds
            entries = result.prompt_logprobs.get(sequence)
            if entries is not None and len(job.prompt_logprobs or ()) < job.num_prompt_tokens:
                job.prompt_logprobs = [*(job.prompt_logprobs or [None]), *entries]
            if row.end // PAGE_SIZE > sequence.num_published_blocks:
                self.kv.publish(sequence, row.end // PAGE_SIZE, now)
            if self._unforked and row.end >= sequence.num_prompt_tokens:
                self._guarded([row], lambda one=sequence: self._fork(one), events)
        return prompt_tokens

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, now: float, events: list[TokenEvent]) -> None:
        """Admit waiting jobs in the policy's order while rows and pages last. Who is next blocks the rest."""
        self.kv.expire(now)
        while self.waiting:
            job = policy.next_job(self.waiting, now, self._rules)
            grammar, compiled = job.params.grammar, None
            if grammar is not None and self._grammars is not None:
                try:
                    compiled = self._grammars.compile(grammar)  # remembered from the door, as a rule
                except RequestError as error:
                    self.waiting.remove(job)
                    self._fail(job, error, events)
                    continue
            while not self._has_room(job, now):
                less_urgent = policy.yields_to(self._jobs, job, now, self._rules)
                if less_urgent is None:
                    self._log_blocked(job)
                    return
                self._settle(events)  # may end the one that would be put back
                if less_urgent in self._jobs:
                    self._preempt(less_urgent)
            self.waiting.remove(job)
            resumed = job.timings.preemptions > 0
            if not resumed:
                job.timings.admitted = now
            self._jobs[job] = None
            first, *others = job.unfinished
            try:
                for sequence in (first, *others):
                    self._seat(sequence, compiled, now)
            except Exception:  # the runner may run out of memory for what it keeps per row
                log.exception("admission failed request=%s", job.job_id)
                self._fail(job, InternalError("The engine failed while admitting this request."), events)
                continue
            self.running.append(first)
            self._unforked.extend(others)
            log.info(
                "%s request=%s prompt_tokens=%d cached_tokens=%d max_tokens=%d n=%d",
                "resumed" if resumed else "admitted",
                job.job_id, job.num_prompt_tokens, job.num_cached_tokens, job.max_tokens, job.params.n,
            )  # fmt: skip

    def _has_room(self, job: Job, now: float) -> bool:
        """Take rows' worth and pages for ``job``, or say that there are none."""
        if len(job.unfinished) > len(self._free_rows):
            return False
        return self.kv.reserve(job, now, alone=not self._jobs)

    def _log_blocked(self, job: Job) -> None:
        if self._blocked_job is not job:
            self._blocked_job = job
            log.info(
                "admission blocked request=%s free_rows=%d free_pages=%d reclaimable_pages=%d",
                job.job_id, len(self._free_rows), self.pool.num_free, self.pool.num_cached_only,
            )  # fmt: skip

    def _seat(self, sequence: Sequence, compiled: CompiledGrammar | None, now: float) -> None:
        """Give a sequence its batch row and what it needs to run."""
        sequence.status = SequenceStatus.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.aged_since = now
        self._intake.begin(sequence, compiled)
        self._runner.admit(sequence)
        self._runner.set_pages(sequence)

    def _fork(self, first: Sequence) -> None:
        """The prompt is computed: start the job's further choices on its pages.

        Each choice recomputes the prompt's last token as its first decode row, which gives it logits of its
        own to sample from.
        """
        for sequence in [item for item in self._unforked if item.job is first.job]:
            self._unforked.remove(sequence)
            copy = self.kv.fork(first, sequence)
            if copy is not None:
                self._runner.copy_page(*copy)
            self._runner.set_pages(sequence)
            self.running.append(sequence)

    # -- memory on demand -------------------------------------------------------------------------

    def _give_pages(self, rows: list[RowPlan], now: float, events: list[TokenEvent]) -> list[RowPlan]:
        """Give each planned row its pages. Where memory is short, the policy's victims are put back, and the
        rows that are left are planned anew."""
        if not self.config.on_demand:
            return rows
        short = [
            row for row in rows if row.end > len(row.sequence.page_table) * PAGE_SIZE and not self._grow(row)
        ]
        if not short:
            return rows
        # Tokens on their way belong to sequences that may have to be put back: take them in first.
        self._settle(events)
        while short:
            row = short.pop(0)
            job = row.sequence.job
            while job in self._jobs and not row.sequence.is_finished and not self._grow(row):
                self._preempt(policy.victim(self._jobs, now, self._rules))
        # What the settled tick ended or began is not in the old plan. Its rows may want pages too: the next
        # round finds those that were just freed.
        return self._give_pages(self._plan(now), now, events)

    def _grow(self, row: RowPlan) -> bool:
        """Pages for a row's tokens; False if memory is short."""
        if not self.kv.grow(row.sequence, row.end):
            return False
        self._runner.set_pages(row.sequence)
        return True

    def _settle(self, events: list[TokenEvent]) -> None:
        """Commit the tick that is in flight, before its time."""
        last, self._in_flight = self._in_flight, None
        if last is not None:
            self._commit(last, events)

    def _preempt(self, job: Job) -> None:
        """Put a running job back to the head of the queue. Its tokens stay, and so do its full blocks while
        the prefix cache keeps them; nothing of it may be in flight."""
        for sequence in job.unfinished:
            assert sequence.num_pending_tokens == 0, "a sequence with a token in flight cannot be put back"
            self._runner.release(sequence)
            self._free_rows.append(sequence.row)
            sequence.row = -1
            sequence.status = SequenceStatus.WAITING
            self.kv.release(sequence, self._clock())
            group = self.running if sequence in self.running else self._unforked
            group.remove(sequence)
        if job.num_output_tokens == 0:
            job.prompt_logprobs = None  # computed anew
        job.timings.preemptions += 1
        self.num_preemptions += 1
        del self._jobs[job]
        self.waiting.appendleft(job)
        log.info(
            "put back request=%s output_tokens=%d free_pages=%d reclaimable_pages=%d",
            job.job_id, job.num_output_tokens, self.pool.num_free, self.pool.num_cached_only,
        )  # fmt: skip

    # -- the end of a sequence --------------------------------------------------------------------

    def _drop_ended(self, now: float, events: list[TokenEvent]) -> None:
        """End what was cancelled or has run out of time, waiting or running."""
        for job in [job for job in self.waiting if job.cancelled or _is_late(job, now)]:
            self.waiting.remove(job)
            self._end(job, now, events)
        for job in [job for job in self._jobs if job.cancelled or _is_late(job, now)]:
            self._end(job, now, events)

    def _end(self, job: Job, now: float, events: list[TokenEvent]) -> None:
        if job.cancelled:
            self._finish_job(job, FinishReason.ABORT, events)
            return
        waited = now - job.timings.received
        self._fail(
            job, DeadlineError(f"The request did not finish within its deadline ({waited:.3g} s)."), events
        )

    def _fail(self, job: Job, error: RequestError, events: list[TokenEvent]) -> None:
        job.error = error
        self._finish_job(job, FinishReason.ERROR, events)

    def _finish_job(self, job: Job, reason: FinishReason, events: list[TokenEvent]) -> None:
        now = self._clock()
        for sequence in job.sequences:
            if not sequence.is_finished:
                self._finish(sequence, reason, now)
                events.append(TokenEvent(job, sequence.index, [], "", finish_reason=reason))

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """The only place where a sequence ends: its row and pages go back."""
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.row >= 0:
            self._runner.release(sequence)
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.page_table:
            self.kv.release(sequence, now)
        for group in (self.running, self._unforked):
            if sequence in group:
                group.remove(sequence)
                break
        job = sequence.job
        if job.is_finished:
            job.timings.finished = now
            self._jobs.pop(job, None)
            self.num_finished_jobs += 1
            log.info(
                "finished request=%s reason=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d",
                job.job_id, reason.value, job.num_prompt_tokens, job.num_cached_tokens, job.num_output_tokens,
            )  # fmt: skip

    def fail_all(self, error: RequestError) -> list[TokenEvent]:
        """End every job, waiting and running, with ``error``."""
        events: list[TokenEvent] = []
        for job in [*self.waiting, *self._jobs]:
            self._fail(job, error, events)
        self.waiting.clear()
        return events

    # -- books ------------------------------------------------------------------------------------

    def live_sequences(self) -> Iterable[Sequence]:
        """Every sequence that holds pages."""
        return [*self.running, *self._unforked]

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, rows and jobs add up."""
        live = list(self.live_sequences())
        self.kv.check_integrity(live)
        assert len(live) + len(self._free_rows) == self.config.max_batch_size, "rows are lost"
        assert {sequence.job for sequence in live} == set(self._jobs), "jobs and sequences differ"


def _is_late(job: Job, now: float) -> bool:
    return job.deadline is not None and now > job.deadline
