"""Arithmetic on hand-made timelines, and floors against the published table."""

from array import array

import numpy as np
import pytest
from benchmarks.floor import (
    Card,
    ModelShape,
    Work,
    decode_seconds,
    ideal_run,
    prefill_seconds,
    show_ideal_runs,
)
from benchmarks.load import ClientLoad, Record, Run
from benchmarks.metrics import Limits, concurrency, distribution, lookup, row, summarise
from benchmarks.run import warnings
from benchmarks.workloads import build

H200 = Card(4.3e12, 790e12)
QWEN3_4B = ModelShape(36, 2560, 9728, 32, 8, 128, 151936)
QWEN3_06B = ModelShape(28, 1024, 3072, 16, 8, 128, 151936)


def record(number: int, sent: float, first: float, step: float, tokens: int, **more: object) -> Record:
    """A request whose tokens come every `step` seconds from `first` on."""
    times = array("d", [first + i * step for i in range(tokens)])
    made = Record(
        number, 0, "a" if number % 2 else "b", tokens, sent, sent, sent, times[-1], first, times[-1], times
    )
    made.prompt_tokens, made.completion_tokens, made.finish_reason = 100, tokens, "length"
    for name, value in more.items():
        setattr(made, name, value)
    return made


def two() -> Run:
    """Request 0 from 0 to 2.0 s, request 1 from 1.0 to 3.0 s."""
    records = [
        record(0, 0.0, 1.0, 0.1, 11),
        record(1, 1.0, 1.5, 0.3, 6, cached_tokens=64, finish_reason="stop"),
    ]
    return Run(records, 0.0, [ClientLoad(0.2, 0.001), ClientLoad(0.9, 0.004)])


def test_aggregates_of_a_known_timeline():
    found = summarise(two(), submitted=4)
    expected = {
        "completed_requests": 2,
        "completion_ratio": 0.5,
        "elapsed_seconds": 3.0,
        "output_tokens_per_second": 17 / 3,
        "total_tokens_per_second": 217 / 3,
        "requests_per_second": 2 / 3,
        "time_to_first_token_seconds.p50": 0.75,
        "time_to_first_token_seconds.max": 1.0,
        "end_to_end_seconds.mean": 2.0,
        "time_per_output_token_seconds.p50": 0.2,
        "inter_token_seconds.p50": 0.1,
        "inter_token_seconds.max": 0.3,
        "inter_token_seconds.count": 15,
        "decode_tokens_per_second.max": 10.0,
        "prefill_tokens_per_second.min": 100.0,
        "peak_client_concurrency": 2,
        "mean_client_concurrency": 4 / 3,
        "drain_seconds": 1.0,
        "drain_fraction": 1 / 3,
        "max_token_hit_rate": 0.5,
        "cache_hit_rate": 0.5,
        "restored_tokens": 64,
        "restored_fraction": 0.32,
        "tokens_per_chunk": 1.0,
        "client.cpu_share_max": 0.9,
    }
    assert {name: lookup(found, name) for name in expected} == pytest.approx(expected)
    assert sum(found["inter_token_histogram"]) == 15
    assert sum(found["timeline"]["output_tokens"]) == pytest.approx(17)
    assert sum(found["timeline"]["prompt_tokens"]) == 136  # restored tokens were not computed
    assert set(found["categories"]) == {"a", "b"}
    words = " ".join(warnings(found, cpu_limit=0.7))
    assert "client may be the bottleneck" in words
    assert "50.0%" in words


def test_goodput_counts_requests_within_both_limits():
    for limits, good in (((1.0, 0.2), 1), ((0.6, None), 1), ((0.6, 0.2), 0), ((2.0, 1.0), 2)):
        found = summarise(two(), 4, Limits(*limits))
        assert found["goodput"]["fraction"] == good / 4
        assert found["goodput"]["requests_per_second"] == pytest.approx(good / 3)


def test_drain_of_a_closed_loop_begins_with_the_last_request():
    """Two at a time: the third leaves when the first ends; from then on nothing waits."""
    records = [record(i, sent, sent + 0.5, 0.5, 2) for i, sent in enumerate((0.0, 0.0, 1.0))]
    found = summarise(Run(records, 0.0, [ClientLoad(0, 0)]), 3)
    assert (found["peak_client_concurrency"], found["drain_seconds"]) == (2, pytest.approx(1.0))
    assert concurrency(records)[:2] == (2, pytest.approx(1.5))


def test_a_run_in_which_all_failed_has_no_latencies():
    failed = record(0, 0.0, 1.0, 0.1, 2, error="HTTP 500: no")
    found = summarise(Run([failed], 0.0, [ClientLoad(0, 0)]), 1)
    assert (found["completion_ratio"], found["errors"]) == (0, {"HTTP 500: no": 1})
    assert warnings(found, 0.7)
    assert distribution([None]) is None


