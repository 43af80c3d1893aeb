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

1. ``_chunk``: maxima (and the whole draw of rows without filters);
2. ``_count``, twice: number and mass within ``_PIVOTS`` pivots, per chunk; the second time between the
   neighbouring pivots that the first time left in question, if these hold many.
   With a small top_k, the best logits of the chunks bound the k-th best of all, and parts of the row beyond
   that bound are not even loaded;
3. ``_collect``: draws among the tokens that are allowed for certain, and copies those still in question
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

import struct

import torch

from helios.kernels.common import (
    constant,
    cuda,
    interpreted,
    jit,
    launch_options,
    next_power_of_2,
    tl,
)
from helios.runtime import sampler
from helios.runtime.sampler import NOISE_RANGE, SamplingTensors

_CHUNK = 2048  # tokens per program of the first pass: some 75 programs for one row
_FILTER_CHUNK = (
    2 * _CHUNK
)  # of the passes for filters; fewer, as each reads what all chunks of its row counted
_COUNT_PIVOTS = 8  # per counting pass
_PIVOTS = constant(_COUNT_PIVOTS)
_SEARCH_PIVOTS = constant(16)  # per step of the search in the list
_LIST_BLOCK = 1024  # candidates looked at together
_LIST = 4096  # candidates a list holds; with more in question, the last program reads the logits instead


def _bits(number: float) -> int:
    """The bits of a float32 as an integer: for non-negative numbers they have the same order."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


# The pivots of the first counting pass are evenly spaced in bits, so nearly geometrically in distance.
_REACH = constant(NOISE_RANGE)
_LAST_KEY = constant(_bits(NOISE_RANGE))  # tokens beyond are treated as if they were not there
_FIRST_STEP = constant((_bits(NOISE_RANGE) - _bits(NOISE_RANGE / 32)) // (_COUNT_PIVOTS - 1))
_NEAR_KEY = constant(_bits(NOISE_RANGE / 64))
_TOP_K_OFF = constant(2**31 - 1)
_NO_KEY = constant(2**31 - 1)


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
    chunks = (vocabulary + _CHUNK - 1) // _CHUNK
    parts = (vocabulary + _FILTER_CHUNK - 1) // _FILTER_CHUNK
    pivots = 2 * _COUNT_PIVOTS  # of both counting passes
    # Per chunk: largest logit, best score, its token. [3, rows, chunks]
    drawn = torch.empty(3, rows, chunks, dtype=torch.float32, device=device)
    # Per part of a filtered row: best score and its token. [2, rows, parts]
    certain = torch.empty(2, rows, parts, dtype=torch.float32, device=device) if filters else drawn
    # Pivot keys [rows, pivots], then number and mass within each [rows, pivots, parts].
    keys = torch.empty(rows, pivots, dtype=torch.int32, device=device) if filters else drawn
    counted = torch.empty(2, rows, pivots, parts, dtype=torch.float32, device=device) if filters else drawn
    # Distances and ids of the tokens in question. [2, rows, _LIST]
    listed = torch.empty(2, rows, _LIST, dtype=torch.float32, device=device) if filters else drawn

    scalars = (logits.stride(0), vocabulary, packed.stride(0))
    sizes = {"CHUNKS": chunks, "CHUNKS_PADDED": next_power_of_2(chunks)}
    filter_sizes = sizes | {"PARTS": parts, "PARTS_PADDED": next_power_of_2(parts)}
    fast = not interpreted()
    # Rows first: the second dimension of a grid ends at 65,535, and chunks are few.
    _chunk[(rows, chunks)](
        logits,
        packed,
        *scalars,
        drawn,
        CHUNKS=chunks,
        BLOCK=_CHUNK,
        FILTERS=filters,
        FAST=fast,
        **launch_options(4),
    )
    if filters:
        for done in range(0, pivots, _COUNT_PIVOTS):
            _count[(rows, parts)](
                logits,
                packed,
                *scalars,
                drawn,
                keys,
                counted,
                DONE=done,
                ENOUGH=_LIST_BLOCK,
                ALL=pivots,
                CHUNK=_CHUNK,
                BLOCK=_FILTER_CHUNK,
                **filter_sizes,
                **launch_options(8),
            )
        _collect[(rows, parts)](
            logits,
            packed,
            *scalars,
            drawn,
            keys,
            counted,
            certain,
            listed,
            ALL=pivots,
            BLOCK=_FILTER_CHUNK,
            LIST=_LIST,
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
        BLOCK=_LIST_BLOCK,
        LIST=_LIST,
        FILTERS=filters,
        FAST=fast,
        **filter_sizes,
        **launch_options(8),
    )
    return token_ids, finite


# --- parameters, noise


@jit
def _inverse_temperature(packed, row):
    return tl.load(packed + row).to(tl.float32, bitcast=True)


@jit
def _filters(packed, row, stride):
    """top_p, the greatest distance that min_p and the noise allow, top_k, and whether any filter is on."""
    top_p = tl.load(packed + stride + row).to(tl.float32, bitcast=True)
    reach = -tl.load(packed + 2 * stride + row).to(tl.float32, bitcast=True)
    top_k = tl.load(packed + 3 * stride + row)
    on = (top_k < _TOP_K_OFF) | (top_p <= 1.0) | (reach < _REACH)
    return top_p, reach, top_k, on


@jit
def _words(packed, row, stride, block):
    """The four random words of the tokens ``4 * block`` to ``4 * block + 3``."""
    low = tl.load(packed + 4 * stride + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(packed + 5 * stride + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = tl.load(packed + 6 * stride + row)
    zero = block * 0
    return tl.philox((high << 32) | low, block, zero + position, zero, zero)


@jit
def _log(x, FAST: tl.constexpr):
    if FAST:
        return (
            tl.inline_asm_elementwise(
                "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
            * 0.6931471805599453
        )
    else:
        return tl.log(x)


@jit
def _gumbel(word, FAST: tl.constexpr):
    """:func:`helios.runtime.philox.gumbel`: -log(-log1p(-u)).

    Near 0, where the noise is large, log1p needs all digits of u: a series to u**6 there (relative error
    under 2e-8 below 1/16). Elsewhere a hardware logarithm does, with an absolute error near 1e-7.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * (0.2 + u * (1.0 / 6.0))))))
    exponential = tl.where(u < 0.0625, series, -_log(1.0 - u, FAST))
    return -_log(exponential, FAST)


