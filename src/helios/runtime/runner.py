"""Runs planned rows on the model: pack, forward, sample, one copy of the tokens back to the host."""

from __future__ import annotations

import time
from typing import cast

import torch

from helios.config import PAGE_SIZE
from helios.runtime.batch import BatchPacker, ForwardBatch
from helios.runtime.engine import StepResult
from helios.runtime.logit_edits import LogitEdits
from helios.runtime.logprobs import PROMPT_SLICE, LogprobTensors, token_logprobs
from helios.runtime.philox import row_seed
from helios.runtime.policy import RowPlan
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.request import Sequence, TokenLogprob
from helios.runtime.sampler import SampledTokens, SamplingTensors, sample


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
        self._vocabulary_size = vocabulary_size
        self._edits = LogitEdits(max_rows, model.config.vocab_size, self.device, sorted(end_token_ids))
        pages = (max_model_len + PAGE_SIZE - 1) // PAGE_SIZE
        # A tick may exceed the budget by one token for each decoding row.
        self._packer = BatchPacker(self.device, max_tokens + max_rows + 1, max_rows, pages)

    def admit(self, sequence: Sequence) -> None:
        sequence.sample_seed = row_seed(sequence.job.params.seed, sequence.index)
        self._edits.admit(sequence.row, sequence)

    def release(self, sequence: Sequence) -> None:
        self._edits.release(sequence.row)

    @torch.inference_mode()
    def run(self, rows: list[RowPlan], samplers: list[int]) -> StepResult:
        batch = self._packer.pack(rows, samplers)
        clock = _ForwardClock(self.device)
        hidden = self._forward(batch)
        logits = self.model.logits(hidden[batch.logit_rows]) if samplers else None
        clock.stop()
        prompt_logprobs = self._prompt_logprobs(rows, hidden)
        if logits is None:
            return StepResult([], [], [], clock.seconds(), prompt_logprobs)
        sequences = [rows[index].sequence for index in samplers]
        positions = [rows[index].end for index in samplers]
        sampled, logprobs = self._sample(logits, sequences, positions)
        both = torch.stack((sampled.token_ids, sampled.finite.long()))
        token_ids, finite = cast(list[list[int]], both.tolist())  # one copy to the host
        reported = _by_row(logprobs, sequences)
        return StepResult(
            token_ids, [bool(flag) for flag in finite], reported, clock.seconds(), prompt_logprobs
        )

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
        sampled = sample(self._edits.apply(logits, plan), params, self._vocabulary_size)
        for index, sequence in enumerate(sequences):
            if sequence.forced:
                sampled.token_ids[index] = sequence.forced[-1]
        if plan is not None:
            where = torch.tensor([sequence.row for sequence in sequences], device=self.device)
            self._edits.append(where, sampled.token_ids)
        asking = [
            index for index, sequence in enumerate(sequences) if sequence.job.params.logprobs is not None
        ]
        if not asking:
            return sampled, None
        most = max(sequences[index].job.params.logprobs or 0 for index in asking)
        ids = sampled.token_ids[asking]
        return sampled, token_logprobs(logits[asking], ids, most, self._vocabulary_size)

    def _prompt_logprobs(
        self, rows: list[RowPlan], hidden: torch.Tensor
    ) -> dict[Sequence, list[TokenLogprob]]:
        """Log probabilities of the prompt tokens that follow this tick's prompt positions, for the
        sequences that ask. Logits exist for a slice of a prompt at a time, never for all of it."""
        found: dict[Sequence, list[TokenLogprob]] = {}
        at = 0
        for row in rows:
            sequence, asked = row.sequence, row.sequence.job.params.prompt_logprobs
            stop = min(row.end, sequence.num_prompt_tokens - 1)
            if asked is not None and sequence.index == 0 and row.start < stop:
                entries = found.setdefault(sequence, [])
                for start in range(row.start, stop, PROMPT_SLICE):
                    end = min(start + PROMPT_SLICE, stop)
                    logits = self.model.logits(hidden[at + start - row.start : at + end - row.start])
                    ids = torch.tensor(sequence.token_ids[start + 1 : end + 1], device=self.device)
                    tensors = token_logprobs(logits, ids, asked, self._vocabulary_size)
                    entries.extend(tensors.to_lists([asked] * (end - start)))
            at += row.count
        return found

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch, self.cache)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self.cache.data[:, :, target].copy_(self.cache.data[:, :, source])


def _by_row(logprobs: LogprobTensors | None, sequences: list[Sequence]) -> list[TokenLogprob | None]:
    """Spread the reported log probabilities over the rows that asked for them."""
    if logprobs is None:
        return [None] * len(sequences)
    wanted = [sequence.job.params.logprobs for sequence in sequences]
    entries = iter(logprobs.to_lists([count for count in wanted if count is not None]))
    return [None if count is None else next(entries) for count in wanted]


class _ForwardClock:
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
