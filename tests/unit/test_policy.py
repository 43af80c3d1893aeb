"""The scheduling rules as tables of plans, with plain integers."""

from __future__ import annotations

from helios.runtime.policy import Rules, next_job, plan, victim, yields_to
from helios.runtime.request import Job, SamplingParams, Sequence


def sequence(name: str, prompt: int, computed: int, aged: float = 0.0) -> Sequence:
    job = Job(name, list(range(prompt)), SamplingParams(), max_tokens=10)
    job.sequences[0].num_computed_tokens = computed
    job.sequences[0].aged_since = aged
    return job.sequences[0]


def planned(
    sequences: list[Sequence], budget: int, now: float = 0.0, age: float = 0.1
) -> list[tuple[str, int, int]]:
    rows = plan(sequences, Rules(budget, age), now)
    return [(row.sequence.job.job_id, row.start, row.count) for row in rows]


def test_decoders_go_first_and_prompts_take_the_rest() -> None:
    """Would catch a decode row that waits behind a prompt, or a budget that is overrun."""
    rows = planned([sequence("p", 100, 0), sequence("d", 10, 9)], budget=8)
    assert rows == [("d", 9, 1), ("p", 0, 7)]


def test_budget_is_raised_so_that_both_kinds_progress() -> None:
    """Would catch prefill starving when there are more decoders than tokens in the budget."""
    decoders = [sequence(f"d{i}", 10, 9) for i in range(4)]
    rows = planned([*decoders, sequence("p", 100, 0)], budget=2)
    assert rows == [*[(f"d{i}", 9, 1) for i in range(4)], ("p", 0, 1)]


def test_prompts_that_fit_whole_are_preferred_and_share_a_tick() -> None:
    """Would catch a long prompt that blocks short ones behind it."""
    rows = planned([sequence("long", 500, 0), sequence("a", 30, 0), sequence("b", 40, 0)], budget=100)
    assert rows == [("a", 0, 30), ("b", 0, 40), ("long", 0, 30)]


def test_oldest_waiting_prompt_takes_the_next_chunk_and_its_age_resets() -> None:
    """Would catch a long prompt starved by a stream of short ones."""
    long, short = sequence("long", 500, 0, aged=1.0), sequence("short", 30, 0, aged=1.15)
    assert planned([long, short], budget=100, now=1.2) == [("long", 0, 100)]
    assert long.aged_since == 1.2
    long.num_computed_tokens = 100
    assert planned([long, short], budget=100, now=1.21) == [("short", 0, 30), ("long", 100, 70)]


def test_aged_prompts_rotate() -> None:
    """Would catch one aged prompt that takes every chunk while another waits as long."""
    a, b = sequence("a", 500, 0, aged=0.0), sequence("b", 500, 0, aged=0.05)
    order = []
    for now in (0.2, 0.3, 0.41, 0.52):
        row = plan([a, b], Rules(100, 0.1), now)[0]
        row.sequence.num_computed_tokens = row.end
        order.append(row.sequence.job.job_id)
    assert order == ["a", "b", "a", "b"]


def test_a_one_token_chunk_counts_as_a_decode_row() -> None:
    """Would catch decode rows that do not come first, which the packer relies on."""
    rows = planned([sequence("a", 60, 0), sequence("p", 100, 0), sequence("d", 10, 9)], budget=62)
    assert [count for _, _, count in rows] == [1, 1, 60]


def test_nothing_to_do_is_an_empty_plan() -> None:
    """Would catch a tick that runs an empty batch."""
    assert planned([], budget=10) == []


def test_prefill_first_lets_decoding_wait() -> None:
    """Would catch a baseline that decodes beside prompts, or one that never decodes again."""
    rules = Rules(50, prefill_first=True)
    decoder, prompt = sequence("d", 10, 9), sequence("p", 100, 0)
    decoder.token_ids.append(1)
    decoder.num_computed_tokens = 10
    assert [(row.sequence, row.count) for row in plan([decoder, prompt], rules, 0.0)] == [(prompt, 50)]
    assert [row.sequence for row in plan([decoder], rules, 0.0)] == [decoder]
    cached = sequence("cached", 10, 9)
    assert [row.sequence for row in plan([cached, prompt], rules, 0.0)] == [cached, prompt]


def test_one_long_prompt_takes_at_most_its_threshold() -> None:
    """Would catch a long prompt that takes the whole budget although it is bounded."""
    rules = Rules(100, long_prefill=30)
    a, b = sequence("a", 500, 0), sequence("b", 400, 0)
    short = sequence("short", 20, 0)
    rows = plan([a, b, short], rules, 0.0)
    assert [(row.sequence.job.job_id, row.count) for row in rows] == [("short", 20), ("a", 30), ("b", 30)]


def test_a_tick_holds_no_more_prompts_than_a_graph() -> None:
    """Would catch many short prompts in a tick that no captured graph takes; decoding rows do not count, and the
    prompt left out is the next tick's first."""
    rules = Rules(100, prefill_age=0.1, max_prompts=2)
    decoder = sequence("decoder", 10, 9)
    prompts = [sequence(name, 5, 0) for name in "abc"]
    rows = plan([decoder, *prompts], rules, 0.0)
    assert [row.sequence for row in rows] == [decoder, *prompts[:2]]
    aged = sequence("aged", 500, 0)
    rows = plan([*prompts, aged], rules, 1.0)
    assert len(rows) == 2


def test_urgent_prompts_get_their_chunk_first() -> None:
    """Would catch priorities that order the queue but not the tick."""
    rules = Rules(100, by_priority=True)
    low, high = sequence("low", 90, 0), sequence("high", 90, 0)
    low.job.priority, high.job.priority = 5, 1
    rows = plan([low, high], rules, 0.0)
    assert [(row.sequence.job.job_id, row.count) for row in rows] == [("high", 90), ("low", 10)]


def waiting(name: str, priority: int, received: float) -> Job:
    job = sequence(name, 5, 0).job
    job.priority, job.timings.received = priority, received
    return job


def test_who_is_next_and_who_makes_room() -> None:
    """Would catch ageing that never helps, a victim more urgent than who stays, or equals that displace equals."""
    rules = Rules(100, by_priority=True, priority_age=30.0)
    old, low, high = waiting("old", 9, 0.0), waiting("low", 5, 90.0), waiting("high", 1, 95.0)
    jobs = [low, high, old]
    assert next_job(jobs, 20.0, rules) is high
    assert next_job(jobs, 100.0, rules) is old
    assert victim(jobs, 20.0, rules) is old
    assert victim(jobs, 100.0, rules) is low
    assert yields_to([low, high], waiting("new", 5, 96.0), 100.0, rules) is None
    assert yields_to([low, high], waiting("new", 4, 96.0), 100.0, rules) is low
    assert yields_to([old], waiting("new", -5, 96.0), 100.0, rules) is None
    fcfs = Rules(100)
    assert next_job(jobs, 100.0, fcfs) is low
    assert victim(jobs, 100.0, fcfs) is old
    assert yields_to(jobs, high, 100.0, fcfs) is None
