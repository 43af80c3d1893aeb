"""The GPU's runner: ticks as replays of CUDA graphs.

Two kinds of graph, captured at start for a ladder of sizes and padded up to:

* **decode**: one token for each of R rows. The rows' state (position, page table, sampling parameters,
  newest token) lives on the device and moves on inside the graph, so a tick with the rows of the last one
  copies nothing to the device.
* **mixed**: up to T tokens of up to R rows, from one packed copy: one token of each decoding row, then the
  prompts' chunks, then padding. Where one kind ends and the other begins is known on the device only, so a
  graph serves every division of its tokens.

Sampling is a graph of its own behind either: without filters, or with. Rows that need more (penalties,
bias, masks, log probabilities) leave the forward's graph as it is and are sampled by the plain sampler
from the same logits. A tick that no graph holds runs the same kernels eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from helios.config import PAGE_SIZE
from helios.kernels import sampling
from helios.kernels.common import multiprocessors, use_pdl, use_sm90
from helios.kernels.decode_attention import DecodeWorkspace, default_config, num_columns, paged_decode
from helios.kernels.linear_table import ROW_BUCKETS, LinearTable
from helios.kernels.step import begin_step, end_step
from helios.runtime.interfaces import StepResult
from helios.runtime.mixed_parts import PREFILL_ROWS, MixedParts
from helios.runtime.page_pool import DUMMY_PAGE
from helios.runtime.policy import RowPlan
from helios.runtime.prefill_backend import BUDGET_S, Choice, choose_prefill
from helios.runtime.qwen3.fused import Attend, FusedForward, TokenInputs, Wanted
from helios.runtime.request import Sequence
from helios.runtime.runner import ForwardClock, ModelRunner, Pending, spread_logprobs
from helios.runtime.sampler import SampledTokens, SamplingTensors, has_filter

# Tokens of mixed graphs. The time of a matrix product grows in steps, by rounds of tiles over the multiprocessors;
# a size just above a step can take longer than the next larger one that fills its round. Those up to 2,048 fill
# theirs on an H200, for the shapes of a 4B model; further up steps are small and padding is what costs.
MIXED_TOKENS = (
    64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280,
    1536, 1792, 2048, 2176, 2304, 2496, 2816, 3072, 3328, 3584, 3840, 4096,
)  # fmt: skip


def decode_ladder(max_rows: int) -> list[int]:
    """Numbers of decode rows that are captured."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += list(range(320, max_rows + 1, 64))
    return [size for size in sizes if size < max_rows] + [max_rows]


def mixed_ladder(max_rows: int) -> list[int]:
    """Numbers of rows in mixed graphs: few, since a padding row costs no more than its logits."""
    return [64, max_rows] if max_rows > 64 else [max_rows]


def token_ladder(max_rows: int, max_tokens: int) -> list[int]:
    """Numbers of tokens in mixed graphs, for ticks of ``max_tokens``, or of all rows and a few more. Beyond
    MIXED_TOKENS four sizes until the double."""
    most = max(max_tokens, max_rows + MIXED_TOKENS[0])
    sizes: list[int] = list(MIXED_TOKENS)
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if size < most] + [most]


class GraphPending(Pending):
    """A forward of this runner: where in the sampled rows each sequence stands."""

    places: list[int]
    special: list[int]  # of ``sequences``: those that the plain sampler chooses for