# --- blocks of four tokens
# A program's tokens lie in four vectors, token 4 * n + j in place n of vector j, because that is how Philox
# gives its words. Their loads overlap in the same cache lines.


@jit
def _load(logits, token, vocabulary):
    """Logits in float32: -inf beyond the vocabulary, +inf for NaN, so that a maximum shows both."""
    value = tl.load(logits + token, token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(value != value, float("inf"), value)


@jit
def _load4(logits, block, vocabulary):
    token = block * 4
    return (
        _load(logits, token, vocabulary),
        _load(logits, token + 1, vocabulary),
        _load(logits, token + 2, vocabulary),
        _load(logits, token + 3, vocabulary),
    )


@jit
def _better(value, token, other_value, other_token):
    """The larger value with its token; the first where they tie."""
    other = other_value > value
    return tl.where(other, other_value, value), tl.where(other, other_token, token)


@jit
def _best4(v0, v1, v2, v3, block):
    """The largest of all values and the first token that has it."""
    token = block * 4
    v01, t01 = _better(v0, token, v1, token + 1)
    v23, t23 = _better(v2, token + 2, v3, token + 3)
    value, token = _better(v01, t01, v23, t23)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, _NO_KEY), 0)


@jit
def _distance(logit, best, inverse_temperature):
    """How far a token lies below the best, after temperature. abs: -0.0 would have the bits of a giant."""
    return tl.abs((best - logit) * inverse_temperature)


