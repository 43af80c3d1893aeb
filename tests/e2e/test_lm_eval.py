"""The requests of lm-eval's ``local-completions`` model, against transformers on the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from helios.runtime.snapshot import DEMO_FOLDER
from tests.e2e.server import PATIENCE

TOLERANCE = 1e-4
SEED = 1234  # lm-eval's
SHORT = "Count to 5\n1, 2, 3, 4, 5"
PAGED = (
    "The code word is brelan. " + "The grass is green. The sky is blue. " * 60 + "The code word is brelan."
)
CONTEXT = "Marlen is 42 and lives in Oslo. " * 20
ENDINGS = ("The sky is blue.", "Marlen lives in Oslo.", "zebra ((( 17", "é 世界 👍🏽")


@pytest.fixture(scope="module")
def client(demo: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo, timeout=PATIENCE) as made:
        made.post("/internal/cache/clear").raise_for_status()
        yield made


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.set_num_threads(1)  # so small products gain nothing from a second thread
    return AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


class ExactAngles(torch.nn.Module):
    """transformers' rotary embedding with position times frequency in float64, as Helios computes it. The
    float32 product alone moves log probabilities by up to 6e-4 at position 2,000 of a repetitive text."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.frequencies = plain.inv_freq.double()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def ids_of(client: httpx.Client, text: str) -> list[int]:
    return client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def score(client: httpx.Client, prompts: list[list[int]], **changed: Any) -> dict[str, Any]:
    """One loglikelihood request: lm-eval's payload, field by field."""
    payload: dict[str, Any] = {
        "model": "helios-demo",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": SEED,
        "echo": True,
    }
    response = client.post("/v1/completions", json=payload | changed)
    assert response.status_code == 200, response.text
    return response.json()


def parse_logprobs(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """lm-eval's own reading of an answer: log likelihood and is_greedy of each continuation."""
    found: list[tuple[float, bool]] = []
    for choice, start in zip(
        sorted(answer["choices"], key=itemgetter("index")), context_lengths, strict=True
    ):
        values = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


@torch.inference_mode()
def expected(model: torch.nn.Module, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Log probability of each token after the first, and whether it was the best one."""
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    chosen = torch.tensor(ids[1:])
    values = logprobs[:-1].gather(1, chosen[:, None])[:, 0]
    return values.tolist(), (logprobs[:-1].argmax(-1) == chosen).tolist()


def assert_equal_to(model: torch.nn.Module, choice: dict[str, Any], ids: list[int], extra: int) -> None:
    """``extra`` is how many tokens were generated behind the prompt."""
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(values) == len(tops) == len(logprobs["tokens"]) == len(ids) + extra
    assert values[0] is None
    wanted, greedy = expected(model, ids)
    worst = max(abs(a - b) for a, b in zip(values[1 : len(ids)], wanted, strict=True))
    assert worst < TOLERANCE
    pairs = zip(values[1 : len(ids)], tops[1 : len(ids)], strict=True)
    assert [value == max(top.values()) for value, top in pairs] == greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("text", [SHORT, PAGED], ids=["short", "over-pages"])
def test_logprobs_equal_transformers(
    client: httpx.Client, model: torch.nn.Module, text: str, max_tokens: int
) -> None:
    """Would catch a prompt log probability that is shifted by one, lost at a chunk's border, taken after
    sampling edits, or a list that does not hold the generated token (or holds one for max_tokens 0)."""
    ids = ids_of(client, text)
    assert (len(ids) > 512) == (text is PAGED)
    answer = score(client, [ids], max_tokens=max_tokens)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["text"].startswith(text)
    assert_equal_to(model, answer["choices"][0], ids, max_tokens)


def test_a_warm_prefix_changes_nothing(client: httpx.Client, model: torch.nn.Module) -> None:
    """Would catch prompt log probabilities that are missing, null or stale where the prefix cache holds the
    prompt's first blocks."""
    ids = ids_of(client, PAGED)
    warm = {"model": "helios-demo", "prompt": ids, "max_tokens": 1, "temperature": 0}
    client.post("/v1/completions", json=warm).raise_for_status()
    again = client.post("/v1/completions", json=warm).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 512  # it is warm
    assert_equal_to(model, score(client, [ids])["choices"][0], ids, 1)
    # And what scoring publishes is what a plain request computes.
    after = client.post("/v1/completions", json=warm).json()
    assert after["choices"] == again["choices"]


def test_loglikelihood_of_continuations(client: httpx.Client, model: torch.nn.Module) -> None:
    """Would catch answers of a batch in the wrong order, a sum over the wrong tokens, and an is_greedy that
    float rounding between token_logprobs and top_logprobs turns false."""
    context = ids_of(client, CONTEXT)
    endings = [ids_of(client, text) for text in ENDINGS]
    greedy = client.post(
        "/v1/completions",
        json={"model": "helios-demo", "prompt": context, "max_tokens": 6, "temperature": 0, "logprobs": 0}
        | {"ignore_eos": True},
    ).json()
    endings.append(ids_of(client, greedy["choices"][0]["text"]))
    prompts = [context + ending for ending in endings]
    answer = score(client, prompts)
    found = parse_logprobs(answer, [len(context)] * len(prompts))
    for prompt, ending, (total, is_greedy) in zip(prompts, endings, found, strict=True):
        values, best = expected(model, prompt)
        assert abs(total - sum(values[-len(ending) :])) < TOLERANCE * len(ending)
        assert is_greedy == all(best[-len(ending) :])
    assert [is_greedy for _, is_greedy in found][-1]
    assert not all(is_greedy for _, is_greedy in found)


def test_many_scores_at_once(client: httpx.Client, model: torch.nn.Module) -> None:
    """Would catch scores that depend on what else is in the tick: lm-eval runs with ``num_concurrent``."""
    draw = random.Random(4)
    prompts = [[draw.randrange(4, 4000) for _ in range(length)] for length in (1, 2, 31, 255, 256, 257, 300)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: score(client, [ids]), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        if len(ids) > 1:
            assert_equal_to(model, answer["choices"][0], ids, 1)
        else:
            assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_rolling_loglikelihood_in_windows(client: httpx.Client, model: Any) -> None:
    """Would catch a context length off by one, or positions that go wrong far into a text: perplexity tasks
    send windows of exactly max_length - 1."""
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = (ids_of(client, PAGED) * 12)[: limit - 1]
    assert len(ids) == limit - 1
    rotary, model.model.rotary_emb = model.model.rotary_emb, ExactAngles(model.model.rotary_emb)
    try:
        assert_equal_to(model, score(client, [ids])["choices"][0], ids, 1)
    finally:
        model.model.rotary_emb = rotary
    refused = client.post("/v1/completions", json={"prompt": [*ids, 5], "max_tokens": 1})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_generate_until(client: httpx.Client) -> None:
    """Would catch a field of generation tasks that is refused, or a stop string left in the text."""
    payload = {
        "prompt": ["Once", "The"],
        "model": "helios-demo",
        "max_tokens": 40,
        "temperature": 0,
        "stop": [" server", "\n\n", "<|im_end|>"],
        "seed": SEED,
    }
    answer = client.post("/v1/completions", json=payload)
    assert answer.status_code == 200
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(" server" not in choice["text"] for choice in choices)