class GraphRunner(ModelRunner):
    """A :class:`ModelRunner` whose forwards are graph replays. Call :meth:`prepare` once after building."""

    def prepare(
        self,
        *,
        tune_seconds: float,
        max_tokens: int,
        pdl: bool,
        sm90: bool = True,
        prefill_attention: Choice = "auto",
        only_largest: bool = False,
        report: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Choose kernels by measurement and capture the graphs. ``max_tokens`` of a tick bound the mixed ladder,
        ``pdl`` allows programmatic dependent launch, ``sm90`` the kernels written for SM90, ``prefill_attention``
        names what computes prompt attention or leaves it to measurement; ``only_largest`` captures just the graphs
        that decide how much memory is needed."""
        device, config = self.device, self.model.config
        use_pdl(pdl, device)
        use_sm90(sm90)
        self._linears = LinearTable(device)
        self._fused = FusedForward(self.model, self.cache, self._linears)
        self._decode_rows = decode_ladder(self.max_rows)
        self._mixed_rows = mixed_ladder(self.max_rows)
        self._mixed_tokens = token_ladder(self.max_rows, max_tokens)
        if only_largest:
            self._decode_rows, self._mixed_rows = self._decode_rows[-1:], self._mixed_rows[-1:]
            self._mixed_tokens = self._mixed_tokens[-1:]
        self._max_kv = self.max_pages * PAGE_SIZE
        self._decode_config = default_config(device, config.head_dim)
        columns = num_columns(
            self.max_rows, self._max_kv, config.num_kv_heads, multiprocessors(device), self._decode_config
        )
        group = config.num_heads // config.num_kv_heads
        self._workspace = DecodeWorkspace(
            device, self.max_rows, columns, config.num_kv_heads, group, config.head_dim
        )
        self._make_buffers()
        self._choose_linears(tune_seconds)
        self._prefill = choose_prefill(
            prefill_attention, device, self.cache.data.dtype,
            heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            budget_s=min(tune_seconds, BUDGET_S),
        )  # fmt: skip
        self._capture_all(report)

    @torch.inference_mode()
    def _choose_linears(self, seconds: float) -> None:
        """By measurement: each alone, and then in some layers of decode steps, over rows of one page."""
        self._fused.tune(ROW_BUCKETS, seconds)
        # Of larger buckets no decode step tells: only mixed ticks have so many rows.
        last = bisect_left(ROW_BUCKETS, self.max_rows)
        kv_lengths = self._token_inputs[2].fill_(PAGE_SIZE)
        steps = {
            bucket: self._decode_inputs(min(bucket, self.max_rows)) for bucket in ROW_BUCKETS[: last + 1]
        }
        self._fused.refine(steps, seconds)
        kv_lengths.zero_()

    def _decode_inputs(self, size: int) -> tuple[TokenInputs, Attend]:
        """What a decode step of ``size`` rows reads, at its fixed addresses."""
        positions, slots, kv_lengths = self._token_inputs[:, :size]
        inputs = TokenInputs(self._input_ids[:size], positions, slots)
        return inputs, self._attend(self._table[:size], kv_lengths)

    def _make_buffers(self) -> None:
        """Everything that graphs read from or write to at fixed addresses."""
        device, most = self.device, self.max_rows
        int32 = torch.int32
        # Decode rows' state.
        self._positions = torch.zeros(self.max_rows, dtype=int32, device=device)
        self._table = torch.zeros(self.max_rows, self.max_pages, dtype=int32, device=device)
        # Sampling: row ids (-1: not sampled), then the packed parameters.
        self._sampling = torch.full((8, most), -1, dtype=int32, device=device)
        self._logits = torch.zeros(
            most, self.model.config.vocab_size, dtype=self.cache.data.dtype, device=device
        )
        self._out = torch.zeros(2, most, dtype=int32, device=device)
        # Inputs of a decode forward, written inside its graph.
        self._input_ids = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self._token_inputs = torch.zeros(3, self.max_rows, dtype=int32, device=device)
        # Host side, two of each in turn: a copy may still be under way when the next tick is packed.
        pinned = device.type == "cuda"
        mixed = MixedParts.size(most, self._mixed_tokens[-1], self.max_pages)
        self._mixed_device = torch.zeros(mixed, dtype=int32, device=device)
        sizes = (self.max_rows * (1 + self.max_pages), 8 * most, mixed, 2 * most)
        self._host = [[torch.zeros(size, dtype=int32, pin_memory=pinned) for size in sizes] for _ in range(2)]
        self._turn = 0
        self._tables_of_rows = np.full((self.max_rows, self.max_pages), DUMMY_PAGE, dtype=np.int32)
        self._grown: set[int] = set()  # rows whose page table is newer than the device's
        self._steady: list[Sequence] = []  # whose state on the device is that of their next decode tick
        self._pool = torch.cuda.graph_pool_handle()
        self._decode_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._mixed_graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._sampling_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    @property
    def mixed_sizes(self) -> list[int]:
        """Tokens that a tick with prompts is padded to."""
        return list(self._mixed_tokens)

    @property
    def captured_batch_sizes(self) -> list[int]:
        """Numbers of decode rows that have a graph of their own."""
        return list(self._decode_rows)

    # -- the engine's side ------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        super().admit(sequence)
        self._steady = []
        if sequence.num_output_tokens:  # resumed: its newest token is known here only
            self._last_tokens[sequence.row] = sequence.token_ids[-1]

    def set_pages(self, sequence: Sequence) -> None:
        table = sequence.page_table
        self._tables_of_rows[sequence.row, : len(table)] = table
        self._grown.add(sequence.row)

    @torch.inference_mode()
    def forward(self, rows: list[RowPlan], samplers: list[int]) -> Pending:
        self._turn ^= 1
        clock = ForwardClock(self.device)
        wants_prompt = any(row.sequence.job.params.prompt_logprobs is not None for row in rows)
        decoding = len(samplers) == len(rows) and all(
            row.count == 1 and row.start >= row.sequence.num_prompt_tokens for row in rows
        )
        pending = GraphPending([rows[index] for index in samplers], None, clock)
        pending.places = samplers
        if decoding and not wants_prompt:
            self._decode(rows)
        else:
            self._steady = []
            decode = sum(row.count == 1 for row in rows)
            tokens = sum(row.count for row in rows)
            fits = tokens <= self._mixed_tokens[-1] and len(rows) - decode <= PREFILL_ROWS
            if fits and not wants_prompt:
                self._replay_mixed(rows, samplers, decode, tokens)
            else:
                self._eager(rows, samplers, pending)
        clock.stop()
        return pending

    @torch.inference_mode()
    def sample(self, pending: object) -> None:
        assert isinstance(pending, GraphPending)
        sequences = pending.sequences
        if not sequences:
            return
        any_filter = any(has_filter(sequence.job.params) for sequence in sequences)
        self._sampling_graphs[self._sampled_rows, any_filter].replay()
        pending.special = [i for i, sequence in enumerate(sequences) if _needs_plain_sampler(sequence)]
        if pending.special:
            self._sample_special(pending)
        size = self._sampled_rows
        host = self._host[self._turn][3][: 2 * size].view(2, size)
        host.copy_(self._out[:, :size], non_blocking=True)
        pending.hand_over_host(host)

    def _sample_special(self, pending: GraphPending) -> None:
        """Rows that need host data or edits: chosen again from the same logits, by the plain sampler."""
        special = [pending.sequences[index] for index in pending.special]
        places = self._index("places", [pending.places[index] for index in pending.special])
        positions = [pending.positions[index] for index in pending.special]
        sampled, pending.logprobs = self._sample(self._logits[places], special, positions)
        self._out[0, places] = sampled.token_ids.int()
        self._out[1, places] = sampled.finite.int()
        self._last_tokens[self._index("rows", [sequence.row for sequence in special])] = sampled.token_ids

    def collect(self, pending: object) -> StepResult:
        assert isinstance(pending, GraphPending)
        token_ids, finite = pending.tokens()
        prompt_logprobs = pending.prompt_lists()
        if not pending.sequences:
            return StepResult([], [], [], pending.clock.seconds(), prompt_logprobs)
        logprobs = spread_logprobs(pending.logprobs, pending.sequences)
        tokens = [token_ids[place] for place in pending.places]
        sound = [finite[place] for place in pending.places]
        return StepResult(tokens, sound, logprobs, pending.clock.seconds(), prompt_logprobs)

    # -- forwards ---------------------------------------------------------------------------------

    def _decode(self, rows: list[RowPlan]) -> None:
        """Replay a decode graph; its state is brought over only when the rows have changed."""
        size = self._decode_rows[bisect_left(self._decode_rows, len(rows))]
        sequences = [row.sequence for row in rows]
        if sequences != self._steady:
            self._steady = sequences
            self._grown.clear()
            count = len(rows)
            view = self._host[self._turn][0].numpy()
            row_ids = [sequence.row for sequence in sequences]
            view[:count] = [row.start for row in rows]
            table = view[size : size * (1 + self.max_pages)].reshape(size, self.max_pages)
            table[:count] = self._tables_of_rows[row_ids]
            host = self._host[self._turn][0]
            self._positions[:count].copy_(host[:count], non_blocking=True)
            self._table[:count].copy_(
                host[size : size + count * self.max_pages].view(count, self.max_pages), non_blocking=True
            )
            self._bring_sampling(rows, range(count), size)
        elif self._grown:
            self._bring_tables(sequences, size)
        self._sampled_rows = size
        self._decode_graphs[size].replay()

    def _bring_tables(self, sequences: list[Sequence], size: int) -> None:
        """Bring over the page tables that have grown; everything else of the rows stays as it is."""
        host = self._host[self._turn][0]
        view = host.numpy()
        for place, sequence in enumerate(sequences):
            if sequence.row in self._grown:
                start = size + place * self.max_pages
                view[start : start + self.max_pages] = self._tables_of_rows[sequence.row]
                self._table[place].copy_(host[start : start + self.max_pages], non_blocking=True)
        self._grown.clear()

    def _replay_mixed(self, rows: list[RowPlan], samplers: list[int], decode: int, num_tokens: int) -> None:
        """Pack a mixed tick into a graph's inputs and replay it."""
        size = self._mixed_rows[bisect_left(self._mixed_rows, len(rows))]
        tokens = self._mixed_tokens[bisect_left(self._mixed_tokens, max(num_tokens, size))]
        host = self._host[self._turn][2]
        parts = MixedParts.of(host.numpy(), size, tokens, self.max_pages)
        parts.fill(rows, decode, self._tables_of_rows)
        self._mixed_device[: parts.total].copy_(host[: parts.total], non_blocking=True)
        if samplers:
            self._bring_sampling([rows[index] for index in samplers], samplers, size)
        self._sampled_rows = size
        self._mixed_graphs[size, tokens].replay()

    def _eager(self, rows: list[RowPlan], samplers: list[int], pending: GraphPending) -> None:
        """The same kernels without a graph, for a tick that none holds."""
        batch = self._packer.pack(rows, samplers, self._last_tokens)
        plan = batch.attention
        decode = plan.num_decode
        inputs = TokenInputs(batch.input_ids, batch.positions.int(), batch.slots.int())
        prompts = None
        if len(rows) > decode:
            prompts = _Prompts(
                plan.page_table[decode:], plan.kv_lengths[decode:], plan.prefill_cu_q + decode,
                plan.max_prefill_q, plan.max_kv,
            )  # fmt: skip
        attend = self._attend(plan.page_table[:decode], plan.kv_lengths[:decode], prompts)
        stream = self._fused.stream(inputs, attend)
        stream.settle()
        pending.prompt_logprobs = self._prompt_logprobs(
            rows, lambda start, end: self._fused.logits(stream, torch.arange(start, end, device=self.device))
        )
        pending.places = list(range(len(samplers)))
        if samplers:
            logits = self._fused.logits(stream, batch.logit_rows)
            self._logits[: len(samplers)] = logits
            self._sampled_rows = next(size for size in self._sampling_sizes() if size >= len(samplers))
            self._bring_sampling([rows[index] for index in samplers], pending.places, self._sampled_rows)

    def _attend(
        self, table: torch.Tensor, kv_lengths: torch.Tensor, prompts: _Prompts | None = None
    ) -> Attend:
        """Attention of one-token rows and of the prompts behind them. Beside prompts, one-token rows of length
        0 are padding, whose places may be prompt tokens'."""
        decode = len(table)

        def attend(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
            out = None
            if prompts is not None:
                out = self._prefill(
                    q, k_pages, v_pages, prompts.table, prompts.kv_lengths, prompts.cu_q, prompts.max_q,
                    prompts.max_kv,
                )  # fmt: skip
            if decode:
                answer = paged_decode(
                    q[:decode], k_pages, v_pages, table, kv_lengths, self._max_kv,
                    config=self._decode_config, workspace=self._workspace,
                    out=None if out is None else out[:decode],
                )  # fmt: skip
                out = answer if out is None else out
            assert out is not None, "a tick without rows"
            return out

        return attend

    def _bring_sampling(self, rows: list[RowPlan], places: list[int] | range, size: int) -> None:
        """Bring the sampling parameters of ``rows`` to their ``places`` among ``size`` sampled rows; what is at
        the other places is not sampled."""
        most = self._sampling.shape[1]
        host = self._host[self._turn][1]
        view = host.numpy().reshape(8, most)
        view[0, :size] = -1
        view[1:, :size] = 0
        where = list(places)
        sequences = [row.sequence for row in rows]
        view[0, where] = [sequence.row for sequence in sequences]
        view[1:, where] = SamplingTensors.pack(sequences, [row.end for row in rows])
        self._sampling.copy_(host.view(8, most), non_blocking=True)

    def _choose(self, logits: torch.Tensor, params: SamplingTensors) -> SampledTokens:
        token_ids, finite = sampling.sample(logits, params.packed, self._vocabulary_size, params.any_filter)
        return SampledTokens(token_ids, finite)

    # -- capture ----------------------------------------------------------------------------------

    def _sampling_sizes(self) -> list[int]:
        return sorted({*self._decode_rows, *self._mixed_rows})

    def _capture_all(self, report: Callable[[int, int], object]) -> None:
        """Largest first: the smaller graphs then fit into the memory of the larger ones."""
        work: list[Callable[[], None]] = []
        for size in reversed(self._mixed_rows):
            for tokens in reversed([tokens for tokens in self._mixed_tokens if tokens >= size]):
                work.append(lambda size=size, tokens=tokens: self._capture_mixed(size, tokens))
        work += [lambda size=size: self._capture_decode(size) for size in reversed(self._decode_rows)]
        for size in reversed(self._sampling_sizes()):
            work += [lambda size=size, any=any: self._capture_sampling(size, any) for any in (False, True)]
        for number, capture in enumerate(work, 1):
            capture()
            report(number, len(work))
        # Captures ran on padding rows, whose state is rewritten whenever it is used.
        self._steady = []

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        with torch.inference_mode():
            step()  # compiles and loads whatever is new: that must not happen while capturing
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                step()
        return graph

    def _capture_decode(self, size: int) -> None:
        inputs, attend = self._decode_inputs(size)

        def step() -> None:
            begin_step(
                self._sampling[0, :size], self._positions[:size], self._table[:size], self._last_tokens,
                inputs.input_ids, inputs.positions, inputs.slots, self._token_inputs[2, :size], PAGE_SIZE,
            )  # fmt: skip
            stream = self._fused.stream(inputs, attend)
            self._fused.logits_into(self._logits[:size], stream)

        self._decode_graphs[size] = self._capture(step)

    def _capture_mixed(self, size: int, tokens: int) -> None:
        parts = MixedParts.of(self._mixed_device, size, tokens, self.max_pages)
        parts.clear()
        prompts = _Prompts(parts.table[size:], parts.kv_lengths[size:], parts.cu_q, tokens, self._max_kv)
        attend = self._attend(parts.table[:size], parts.kv_lengths[:size], prompts)

        def step() -> None:
            ids = parts.ids.long()
            newest = self._last_tokens[(-1 - ids).clamp_(min=0)]
            ids = torch.where(ids < 0, newest, ids)
            of_rows = self._attend(parts.table[parts.logit_keys], parts.kv_lengths[parts.logit_keys])
            stream = self._fused.stream(
                TokenInputs(ids, parts.positions, parts.slots), attend, Wanted(parts.logit_rows, of_rows)
            )
            self._fused.logits_into(self._logits[:size], stream)

        self._mixed_graphs[size, tokens] = self._capture(step)

    def _capture_sampling(self, size: int, any_filter: bool) -> None:
        row_ids, packed = self._sampling[0, :size], self._sampling[1:, :size]

        def step() -> None:
            token_ids, finite = sampling.sample(
                self._logits[:size], packed, self._vocabulary_size, any_filter
            )
            end_step(row_ids, token_ids, finite, packed, self._last_tokens, self._out[:, :size])

        self._sampling_graphs[size, any_filter] = self._capture(step)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompt rows of a forward: where their chunks lie in it (``cu_q``), their pages and lengths."""

    table: torch.Tensor  # [prompts, pages]
    kv_lengths: torch.Tensor  # [prompts]
    cu_q: torch.Tensor  # [prompts + 1], from the first prompt's first token
    max_q: int
    max_kv: int


def _needs_plain_sampler(sequence: Sequence) -> bool:
    params = sequence.job.params
    return params.needs_logit_edits or params.logprobs is not None or bool(sequence.forced)
