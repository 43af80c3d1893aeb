"""Seeded workloads have the stated lengths and are the same everywhere; datasets are checked by place."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dataset import DatasetError, load_dataset
from benchmarks.workloads import WORKLOADS, build, parse


def lengths(spec: str, seed: int = 0) -> list[tuple[int, int]]:
    return [(len(ask.prompt or ()), ask.max_tokens) for ask in build(spec, seed).asks]


def test_offline256_at_seed_0_is_the_published_workload():
    """A changed order of draws would silently make our figures incomparable with the published ones."""
    pairs = lengths("offline256")
    assert (len(pairs), sum(p for p, _ in pairs), sum(o for _, o in pairs)) == (256, 142_827, 133_966)


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_requests_other_seed_other_requests(name: str):
    assert build(name, 7) == build(name, 7)
    assert build(name, 7).sessions != build(name, 8).sessions


def test_two_rates_share_no_prompt():
    """A prefix cache would otherwise answer the second rate from the first."""
    slow = {ask.prompt for ask in build("poisson:rate=8,count=40", 1).asks}
    assert slow.isdisjoint(ask.prompt for ask in build("poisson:rate=16,count=40", 1).asks)


def test_stated_lengths():
    assert set(lengths("batch1")) == {(512, 256)}
    assert build("batch1", 0).concurrency == 1
    mixed = build("mixed30", 0)
    assert mixed.concurrency == 16
    bounds = {"prefill_heavy": (1500, 3000, 64), "balanced": (400, 700, 256), "decode_heavy": (40, 100, 512)}
    for ask in mixed.asks:
        low, high, output = bounds[ask.category]
        assert low <= len(ask.prompt or ()) <= high
        assert ask.max_tokens == output
    poisson = build("poisson:rate=8", 3)
    sizes = [len(ask.prompt or ()) for ask in poisson.asks]
    assert len(sizes) == 240
    assert sum(4096 <= size <= 7680 for size in sizes) == 24
    assert sum(128 <= size <= 512 for size in sizes) == 216
    arrivals = [session.arrival_seconds for session in poisson.sessions]
    assert arrivals == sorted(arrivals)
    assert 22 < arrivals[-1] < 40  # 239 gaps of 1/8 s, within some 2.5 standard deviations
    shared = [ask.prompt for ask in build("prefix", 0).asks]
    assert len(shared) == 64
    assert len({prompt[:2048] for prompt in shared if isinstance(prompt, tuple)}) == 1
    assert len({prompt[2048:] for prompt in shared if isinstance(prompt, tuple)}) == 64
    assert {c: [a.category for a in build("seed30", 0).asks].count(c) for c in bounds} == dict.fromkeys(
        bounds, 10
    )


def test_ids_stay_below_the_given_largest():
    """The demo model's vocabulary is small; a larger id would be refused."""
    assert (
        max(i for ask in build("mixed30", 0, 900).asks for i in ask.prompt or () if isinstance(i, int)) <= 900
    )


@pytest.mark.parametrize(
    ("spec", "word"),
    [("poison", "unknown workload"), ("poisson:speed=3", "known: rate"), ("batch1:count=two", "takes int"),
     ("poisson:rate=0", "above 0"), ("poisson:rate", "not a parameter")],
)  # fmt: skip
def test_wrong_specifications_say_what_is_allowed(spec: str, word: str):
    with pytest.raises(ValueError, match=word):
        parse(spec)


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "dataset.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_dataset_is_read_with_its_defaults(tmp_path: Path):
    requests = [
        {"id": "late", "messages": [{"role": "user", "content": "Hi"}], "arrival_seconds": 2},
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 9, "category": "ids", "body": {"seed": 1}},
    ]
    defaults = {"max_tokens": 32, "body": {"temperature": 0}}
    workload = load_dataset(
        write(tmp_path, {"version": 1, "name": "mine", "defaults": defaults, "requests": requests})
    )
    assert workload.name == "mine"
    first, second = workload.asks
    assert (first.prompt, first.max_tokens, first.extra) == ((1, 2, 3), 9, {"temperature": 0, "seed": 1})
    assert (second.messages, second.max_tokens) == (({"role": "user", "content": "Hi"},), 32)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("{", "not JSON"),
        ([], "dataset.json: expected an object"),
        ({"version": 2, "requests": [{}]}, "version: expected 1"),
        ({"version": 1, "requests": []}, "requests: expected a non-empty list"),
        ({"version": 1, "requests": [{"prompt": "a", "promt": 1}]}, r"requests\[0\]: unknown key 'promt'"),
        ({"version": 1, "requests": [{}]}, "exactly one of messages"),
        ({"version": 1, "requests": [{"prompt": "a", "max_tokens": True}]}, r"requests\[0\].max_tokens"),
        ({"version": 1, "requests": [{"prompt_token_ids": [1, -2]}]}, "list of token ids"),
        (
            {"version": 1, "requests": [{"messages": [{"role": "robot", "content": ""}]}]},
            r"messages\[0\].role",
        ),
        ({"version": 1, "requests": [{"prompt": "a", "id": "x"}] * 2}, "used twice"),
        ({"version": 1, "requests": [{"prompt": "a", "arrival_seconds": -1}]}, "arrival_seconds"),
        ({"version": 1, "defaults": {"id": "x"}, "requests": [{"prompt": "a"}]}, "defaults: unknown key"),
    ],
)
def test_dataset_errors_name_the_place(tmp_path: Path, content: Any, place: str):
    with pytest.raises(DatasetError, match=place):
        load_dataset(write(tmp_path, content))
