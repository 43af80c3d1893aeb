"""Runs planned rows on the model: pack, forward, sample, one copy of the tokens back to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch

from helios.runtime.batch import BatchPacker
from helios.runtime.interfaces import StepResult
from helios.runtime.logit_edits import LogitEdits
from helios.runtime.logprobs import PROMPT_SLICE, LogprobTensors, token_logprobs
from helios.runtime.page_pool import pages_for
from helios.runtime.philox import row_seed
from helios.runtime.policy import RowPlan
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.request import Sequence, TokenLogprob
from helios.runtime.sampler import SampledTokens, SamplingTensors, sample
from helios.runtime.transfer import to_device

PromptLogprobs = dict[Sequence, tuple[int, list[LogprobTensors]]]


class ModelRunner:
    """One model, its KV cache and the buffers of a tick. Implements the engine's ``Runner``.

    ``max_tokens`` is the largest tick, ``max_rows`` the largest number of sequences, ``max_model_len`` the
    longest sequence, all in tokens; ``vocabulary_size`` is the tokenizer's. ``end_token_ids`` are banned
    while a sequence is shorter than its ``min_tokens``.
    """

    def __init__(
        self,
        model: Qwen3,
        cache: KVCache,
        *,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        vocabulary_size: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = model.embed_tokens.device
        self.max_rows = max_rows
        self.max_pages = pages_for(max_model_len)
        self._vocabulary_size = vocabulary_size
        self._edits = LogitEdits(max_rows, model.config.vocab_size, self.device, sorted(end_token_ids))
        # The newest token of each batch row: a tick launched before it is read back takes it from here.
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=self.device)
        # A tick may exceed the budget by one token for each decoding row.
        self._packer = BatchPacker(self.device, max_tokens + max_rows + 1, max_rows, self.max_pages)
        self._indices: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}

    def admit(self, sequence: Sequence) -> None:
        if not sequence.sample_seed:  # else it was put back: its noise stays its own
            sequence.sample_seed = row_seed(sequence.job.params.seed, sequence.index)
        self._edits.admit(sequence.row, sequence)

    def release(self, sequence: Sequence) -> None:
        self._edits.release(sequence.row)

    def set_pages(self, sequence: Sequence) -> None:
        """Nothing is kept: the packer reads the page table in every tick."""

    @torch.inference_mode()
    def forward(self, rows: list[RowPlan], samplers: list[int]) -> Pending:
        """Start one forward; see :class:`helios.runtime.engine.Runner`."""
        clock = ForwardClock(self.device)
        batch = self._packer.pack(rows, samplers, self._last_tokens)
        hidden = self.model(batch, self.cache)
        logits = self.model.logits(hidden[batch.logit_rows]) if samplers else None
        clock.stop()
        pending = Pending([rows[index] for index in samplers], logits, clock)
        pending.prompt_logprobs = self._prompt_logprobs(
            rows, lambda start, end: self.model.logits(hidden[start:end])
        )
        return pending

    @torch.inference_mode()
    def sample(self, pending: object) -> None:
        """Start choosing a token for each row of the forward's logits."""
        assert isinstance(pending, Pending)
        if pending.logits is None:
            return
        sequences = pending.sequences
        sampled, pending.logprobs = self._sample(pending.logits, sequences, pending.positions)
        self._last_tokens[self._index("rows", [sequence.row for sequence in sequences])] = sampled.token_ids
        pending.hand_over(torch.stack((sampled.token_ids, sampled.finite.long())))

    def collect(self, pending: object) -> StepResult:
        """Wait for the tokens."""
        assert isinstance(pending, Pending)
        token_ids, finite = pending.tokens()
        logprobs = spread_logprobs(pending.logprobs, pending.sequences)
        return StepResult(token_ids, finite, logprobs, pending.clock.seconds(), pending.prompt_lists())

    def _sample(
        self, logits: torch.Tensor, sequences: list[Sequence], positions: list[int]
    ) -> tuple[SampledTokens, LogprobTensors | None]:
        """Choose one token for each row of ``logits [rows, vocab]``, after the edits that rows ask for."""
        plan = self._edits.plan([sequence.row for sequence in sequences])
        for index, words in self._edits.mask_rows(plan):
            grammar = sequences[index].grammar
            assert grammar is not None
            grammar.fill_mask(words)
        params = SamplingTensors.build(sequences, self.device, positions)
        sampled = self._choose(self._edits.apply(logits, plan), params)
        for index, sequence in enumerate(sequences):
            if sequence.forced:
                sampled.token_ids[index] = sequence.forced[-1]
        if plan is not None:
            where = self._index("rows", [sequence.row for sequence in sequences])
            self._edits.append(where, sampled.token_ids)
        asking = [
            index for index, sequence in enumerate(sequences) if sequence.job.params.logprobs is not None
        ]
        if not asking:
            return sampled, None
        most = max(sequences[index].job.params.logprobs or 0 for index in asking)
        ids = sampled.token_ids
        if len(asking) < len(sequences):
            where = self._index("asking", asking)
            logits, ids = logits[where], ids[where]
        return sampled, token_logprobs(logits, ids, most, self._vocabulary_size).to_host()

    def _index(self, name: str, values: list[int]) -> torch.Tensor:
        """``values`` as int64 on the device, kept under ``name`` while they stay the same."""
        key = tuple(values)
        kept = self._indices.get(name)
        if kept is None or kept[0] != key:
            kept = self._indices[name] = (key, to_device(torch.tensor(values), self.device))
        return kept[1]

    def _choose(self, logits: torch.Tensor, params: SamplingTensors) -> SampledTokens:
        return sample(logits, params, self._vocabulary_size)

    def _prompt_logprobs(
        self, rows: list[RowPlan], logits_of: Callable[[int, int], torch.Tensor]
    ) -> PromptLogprobs:
        """Log probabilities of the prompt tokens that follow this tick's prompt positions, for the
        sequences that ask. Logits exist for a slice of a prompt at a time, never for all of it."""
        found: PromptLogprobs = {}
        at = 0
        for row in rows:
            sequence, asked = row.sequence, row.sequence.job.params.prompt_logprobs
            stop = min(row.end, sequence.num_prompt_tokens - 1)
            if asked is not None and sequence.index == 0:
                parts: list[LogprobTensors] = []
                for start in range(row.start, stop, PROMPT_SLICE):
                    end = min(start + PROMPT_SLICE, stop)
                    logits = logits_of(at + start - row.start, at + end - row.start)
                    ids = torch.tensor(sequence.token_ids[start + 1 : end + 1], device=self.device)
                    parts.append(token_logprobs(logits, ids, asked, self._vocabulary_size))
                found[sequence] = (asked, parts)
            at += row.count
        return found

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self.cache.data[:, :, target].copy_(self.cache.data[:, :, source])