# --- the first pass


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
    FILTERS: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    block = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    l0, l1, l2, l3 = _load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    best, token = _best4(l0, l1, l2, l3, block)
    score = best
    inverse_temperature = _inverse_temperature(packed, row)
    random = inverse_temperature > 0
    if FILTERS:
        _, _, _, filtered = _filters(packed, row, packed_stride)
        random = random & (filtered == 0)
    if random:
        # Scaled from the chunk's best, as the row's is not known yet; _finish adds what is between them.
        top = tl.where(tl.abs(best) < float("inf"), best, 0.0)
        w0, w1, w2, w3 = _words(packed, row, packed_stride, block)
        score, token = _best4(
            (l0 - top) * inverse_temperature + _gumbel(w0, FAST),
            (l1 - top) * inverse_temperature + _gumbel(w1, FAST),
            (l2 - top) * inverse_temperature + _gumbel(w2, FAST),
            (l3 - top) * inverse_temperature + _gumbel(w3, FAST),
            block,
        )
    at = drawn + row * CHUNKS + chunk
    size = tl.num_programs(0) * CHUNKS
    tl.store(at, best)
    tl.store(at + size, score)
    tl.store(at + 2 * size, token.to(tl.float32, bitcast=True))


@jit
def _chunk_tops(drawn, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The largest logits of a row's chunks."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.load(drawn + row * CHUNKS + chunk, chunk < CHUNKS, other=float("-inf"))


# --- filters: counting


@jit
def _key(distance):
    return distance.to(tl.int32, bitcast=True)


@jit
def _in_question(distance, low, high):
    return (_key(distance) > low) & (_key(distance) <= high)


@jit
def _limit(tops, best, inverse_temperature, top_k):
    """A key that the k-th best token can't lie beyond: nearly that of the k-th among the chunks' best."""
    key = _key(_distance(tops, best, inverse_temperature))
    index = tl.arange(0, _SEARCH_PIVOTS)
    low = _NEAR_KEY
    high = _LAST_KEY
    for _ in tl.static_range(2):
        step = (high - low) // _SEARCH_PIVOTS
        pivots = high - step * index
        number = tl.sum((key[None, :] <= pivots[:, None]).to(tl.int32), 1)
        high = tl.min(tl.where(number >= top_k, pivots, high), 0)
        low = high - step
    return high


@jit
def _bracket(
    row_counts,
    row,
    top_k,
    top_p,
    KNOWN: tl.constexpr,
    ALL: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """What the counts at a row's first ``KNOWN`` pivots tell of the greatest distance top_k and top_p allow.

    As a key it lies in ``(low, high]``, or both are the last pivot. Returned are low and high, the number
    and the mass of tokens within low, the mass of all, and how many each part has within low and in
    question.

    With both filters on, ``(low, high]`` also holds top_k's own distance, since the mass that top_p takes
    its share of ends there, and only bounds of it are known.
    """
    keys, counted = row_counts
    pivot = tl.arange(0, KNOWN)
    part = tl.arange(0, PADDED)
    key = tl.load(keys + row * ALL + pivot)
    at = counted + (row.to(tl.int64) * ALL + pivot)[:, None] * PARTS + part[None, :]
    inside = (part < PARTS)[None, :] & (key >= 0)[:, None]  # a pivot of -1 was not needed nor counted
    numbers = tl.load(at, inside, other=0.0).to(tl.int32)  # [KNOWN, PADDED]
    masses = tl.load(at + tl.num_programs(0).to(tl.int64) * ALL * PARTS, inside, other=0.0)
    number = tl.sum(numbers, 1)
    mass = tl.sum(masses.to(tl.float64), 1)
    # Neither is in order from here on, nor need it be: the second count's pivots lie between the first's.
    last = tl.max(key, 0)
    total = tl.max(mass, 0)
    low = -1
    high = last
    least = total
    most = total
    if top_k < _TOP_K_OFF:
        enough = number >= top_k
        low = tl.max(tl.where(enough, -1, key), 0)
        high = tl.min(tl.where(enough, key, last), 0)
        least = tl.max(tl.where(enough, 0.0, mass), 0)
        most = tl.min(tl.where(enough, mass, total), 0)
    if top_p <= 1.0:
        share = top_p.to(tl.float64)
        low = tl.max(tl.where(mass < share * least, key, -1), 0)
        high = tl.minimum(high, tl.min(tl.where(mass >= share * most, key, last), 0))
        if top_k < _TOP_K_OFF:
            high = tl.min(tl.where(number >= top_k, key, last), 0)
    within = key <= low
    sure = tl.max(tl.where(within[:, None], numbers, 0), 0)
    asked = tl.max(tl.where((key <= high)[:, None], numbers, 0), 0) - sure
    return (
        low,
        high,
        tl.max(tl.where(within, number, 0), 0),
        tl.max(tl.where(within, mass, 0.0), 0),
        total,
        sure,
        asked,
    )


@jit
def _within(distance, pivots):
    """Which tokens lie within which pivot, as 0 or 1, and their masses there, ``[pivots, tokens]`` each."""
    # Tokens come last so that a thread holds its tokens for all pivots, and sums most of them by itself.
    within = _key(distance)[None, :] <= pivots[:, None]
    return within.to(tl.int32), tl.where(within, tl.exp(-distance)[None, :], 0.0)


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def _count(
    logits,
    packed,
    logits_stride,
    vocabulary,
    packed_stride,
    drawn,
    keys,
    counted,
    DONE: tl.constexpr,
    ENOUGH: tl.constexpr,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    inverse_temperature = _inverse_temperature(packed, row)
    top_p, _, top_k, _ = _filters(packed, row, packed_stride)
    if (inverse_temperature == 0) | ((top_k == _TOP_K_OFF) & (top_p > 1.0)):
        return
    tops = _chunk_tops(drawn, row, CHUNKS, CHUNKS_PADDED)
    best = tl.max(tops, 0)
    if tl.abs(best) == float("inf"):
        return
    index = tl.arange(0, _PIVOTS)
    if DONE == 0:
        last = _LAST_KEY
        if top_k <= CHUNKS:
            last = _limit(tops, best, inverse_temperature, top_k)
        pivots = tl.maximum(last - (_PIVOTS - 1 - index) * _FIRST_STEP, 0)
    else:
        low, last, _, _, _, _, asked = _bracket(
            (keys, counted), row, top_k, top_p, DONE, ALL, PARTS, PARTS_PADDED
        )
        if tl.sum(asked, 0) <= ENOUGH:
            # Few enough are in question for one block of _finish.
            if part == 0:
                tl.store(keys + row * ALL + DONE + index, index * 0 - 1)
            return
        step = (last - low + _PIVOTS) // (_PIVOTS + 1)
        pivots = tl.minimum(low + step * (index + 1), last)
    if part == 0:
        tl.store(keys + row * ALL + DONE + index, pivots)

    at = counted + (row.to(tl.int64) * ALL + DONE + index) * PARTS + part
    mass_at = at + tl.num_programs(0).to(tl.int64) * ALL * PARTS
    # The part's own best is that of its chunks.
    chunk = tl.arange(0, CHUNKS_PADDED)
    mine = chunk // (BLOCK // CHUNK) == part
    top = tl.max(tl.where(mine, tops, float("-inf")), 0)
    if _key(_distance(top, best, inverse_temperature)) > last:
        tl.store(at, index * 0.0)
        tl.store(mass_at, index * 0.0)
        return
    block = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    l0, l1, l2, l3 = _load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    n0, m0 = _within(_distance(l0, best, inverse_temperature), pivots)
    n1, m1 = _within(_distance(l1, best, inverse_temperature), pivots)
    n2, m2 = _within(_distance(l2, best, inverse_temperature), pivots)
    n3, m3 = _within(_distance(l3, best, inverse_temperature), pivots)
    tl.store(at, tl.sum(n0 + n1 + n2 + n3, 1).to(tl.float32))
    tl.store(mass_at, tl.sum(m0 + m1 + m2 + m3, 1))


# --- filters: drawing


@jit
def _allowed_score(distance, word, farthest, FAST: tl.constexpr):
    return tl.where(distance <= farthest, _gumbel(word, FAST) - distance, float("-inf"))


@jit
def _put(listed, size, distance, token, wanted, place, LIST: tl.constexpr):
    fits = wanted & (place < LIST)
    tl.store(listed + place, distance, fits)
    tl.store(listed + size + place, token.to(tl.float32, bitcast=True), fits)
    return place + wanted.to(tl.int32)


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def _collect(
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
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    inverse_temperature = _inverse_temperature(packed, row)
    top_p, reach, top_k, filtered = _filters(packed, row, packed_stride)
    if (inverse_temperature == 0) | (filtered == 0):
        return
    best = tl.max(_chunk_tops(drawn, row, CHUNKS, CHUNKS_PADDED), 0)
    if tl.abs(best) == float("inf"):
        return
    score_at = certain + row * PARTS + part
    token_at = score_at + tl.num_programs(0) * PARTS

    farthest = reach
    low = -1
    high = -1
    start = 0  # of this part in the list
    in_question = 0  # tokens of this part
    if (top_k < _TOP_K_OFF) | (top_p <= 1.0):
        low, high, _, _, _, sure, asked = _bracket(
            (keys, counted), row, top_k, top_p, ALL, ALL, PARTS, PARTS_PADDED
        )
        # low as a distance; -1, where not even the best is certain, would be the bits of a NaN.
        farthest = tl.minimum(tl.where(low < 0, -1.0, low.to(tl.float32, bitcast=True)), reach)
        index = tl.arange(0, PARTS_PADDED)
        start = tl.sum(tl.where(index < part, asked, 0), 0)
        in_question = tl.sum(tl.where(index == part, asked, 0), 0)
        if tl.sum(tl.where(index == part, sure + asked, 0), 0) == 0:
            tl.store(score_at, float("-inf"))
            tl.store(token_at, 0.0)
            return

    block = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    l0, l1, l2, l3 = _load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    d0 = _distance(l0, best, inverse_temperature)
    d1 = _distance(l1, best, inverse_temperature)
    d2 = _distance(l2, best, inverse_temperature)
    d3 = _distance(l3, best, inverse_temperature)
    if (in_question > 0) & (start < LIST):
        q0 = _in_question(d0, low, high)
        q1 = _in_question(d1, low, high)
        q2 = _in_question(d2, low, high)
        q3 = _in_question(d3, low, high)
        number = q0.to(tl.int32) + q1.to(tl.int32) + q2.to(tl.int32) + q3.to(tl.int32)
        place = start + tl.cumsum(number, 0) - number
        size = tl.num_programs(0) * LIST
        target = listed + row * LIST
        place = _put(target, size, d0, block * 4, q0, place, LIST)
        place = _put(target, size, d1, block * 4 + 1, q1, place, LIST)
        place = _put(target, size, d2, block * 4 + 2, q2, place, LIST)
        _put(target, size, d3, block * 4 + 3, q3, place, LIST)
    if tl.min(tl.minimum(tl.minimum(d0, d1), tl.minimum(d2, d3)), 0) <= farthest:
        w0, w1, w2, w3 = _words(packed, row, packed_stride, block)
        score, token = _best4(
            _allowed_score(d0, w0, farthest, FAST),
            _allowed_score(d1, w1, farthest, FAST),
            _allowed_score(d2, w2, farthest, FAST),
            _allowed_score(d3, w3, farthest, FAST),
            block,
        )
        tl.store(score_at, score)
        tl.store(token_at, token.to(tl.float32, bitcast=True))
    else:
        tl.store(score_at, float("-inf"))
        tl.store(token_at, 0.0)


# --- the last pass


@jit
def _candidates(asked, start, LIST: tl.constexpr, BLOCK: tl.constexpr):
    """A block of tokens in question: distances (infinity in empty places) and ids.

    They come from the list, or from the logits where the list was too short for them.
    """
    logits, listed, number, vocabulary, best, inverse_temperature, low, high = asked
    place = start + tl.arange(0, BLOCK)
    if number <= LIST:
        there = place < number
        distance = tl.load(listed + place, there, other=float("inf"))
        token = tl.load(listed + tl.num_programs(0) * LIST + place, there, other=0.0).to(
            tl.int32, bitcast=True
        )
    else:
        token = place
        distance = _distance(_load(logits, token, vocabulary), best, inverse_temperature)
        distance = tl.where(_in_question(distance, low, high), distance, float("inf"))
    return distance, token


@jit
def _search(
    asked, size, low, high, base, target, MASS: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key in ``(low, high]`` within which the number (or mass) of tokens reaches ``target``.

    ``base`` is what lies within ``low``. If rounding keeps the sum from reaching it, the answer is ``high``.
    """
    below = low
    above = high
    index = tl.arange(0, _SEARCH_PIVOTS)
    while above - below > 1:
        step = (above - below + _SEARCH_PIVOTS) // (_SEARCH_PIVOTS + 1)
        pivots = tl.minimum(below + step * (index + 1), above)
        reached = tl.zeros([_SEARCH_PIVOTS], tl.float32)
        for start in range(0, size, BLOCK):
            distance, _ = _candidates(asked, start, LIST, BLOCK)
            numbers, masses = _within(distance, pivots)
            if MASS:
                reached += tl.sum(masses, 1)
            else:
                reached += tl.sum(numbers, 1).to(tl.float32)
        enough = base + reached.to(tl.float64) >= target
        below = tl.maximum(below, tl.max(tl.where(enough, below, pivots), 0))
        above = tl.minimum(above, tl.min(tl.where(enough, pivots, above), 0))
    return above


@jit
def _mass_within(asked, size, key, LIST: tl.constexpr, BLOCK: tl.constexpr):
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        distance, _ = _candidates(asked, start, LIST, BLOCK)
        mass += tl.where(_key(distance) <= key, tl.exp(-distance), 0.0)
    return tl.sum(mass, 0).to(tl.float64)


@jit
def _filtered_token(
    logits,
    packed,
    packed_stride,
    vocabulary,
    row_counts,
    certain,
    listed,
    row,
    best,
    inverse_temperature,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    FAST: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """The token of a row with filters: from the draws of ``_collect`` and the tokens still in question."""
    part = tl.arange(0, PARTS_PADDED)
    at = certain + row * PARTS + part
    scores = tl.load(at, part < PARTS, other=float("-inf"))
    tokens = _key(tl.load(at + tl.num_programs(0) * PARTS, part < PARTS, other=0.0))
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, _NO_KEY), 0)

    top_p, reach, top_k, _ = _filters(packed, row, packed_stride)
    if (top_k < _TOP_K_OFF) | (top_p <= 1.0):
        low, high, base_number, base_mass, total, _sure, in_question = _bracket(
            row_counts, row, top_k, top_p, ALL, ALL, PARTS, PARTS_PADDED
        )
        number = tl.sum(in_question, 0)
        size = number
        if number > LIST:
            size = vocabulary
        asked = (logits, listed + row * LIST, number, vocabulary, best, inverse_temperature, low, high)
        last = high
        if (top_k < _TOP_K_OFF) & (number > 0):
            last = _search(
                asked, size, low, high, base_number.to(tl.float64), top_k.to(tl.float64), False, LIST, BLOCK
            )
            total = base_mass + _mass_within(asked, size, last, LIST, BLOCK)
        if (top_p <= 1.0) & (number > 0):
            last = _search(asked, size, low, last, base_mass, top_p.to(tl.float64) * total, True, LIST, BLOCK)
        farthest = tl.minimum(last.to(tl.float32, bitcast=True), reach)
        for start in range(0, size, BLOCK):
            distance, ids = _candidates(asked, start, LIST, BLOCK)
            w0, w1, w2, w3 = _words(packed, row, packed_stride, ids // 4)
            odd = (ids & 1) == 1
            word = tl.where((ids & 2) == 2, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
            drawn = _allowed_score(distance, word, farthest, FAST)
            best_drawn = tl.max(drawn, 0)
            id_drawn = tl.min(tl.where(drawn == best_drawn, ids, _NO_KEY), 0)
            if (best_drawn > score) | ((best_drawn == score) & (id_drawn < token)):
                score = best_drawn
                token = id_drawn
    return token


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
    inverse_temperature = _inverse_temperature(packed, row)
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    at = drawn + row * CHUNKS + chunk
    size = tl.num_programs(0) * CHUNKS
    tops = tl.load(at, inside, other=float("-inf"))
    scores = tl.load(at + size, inside, other=float("-inf"))
    tokens = _key(tl.load(at + 2 * size, inside, other=0.0))
    best = tl.max(tops, 0)
    sound = tl.abs(best) < float("inf")
    # The chunks' scores hang from their own best logits, the row's from the row's best.
    gap = tl.where(tops > float("-inf"), tops - best, 0.0) * inverse_temperature
    scores = tl.where(inverse_temperature > 0, scores + gap, scores)
    token = tl.min(tl.where(scores == tl.max(scores, 0), tokens, _NO_KEY), 0)
    if FILTERS:
        _, _, _, filtered = _filters(packed, row, packed_stride)
        if sound & filtered & (inverse_temperature > 0):
            token = _filtered_token(
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
