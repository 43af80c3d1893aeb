"""Choosing tokens on the device: the tokens of :mod:`helios.runtime.sampler`, without softmax or sort.

A row without filters takes one pass over its logits, cut into chunks that run on all of the card: each
chunk finds its largest logit and its largest ``logit / temperature + Gumbel noise``, and a last program per
row compares the chunks. The noise is made of the same Philox words as in the plain form, one call for four
tokens.

Top-k, top-p and min-p each come down to a distance: a token is allowed when its *distance* below the best,
``(best - logit) / temperature``, is at most so much. As the bits of a non-negative float order like
integers, that distance is found by a search over integers, whose steps need the number and the mass
(sum of ``exp(-distance)``) of the tokens within each of several pivots. Looking for thresholds with several
pivots per pass instead of sorting is the idea of Qrita (arXiv 2602.01518) and of FlashInfer's sampling
kernels (which reject draws where this finds the threshold). Here:

1. ``_chunk``: maxima (and the whole draw of rows without filters beside filtered ones);
2. ``count_within``, up to three times: number and mass within some pivots, per chunk; then between the
   neighbouring pivots that the time before left in question, if these hold many. The third time is for nearly
   equal probabilities, where they hold more than the list of the next step.
   With a small top_k, the best logits of the chunks bound the k-th best of all, and parts of the row beyond
   that bound are not even loaded;
3. ``collect``: draws among the tokens that are allowed for certain, and copies those still in question
   (typically some dozens) into a list, in the order of their ids;
4. ``_finish``: searches the list, draws among its allowed tokens, and takes the best of all draws.

A row without filters leaves 2 and 3 at once. Nothing is decided on the host, so all of it can be captured
in a CUDA graph. Sums are taken in a fixed order: equal inputs give equal tokens.

The result is that of the plain form up to rounding: its noise differs in the last bits (hardware
logarithms), and a nucleus may end one token earlier or later where the cut falls within about 1e-6 of the
total mass. Tokens beyond ``NOISE_RANGE``, which can't be drawn and weigh less than that, are left out of
top-p's total.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from helios.kernels.common import cuda, interpreted, jit, launch_options, next_power_of_2, tl
from helios.kernels.sampling_common import (
    NO_KEY,
    best4,
    better,
    filters_of,
    gumbel,
    inverse_temperature_of,
    key_of,
    load4,
    random_words,
)
from helios.kernels.sampling_filters import FIRST_PIVOTS, collect, count_within, filtered_token
from helios.runtime import sampler
from helios.runtime.sampler import SamplingTensors

CHUNK_TOKENS = 2048  # per program of the first pass with filters: some 75 programs for one row
PART_TOKENS = 2 * CHUNK_TOKENS  # of the passes behind it; fewer, as each reads what all chunks counted
LIST_BLOCK = 1024  # candidates looked at together
LIST_SIZE = 4096  # candidates a list holds; with more in question, the last program reads the logits instead
# Counting passes: pivots, and tokens in question that make the pass unnecessary. Sums of pivots from the first on
# are powers of two.
PASSES = ((FIRST_PIVOTS, 0), (8, LIST_BLOCK), (16, LIST_SIZE))


def draw_config(rows: int) -> tuple[int, int, int]:
    """Tokens of a program and of a step of it, and its warps, for the draw of ``rows`` rows without filters."""
    return (4096, 4096, 8) if rows <= 4 else (4096, 2048, 4)


def sample_reference(
    logits: torch.Tensor, packed: torch.Tensor, vocabulary_size: int | None = None, filters: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain form of :func:`sample`."""
    tensors = SamplingTensors(packed, all_greedy=False, any_filter=filters)
    sampled = sampler.sample(logits, tensors, vocabulary_size)
    return sampled.token_ids, sampled.finite


