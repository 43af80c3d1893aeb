"""What the engine asks of the rooms below it: the runner that computes, the compiler of grammars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from helios.runtime.policy import RowPlan
from helios.runtime.request import Grammar, Sequence, TokenLogprob

if TYPE_CHECKING:
    from helios.runtime.grammar import CompiledGrammar


@dataclass(slots=True)
class StepResult:
    """What a forward gave, one entry per sampled row.

    ``finite[i]`` is False where the logits held NaN or infinity; that row has no token.
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]
    forward_seconds: float
    # Of the prompt tokens after this tick's positions, for sequences that asked.
    prompt_logprobs: dict[Sequence, list[TokenLogprob]] = field(
        default_factory=dict[Sequence, list[TokenLogprob]]
    )


class Runner(Protocol):
    """Runs planned rows on the model."""

    def admit(self, sequence: Sequence) -> None:
        """``sequence.row`` has been assigned: prepare what is kept per row."""
        ...

    def release(self, sequence: Sequence) -> None:
        """``sequence`` leaves its row."""
        ...

    def set_pages(self, sequence: Sequence) -> None:
        """The page table of an admitted sequence is new or has changed."""
        ...

    def forward(self, rows: list[RowPlan], samplers: list[int]) -> object:
        """Start one forward over ``rows`` whose ``samplers`` (indices into rows) will be sampled."""
        ...

    def sample(self, pending: object) -> None:
        """Start choosing a token for each sampler of a forward."""
        ...

    def collect(self, pending: object) -> StepResult:
        """Wait for a forward and its tokens."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's keys and values in every layer."""
        ...


class PageStore(Protocol):
    """Pages' copies in host memory, by slot. Copies run beside the forwards, in the order of the calls."""

    num_slots: int

    def save(self, page: int, slot: int) -> None:
        """Copy a page to a slot, as it is before any later forward."""
        ...

    def load(self, slot: int, page: int) -> None:
        """Start to copy a slot to a page, which nobody may use until :meth:`loaded` names it."""
        ...

    def loaded(self, *, wait: bool = False) -> Iterable[int]:
        """Pages whose loads have ended since the last call; ``wait`` waits for the oldest."""
        ...


class Grammars(Protocol):
    """Compiles constraints, and remembers those it has compiled."""

    def compile(self, grammar: Grammar, param: str = "response_format") -> CompiledGrammar:
        """Raises InvalidRequestError for a grammar that cannot be compiled."""
        ...


class TickRecord(NamedTuple):
    """One tick in the log: clock seconds at launch and at commit, its tokens, and the jobs around it."""

    started: float
    finished: float
    decode_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