def test_a_row_has_moments_relative_to_the_start():
    shown = row(record(0, 5.0, 6.0, 0.5, 3), start=5.0)
    assert (shown["sent_at_seconds"], shown["first_token_at_seconds"], shown["ended_at_seconds"]) == (0, 1, 2)
    assert shown["inter_token_max_seconds"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "context", "milliseconds"),
    [
        (QWEN3_4B, 512, (1.89, 2.01, 2.44, 3.00, 4.14, 7.14)),
        (QWEN3_4B, 1024, (1.91, 2.15, 3.00, 4.13, 6.38, 11.6)),
        (QWEN3_4B, 4096, (2.01, 3.00, 6.37, 10.9, 19.9, 38.6)),
        (QWEN3_06B, 512, (0.29, 0.39, 0.72, 1.16, 2.04, 3.92)),
        (QWEN3_06B, 1024, (0.305, 0.50, 1.16, 2.03, 3.79, 7.41)),
        (QWEN3_06B, 4096, (0.39, 1.15, 3.78, 7.28, 14.3, 28.4)),
    ],
)
def test_decode_floors(shape: ModelShape, context: int, milliseconds: tuple[float, ...]):
    """Worked out by hand for a card of 4.3 TB/s and 790 TFLOP/s, rounded to the digits shown."""
    rows = (1, 8, 32, 64, 128, 256)
    found = [1000 * decode_seconds(shape, H200, n, n * context) for n in rows]
    assert found == pytest.approx(milliseconds, rel=0.005, abs=0.005)


@pytest.mark.parametrize(
    ("shape", "thousands"),
    [(QWEN3_4B, (107, 104, 93, 65, 47)), (QWEN3_06B, (841, 791, 585, 286, 170))],
)
def test_prefill_floors(shape: ModelShape, thousands: tuple[float, ...]):
    sizes = (512, 1024, 4096, 16384, 32768)
    found = [size / prefill_seconds(shape, H200, size) / 1000 for size in sizes]
    assert found == pytest.approx(thousands, rel=0.01)


def test_parameters_follow_from_the_config():
    config = {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
    assert ModelShape.from_config(config) == QWEN3_4B
    assert QWEN3_4B.body_parameters == pytest.approx(3.633e9, rel=1e-3)
    assert (QWEN3_4B.kv_bytes_per_token, QWEN3_06B.kv_bytes_per_token) == (147_456, 114_688)


def test_the_ideal_run_of_offline256():
    """36.0k tokens/s for 0.6B and 17.7k for 4B on the published workload."""
    works = [Work(0.0, len(ask.prompt or ()), ask.max_tokens) for ask in build("offline256", 0).asks]
    for shape, rate in ((QWEN3_06B, 36_000), (QWEN3_4B, 17_700)):
        assert ideal_run(shape, H200, works).output_tokens_per_second(works) == pytest.approx(rate, rel=0.01)


def test_the_ideal_run_of_single_requests_is_prefill_plus_steps():
    work = Work(0.0, 512, 3)
    steps = decode_seconds(QWEN3_4B, H200, 1, 513) + decode_seconds(QWEN3_4B, H200, 1, 514)
    alone = prefill_seconds(QWEN3_4B, H200, 512) + steps
    ideal = ideal_run(QWEN3_4B, H200, [work, work], concurrency=1)
    assert ideal.elapsed_seconds == pytest.approx(2 * alone)
    assert ideal.per_output_token_seconds == pytest.approx([steps / 2] * 2)
    late = ideal_run(QWEN3_4B, H200, [Work(9.0, 512, 1)])
    assert late.first_token_seconds == pytest.approx([prefill_seconds(QWEN3_4B, H200, 512)])
    assert prefill_seconds(QWEN3_4B, H200, 512, 512) == QWEN3_4B.weight_read_bytes / H200.bandwidth


def test_ideal_runs_are_printed_for_each_seed(capsys: pytest.CaptureFixture[str]):
    """Would catch arrivals or lengths that get lost between a workload and its ideal run."""
    show_ideal_runs(QWEN3_4B, H200, "poisson:rate=8,count=40", [2, 3])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == ["rate=8,count=40 seed 2", "rate=8,count=40 seed 3"]
    longest = max(len(ask.prompt or ()) for ask in build("poisson:rate=8,count=40", 2).asks)
    worst = float(lines[0].split("max ")[1].split()[0])
    assert worst >= 1e3 * prefill_seconds(QWEN3_4B, H200, longest) - 0.1


def test_floors_and_shares_are_in_the_aggregates():
    found = summarise(two(), 2, shape=QWEN3_4B, card=H200)
    reached = lookup(found, "floor.of_limit.time_per_output_token_seconds_p50")
    assert reached is not None
    assert 0 < reached < 0.02
    assert np.isclose(
        found["floor"]["time_to_first_token_seconds"]["max"], prefill_seconds(QWEN3_4B, H200, 100)
    )