def sample(
    logits: torch.Tensor, packed: torch.Tensor, vocabulary_size: int | None = None, filters: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for every row of ``logits [rows, vocab]`` (a float type; not changed).

    ``packed`` is :attr:`SamplingTensors.packed`, ``[7, rows]`` int32. Ids from ``vocabulary_size`` on are
    never chosen. Returns token ids ``[rows]`` int64 and whether the row was sound, ``[rows]`` bool, as in
    :class:`helios.runtime.sampler.SampledTokens`. With ``filters`` false no row may have any, and the three
    launches that would look for them are left out.
    """
    assert logits.stride(1) == packed.stride(1) == 1
    rows = logits.shape[0]
    vocabulary = logits.shape[1] if vocabulary_size is None else min(vocabulary_size, logits.shape[1])
    device = logits.device
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return token_ids, finite
    chunk = CHUNK_TOKENS if filters else draw_config(rows)[0]
    chunks = (vocabulary + chunk - 1) // chunk
    parts = (vocabulary + PART_TOKENS - 1) // PART_TOKENS
    pivots = sum(own for own, _ in PASSES)
    # Per chunk: largest logit, best score, its token. [3, rows, chunks]
    drawn = torch.empty(3, rows, chunks, dtype=torch.float32, device=device)
    # Per part of a filtered row: best score and its token. [2, rows, parts]
    certain = torch.empty(2, rows, parts, dtype=torch.float32, device=device) if filters else drawn
    # Pivot keys [rows, pivots], then number and mass within each [rows, pivots, parts].
    keys = torch.empty(rows, pivots, dtype=torch.int32, device=device) if filters else drawn
    counted = torch.empty(2, rows, pivots, parts, dtype=torch.float32, device=device) if filters else drawn
    # Distances and ids of the tokens in question. [2, rows, LIST_SIZE]
    listed = torch.empty(2, rows, LIST_SIZE, dtype=torch.float32, device=device) if filters else drawn

    scalars = (logits.stride(0), vocabulary, packed.stride(0))
    sizes = {"CHUNKS": chunks, "CHUNKS_PADDED": next_power_of_2(chunks)}
    filter_sizes = sizes | {"PARTS": parts, "PARTS_PADDED": next_power_of_2(parts)}
    fast = not interpreted()
    # Rows first: the second dimension of a grid ends at 65,535, and chunks are few.
    if not filters:
        chunk, block, warps = draw_config(rows)
        _draw[(rows, chunks)](
            logits,
            packed,
            *scalars,
            drawn,
            CHUNKS=chunks,
            CHUNK=chunk,
            BLOCK=block,
            FAST=fast,
            **launch_options(warps),
        )
    else:
        _chunk[(rows, chunks)](
            logits,
            packed,
            *scalars,
            drawn,
            CHUNKS=chunks,
            BLOCK=CHUNK_TOKENS,
            FAST=fast,
            **launch_options(4),
        )
        done = 0
        for own, enough in PASSES:
            count_within[(rows, parts)](
                logits,
                packed,
                *scalars,
                drawn,
                keys,
                counted,
                DONE=done,
                PIVOTS=own,
                ENOUGH=enough,
                ALL=pivots,
                CHUNK=CHUNK_TOKENS,
                BLOCK=PART_TOKENS,
                **filter_sizes,
                **launch_options(8),
            )
            done += own
        collect[(rows, parts)](
            logits,
            packed,
            *scalars,
            drawn,
            keys,
            counted,
            certain,
            listed,
            ALL=pivots,
            BLOCK=PART_TOKENS,
            LIST=LIST_SIZE,
            FAST=fast,
            **filter_sizes,
            **launch_options(8),
        )
    _finish[(rows,)](
        logits,
        packed,
        *scalars,
        drawn,
        keys,
        counted,
        certain,
        listed,
        token_ids,
        finite,
        ALL=pivots,
        BLOCK=LIST_BLOCK,
        LIST=LIST_SIZE,
        FILTERS=filters,
        FAST=fast,
        **filter_sizes,
        **launch_options(8),
    )
    return token_ids, finite


# --- the draw of rows without filters


@jit
def _load_quads(logits, block, vocabulary):
    """Four neighbouring logits for each place of ``block``, in one wide load, as float32."""
    token = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    quads = tl.load(logits + token, token < vocabulary, other=float("-inf")).to(tl.float32)
    quads = tl.where(quads != quads, float("inf"), quads)  # so that a maximum shows NaN, too
    even, odd = tl.split(tl.reshape(quads, (block.shape[0], 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    return l0, l1, l2, l3


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def _draw(
    logits,
    packed,
    logits_stride,
    vocabulary,
    packed_stride,
    drawn,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_chunk`` without filters: each thread keeps its own best over several blocks, compared at the end."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    logits += row.to(tl.int64) * logits_stride
    inverse_temperature = inverse_temperature_of(packed, row)
    random = inverse_temperature > 0
    # Scores hang from some logit of the chunk, so that they are small numbers whatever the temperature.
    first = tl.load(logits + chunk * CHUNK).to(tl.float32)
    anchor = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    lane = tl.arange(0, BLOCK // 4)
    top = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    score = top
    token = lane * 0
    for step in tl.static_range(CHUNK // BLOCK):
        block = (chunk * CHUNK + step * BLOCK) // 4 + lane
        l0, l1, l2, l3 = _load_quads(logits, block, vocabulary)
        top = tl.maximum(top, tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)))
        if random:
            w0, w1, w2, w3 = random_words(packed, row, packed_stride, block)
            l0 = (l0 - anchor) * inverse_temperature + gumbel(w0, FAST)
            l1 = (l1 - anchor) * inverse_temperature + gumbel(w1, FAST)
            l2 = (l2 - anchor) * inverse_temperature + gumbel(w2, FAST)
            l3 = (l3 - anchor) * inverse_temperature + gumbel(w3, FAST)
        v01, t01 = better(l0, block * 4, l1, block * 4 + 1)
        v23, t23 = better(l2, block * 4 + 2, l3, block * 4 + 3)
        value, name = better(v01, t01, v23, t23)
        score, token = better(score, token, value, name)
    best = tl.max(top, 0)
    most = tl.max(score, 0)
    token = tl.min(tl.where(score == most, token, NO_KEY), 0)
    if random & (tl.abs(best) < float("inf")):
        most += (anchor - best) * inverse_temperature  # as from _chunk: hanging from the chunk's best
    at = drawn + row * CHUNKS + chunk
    size = tl.num_programs(0) * CHUNKS
    tl.store(at, best)
    tl.store(at + size, most)
    tl.store(at + 2 * size, token.to(tl.float32, bitcast=True))


# --- the first pass of a batch with filters


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def _chunk(
    logits,
    packed,
    logits_stride,
    vocabulary,
    packed_stride,
    drawn,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    block = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    l0, l1, l2, l3 = load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    best, token = best4(l0, l1, l2, l3, block)
    score = best
    inverse_temperature = inverse_temperature_of(packed, row)
    random = inverse_temperature > 0
    _, _, _, filtered = filters_of(packed, row, packed_stride)
    random = random & (filtered == 0)
    if random:
        # Scaled from the chunk's best, as the row's is not known yet; _finish adds what is between them.
        top = tl.where(tl.abs(best) < float("inf"), best, 0.0)
        w0, w1, w2, w3 = random_words(packed, row, packed_stride, block)
        score, token = best4(
            (l0 - top) * inverse_temperature + gumbel(w0, FAST),
            (l1 - top) * inverse_temperature + gumbel(w1, FAST),
            (l2 - top) * inverse_temperature + gumbel(w2, FAST),
            (l3 - top) * inverse_temperature + gumbel(w3, FAST),
            block,
        )
    at = drawn + row * CHUNKS + chunk
    size = tl.num_programs(0) * CHUNKS
    tl.store(at, best)
    tl.store(at + size, score)
    tl.store(at + 2 * size, token.to(tl.float32, bitcast=True))


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def _finish(
    logits,
    packed,
    logits_stride,
    vocabulary,
    packed_stride,
    drawn,
    keys,
    counted,
    certain,
    listed,
    token_ids,
    finite,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    FILTERS: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    inverse_temperature = inverse_temperature_of(packed, row)
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    at = drawn + row * CHUNKS + chunk
    size = tl.num_programs(0) * CHUNKS
    tops = tl.load(at, inside, other=float("-inf"))
    scores = tl.load(at + size, inside, other=float("-inf"))
    tokens = key_of(tl.load(at + 2 * size, inside, other=0.0))
    best = tl.max(tops, 0)
    sound = tl.abs(best) < float("inf")
    # The chunks' scores hang from their own best logits, the row's from the row's best.
    gap = tl.where(tops > float("-inf"), tops - best, 0.0) * inverse_temperature
    scores = tl.where(inverse_temperature > 0, scores + gap, scores)
    token = tl.min(tl.where(scores == tl.max(scores, 0), tokens, NO_KEY), 0)
    if FILTERS:
        _, _, _, filtered = filters_of(packed, row, packed_stride)
        if sound & filtered & (inverse_temperature > 0):
            token = filtered_token(
                logits + row.to(tl.int64) * logits_stride,
                packed,
                packed_stride,
                vocabulary,
                (keys, counted),
                certain,
                listed,
                row,
                best,
                inverse_temperature,
                ALL,
                BLOCK,
                LIST,
                FAST,
                PARTS,
                PARTS_PADDED,
            )
    tl.store(token_ids + row, tl.where(sound, token, 0).to(tl.int64))
    tl.store(finite + row, sound)