def spread_logprobs(logprobs: LogprobTensors | None, sequences: list[Sequence]) -> list[TokenLogprob | None]:
    """Spread the reported log probabilities over the rows that asked for them."""
    if logprobs is None:
        return [None] * len(sequences)
    wanted = [sequence.job.params.logprobs for sequence in sequences]
    entries = iter(logprobs.to_lists([count for count in wanted if count is not None]))
    return [None if count is None else next(entries) for count in wanted]


class ForwardClock:
    """Duration of a forward: CUDA events, which need no device-wide wait, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._started = time.perf_counter()
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """The forward has been issued."""
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float:
        """Seconds between start and stop; on CUDA this waits for the stop event."""
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class Pending:
    """A forward on its way: its sampled rows, its logits ``[rows, vocab]``, later its tokens."""

    def __init__(self, rows: list[RowPlan], logits: torch.Tensor | None, clock: ForwardClock) -> None:
        self.sequences = [row.sequence for row in rows]
        self.positions = [row.end for row in rows]  # of the tokens to be sampled
        self.logits = logits
        self.clock = clock
        self.logprobs: LogprobTensors | None = None
        self.prompt_logprobs: PromptLogprobs = {}
        self._tokens: torch.Tensor | None = None  # [2, rows]: token ids, whether the logits were finite
        self._arrived: torch.cuda.Event | None = None

    def hand_over(self, tokens: torch.Tensor) -> None:
        """Start the copy of ``tokens [2, rows]`` to the host."""
        if tokens.device.type == "cuda":
            self._tokens = tokens.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._tokens = tokens

    def hand_over_host(self, tokens: torch.Tensor) -> None:
        """``tokens [2, rows]`` in pinned memory are being copied to."""
        self._tokens = tokens
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def prompt_lists(self) -> dict[Sequence, list[TokenLogprob]]:
        """Prompt log probabilities in host form."""
        return {
            sequence: [
                entry for tensors in parts for entry in tensors.to_lists([asked] * len(tensors.token_ids))
            ]
            for sequence, (asked, parts) in self.prompt_logprobs.items()
        }

    def tokens(self) -> tuple[list[int], list[bool]]:
        """Token ids and finite flags; waits for the copy."""
        if self._tokens is None:
            return [], []
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids, finite = cast(list[list[int]], self._tokens.tolist())
        return token_ids, [bool(flag) for flag in finite]
