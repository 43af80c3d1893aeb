"""Random operations on engine, page pool and prefix cache, with the books checked after each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios.config import PAGE_SIZE
from helios.errors import ContextLengthError, InvalidRequestError
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.request import FinishReason, Job, SamplingParams, Timings
from tests.conftest import byte_tokenizer
from tests.unit.fakes import END, FakeRunner, FakeStore, expected_output

VOCABULARY = Vocabulary(byte_tokenizer())
PREFIXES = [[(p * 13 + i * 7) % 250 for i in range(5 * PAGE_SIZE)] for p in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Would catch: leaked or doubly freed pages, writes into shared pages, stale cache hits, lost jobs,
    two ends of one sequence, an answer that depends on neighbours or on the cache."""

    @initialize(
        pages=st.integers(5, 14),
        batch=st.integers(1, 6),
        chunk=st.sampled_from([1, 7, 64, 256, 300, 512, 2000]),
        lookahead=st.booleans(),
        on_demand=st.booleans(),
        by_priority=st.booleans(),
        slots=st.sampled_from([0, 0, 1, 4]),
    )
    def start(
        self,
        pages: int,
        batch: int,
        chunk: int,
        lookahead: bool,
        on_demand: bool,
        by_priority: bool,
        slots: int,
    ) -> None:
        self.now = 100.0
        self.runner = FakeRunner(pages)
        config = EngineConfig(
            max_batch_size=batch, prefill_chunk_size=chunk, num_pages=pages, max_model_len=6 * PAGE_SIZE,
            eos_token_ids=frozenset({END}), prefix_cache_ttl=50.0, lookahead=lookahead,
            on_demand=on_demand, by_priority=by_priority, priority_age=5.0,
        )  # fmt: skip
        store = FakeStore(self.runner, slots) if slots else None
        self.engine = Engine(config, self.runner, VOCABULARY, clock=lambda: self.now, store=store)
        self.live: dict[str, Job] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.count = 0

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(1, 5 * PAGE_SIZE),
        own=st.lists(st.integers(0, 250), max_size=5),
        max_tokens=st.sampled_from([1, 2, 5, 30, 300, 700]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from([None, None, "tenant"]),
        align=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def submit(
        self,
        prefix: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        salt: str | None,
        align: bool,
        priority: int,
    ) -> None:
        if align:
            shared = max(1, shared // PAGE_SIZE) * PAGE_SIZE
            own = []
        prompt = PREFIXES[prefix][:shared] + own
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n)
        job = Job(
            f"job{self.count}", prompt, params, max_tokens=max_tokens, cache_salt=salt, priority=priority,
            timings=Timings(received=self.now),
        )  # fmt: skip
        try:
            self.engine.check_fits(job)
        except (ContextLengthError, InvalidRequestError):
            return
        self.live[job.job_id] = job
        self.engine.waiting.append(job)

    def _tick(self) -> None:
        for event in self.engine.step():
            if event.finish_reason is None:
                continue
            job = event.job
            key = (job.job_id, event.index)
            assert key not in self.ends, "a sequence ended twice"
            self.ends[key] = 1
            output = job.sequences[event.index].token_ids[job.num_prompt_tokens :]
            expected = expected_output(job.prompt_ids, job.max_tokens)
            if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
            else:
                assert output == expected[: len(output)]
            if job.is_finished:
                self.live.pop(job.job_id, None)

    @rule(times=st.integers(1, 12))
    def tick(self, times: int) -> None:
        for _ in range(times):
            self.now += 0.01
            self._tick()
            self.engine.check_integrity()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        job.cancelled = True
        self._tick()
        assert job.is_finished
        assert all(not sequence.page_table for sequence in job.sequences)

    @rule()
    def broken_tick(self) -> None:
        self.runner.break_next = True
        self._tick()
        self.runner.break_next = False

    @rule(what=st.sampled_from(["break_admit", "break_copy"]))
    def broken_admission_or_copy(self, what: str) -> None:
        setattr(self.runner, what, True)
        self._tick()
        setattr(self.runner, what, False)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def poison_one(self, data: st.DataObject) -> None:
        self.runner.poison.add(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def deadline(self, data: st.DataObject) -> None:
        self.live[data.draw(st.sampled_from(sorted(self.live)))].deadline = self.now + 0.02

    @rule(seconds=st.sampled_from([1.0, 40.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear_cache(self) -> None:
        self.engine.kv.clear()

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.now += 0.01
            self._tick()
        assert not self.engine.has_work, "a job never ended"
        assert not self.live
        self.engine.check_integrity()
        assert self.engine.pool.num_referenced == 0
        assert not self.runner.rows_in_use


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestEngineRandom = EngineMachine.TestCase
