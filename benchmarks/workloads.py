"""Named, seeded workloads: what is asked of a server and when, never how fast it has to answer.

`build("poisson:rate=16", seed=3)` gives the same requests everywhere. Prompts of the throughput and latency
workloads are random token ids sent to /v1/completions, so every server works on exactly the stated lengths;
multiturn, agent and structured need text and go through /v1/chat/completions.

The random stream is keyed by the whole specification and the seed: poisson at 8/s and at 16/s never share a
prompt, so a prefix cache cannot answer one from the other. offline256 without parameters is keyed by the seed
alone and draws in the order of nano-vllm's bench.py: seed 0 is that published workload (142,827 tokens in,
133,966 out).
"""

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
LARGEST_TOKEN_ID = 10_000

_TEXT = (
    "river stone lamp garden letter winter engine paper cloud market bridge copper silver forest window "
    "number island signal harbour mirror thread basket planet corner village branch candle orange pepper "
    "quiet narrow gentle sudden early broken hidden simple distant heavy bright carry follow gather listen "
    "measure notice open polish remember settle travel under wander yesterday always before between perhaps"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Exactly one of `prompt` (completions) and `messages` (chat) is set.

    `messages` are appended to the session's history, which holds the server's earlier answers as well.
    `extra` goes into the request body; a None there removes a field that the runner would send.
    """

    category: str
    max_tokens: int
    prompt: tuple[int, ...] | str | None = None
    messages: tuple[Message, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another; the first may leave `arrival_seconds` after the run's start."""

    asks: tuple[Ask, ...]
    arrival_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of sessions; at most `concurrency` of them are in flight (None: no limit)."""

    name: str
    seed: int
    sessions: tuple[Session, ...]
    concurrency: int | None = None

    @property
    def asks(self) -> list[Ask]:
        return [ask for session in self.sessions for ask in session.asks]


class _Draw:
    """A random stream, and what every workload draws with."""

    def __init__(self, rng: random.Random, largest_id: int) -> None:
        self.rng = rng
        self.largest_id = largest_id

    def ids(self, low: int, high: int | None = None) -> tuple[int, ...]:
        """Between `low` and `high` (inclusive) random token ids."""
        count = self.rng.randint(low, low if high is None else high)
        return tuple(self.rng.randint(0, self.largest_id) for _ in range(count))

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(_WORDS, k=words))


def _single(ask: Ask, arrival_seconds: float = 0.0) -> Session:
    return Session((ask,), arrival_seconds)


_Built = tuple[list[Session], int | None]


def _three_kinds(draw: _Draw, kinds: Mapping[str, tuple[int, int, int, int]], each: int) -> list[Session]:
    """`each` requests of every kind (prompt low, high, output low, high), the kinds in turn."""
    sessions = []
    for _ in range(each):
        for category, (low, high, out_low, out_high) in kinds.items():
            prompt = draw.ids(low, high)
            sessions.append(_single(Ask(category, draw.rng.randint(out_low, out_high), prompt)))
    return sessions


def _seed30(draw: _Draw, concurrency: int = 0) -> _Built:
    """10 prefill-heavy, 10 balanced and 10 decode-heavy requests, all at once unless a limit is given."""
    kinds = {
        "prefill_heavy": (1024, 2048, 32, 64),
        "balanced": (256, 512, 128, 256),
        "decode_heavy": (32, 128, 256, 512),
    }
    return _three_kinds(draw, kinds, 10), concurrency or None


def _mixed30(draw: _Draw, concurrency: int = 16) -> _Built:
    """30 requests, 16 in flight: 1500-3000 in, 64 out; 400-700 in, 256 out; 40-100 in, 512 out."""
    kinds = {
        "prefill_heavy": (1500, 3000, 64, 64),
        "balanced": (400, 700, 256, 256),
        "decode_heavy": (40, 100, 512, 512),
    }
    return _three_kinds(draw, kinds, 10), concurrency or None


def _batch1(draw: _Draw, count: int = 8, prompt: int = 512, output: int = 256) -> _Built:
    """One request at a time: 512 tokens in, 256 out."""
    return [_single(Ask("batch1", output, draw.ids(prompt))) for _ in range(count)], 1


def _offline256(draw: _Draw, count: int = 256, concurrency: int = 0) -> _Built:
    """256 requests at once, 100-1024 tokens in and out."""
    prompts = [draw.ids(100, 1024) for _ in range(count)]
    outputs = [draw.rng.randint(100, 1024) for _ in range(count)]  # after all prompts: nano-vllm's order
    asks = [Ask("offline", output, prompt) for prompt, output in zip(prompts, outputs, strict=True)]
    return [_single(ask) for ask in asks], concurrency or None


def _poisson(draw: _Draw, rate: float = 8.0, count: int = 240, long_percent: float = 10.0) -> _Built:
    """Independent arrivals, `rate` a second; 10 % of 4096-7680 tokens, the rest of 128-512; 128-256 out.

    The number of long prompts is exact, not drawn: with a drawn number the tail would differ between seeds
    mostly by how many long prompts each got.
    """
    long_count = round(count * long_percent / 100)
    kinds = ["long"] * long_count + ["short"] * (count - long_count)
    draw.rng.shuffle(kinds)
    sessions, now = [], 0.0
    for kind in kinds:
        prompt = draw.ids(4096, 7680) if kind == "long" else draw.ids(128, 512)
        sessions.append(_single(Ask(kind, draw.rng.randint(128, 256), prompt), now))
        now += draw.rng.expovariate(rate)
    return sessions, None


def _prefix(
    draw: _Draw, count: int = 64, shared: int = 2048, gap_ms: float = 50.0, output: int = 64
) -> _Built:
    """One request every 50 ms; all begin with the same 2,048 tokens and end with 32-128 of their own."""
    head = draw.ids(shared)
    return [
        _single(Ask("first" if i == 0 else "shared", output, head + draw.ids(32, 128)), i * gap_ms / 1000)
        for i in range(count)
    ], None


def _multiturn(
    draw: _Draw, sessions: int = 16, turns: int = 6, words: int = 120, output: int = 128, concurrency: int = 0
) -> _Built:
    """Growing chats: every turn sends the whole history, the server's own answers included."""
    built = []
    for _ in range(sessions):
        asks = []
        for turn in range(turns):
            system = ({"role": "system", "content": draw.text(40)},) if turn == 0 else ()
            user = {"role": "user", "content": draw.text(words)}
            asks.append(Ask(f"turn{turn}", output, messages=(*system, user)))
        built.append(Session(tuple(asks)))
    return built, concurrency or None


def _agent(
    draw: _Draw, sessions: int = 16, turns: int = 8, tools: int = 40, output: int = 48, concurrency: int = 0
) -> _Built:
    """Agents that share one long description of their tools and work in short turns."""
    lines = [f"Tool {i} ({draw.text(2).replace(' ', '_')}): {draw.text(45)}." for i in range(tools)]
    preamble = {"role": "system", "content": "You may use these tools.\n" + "\n".join(lines)}
    built = []
    for _ in range(sessions):
        asks = []
        for turn in range(turns):
            user = {"role": "user", "content": f"Result of the last step: {draw.text(30)}. Go on."}
            asks.append(Ask(f"turn{turn}", output, messages=(preamble, user) if turn == 0 else (user,)))
        built.append(Session(tuple(asks)))
    return built, concurrency or None


_PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Oslo", "Lima", "Kyoto", "Accra"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}


def _structured(draw: _Draw, count: int = 32, concurrency: int = 16, output: int = 192) -> _Built:
    """Answers constrained by a JSON schema; they may end early, so the end-of-text token is not ignored."""
    schema = {"name": "person", "schema": _PERSON_SCHEMA, "strict": True}
    extra = {"response_format": {"type": "json_schema", "json_schema": schema}, "ignore_eos": None}
    sessions = []
    for _ in range(count):
        user = {"role": "user", "content": f"Describe a person as JSON. Hints: {draw.text(20)}."}
        sessions.append(_single(Ask("structured", output, messages=(user,), extra=extra)))
    return sessions, concurrency or None


WORKLOADS: dict[str, Callable[..., _Built]] = {
    "seed30": _seed30,
    "batch1": _batch1,
    "mixed30": _mixed30,
    "offline256": _offline256,
    "poisson": _poisson,
    "prefix": _prefix,
    "multiturn": _multiturn,
    "agent": _agent,
    "structured": _structured,
}


def parse(spec: str) -> tuple[str, dict[str, float | int]]:
    """Split "poisson:rate=16,count=120" into its name and parameters; ValueError says what is allowed."""
    name, _, tail = spec.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    allowed = inspect.signature(WORKLOADS[name]).parameters
    parameters: dict[str, float | int] = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if key not in allowed or key == "draw" or not equals:
            known = ", ".join(k for k in allowed if k != "draw")
            raise ValueError(f"{spec!r}: {part!r} is not a parameter of {name}; known: {known}")
        kind = float if allowed[key].annotation is float else int
        try:
            parameters[key] = kind(value)
        except ValueError:
            raise ValueError(f"{spec!r}: {key} takes {kind.__name__}, not {value!r}") from None
        if parameters[key] < 0 or (parameters[key] == 0 and key != "concurrency"):
            raise ValueError(f"{spec!r}: {key} must be above 0")
    return name, parameters


def build(spec: str, seed: int, largest_id: int = LARGEST_TOKEN_ID) -> Workload:
    """The workload of a specification; `largest_id` has to lie inside the model's plain vocabulary."""
    name, parameters = parse(spec)
    rng = random.Random(seed if spec == "offline256" else f"{spec}/{seed}")
    sessions, concurrency = WORKLOADS[name](_Draw(rng, largest_id), **parameters)
    return Workload(spec, seed, tuple(sessions), concurrency)
