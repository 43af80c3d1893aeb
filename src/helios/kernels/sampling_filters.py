"""The passes of :mod:`helios.kernels.sampling` for rows with top-k, top-p or min-p."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from helios.kernels.common import constant, cuda, jit, tl
from helios.kernels.sampling_common import (
    LAST_KEY,
    NO_KEY,
    TOP_K_OFF,
    best4,
    bits,
    chunk_tops,
    distance_of,
    filters_of,
    gumbel,
    inverse_temperature_of,
    key_of,
    load4,
    load_logits,
    random_words,
)
from helios.runtime.sampler import NOISE_RANGE

FIRST_PIVOTS = 8  # of the first counting pass
_SEARCH_PIVOTS = constant(16)  # per step of the search in the list
# The pivots of the first counting pass are evenly spaced in bits, so nearly geometrically in distance.
_FIRST_STEP = constant((bits(NOISE_RANGE) - bits(NOISE_RANGE / 32)) // (FIRST_PIVOTS - 1))
_NEAR_KEY = constant(bits(NOISE_RANGE / 64))


# --- filters: counting


@jit
def _in_question(distance, low, high):
    return (key_of(distance) > low) & (key_of(distance) <= high)


@jit
def _limit(tops, best, inverse_temperature, top_k):
    """A key that the k-th best token can't lie beyond: nearly that of the k-th among the chunks' best."""
    key = key_of(distance_of(tops, best, inverse_temperature))
    index = tl.arange(0, _SEARCH_PIVOTS)
    low = _NEAR_KEY
    high = LAST_KEY
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
    # Neither is in order from here on, nor need it be: a later count's pivots lie between those before.
    last = tl.max(key, 0)
    total = tl.max(mass, 0)
    low = -1
    high = last
    least = total
    most = total
    if top_k < TOP_K_OFF:
        enough = number >= top_k
        low = tl.max(tl.where(enough, -1, key), 0)
        high = tl.min(tl.where(enough, key, last), 0)
        least = tl.max(tl.where(enough, 0.0, mass), 0)
        most = tl.min(tl.where(enough, mass, total), 0)
    if top_p <= 1.0:
        share = top_p.to(tl.float64)
        low = tl.max(tl.where(mass < share * least, key, -1), 0)
        high = tl.minimum(high, tl.min(tl.where(mass >= share * most, key, last), 0))
        if top_k < TOP_K_OFF:
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
    within = key_of(distance)[None, :] <= pivots[:, None]
    return within.to(tl.int32), tl.where(within, tl.exp(-distance)[None, :], 0.0)


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def count_within(
    logits,
    packed,
    logits_stride,
    vocabulary,
    packed_stride,
    drawn,
    keys,
    counted,
    DONE: tl.constexpr,
    PIVOTS: tl.constexpr,
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
    inverse_temperature = inverse_temperature_of(packed, row)
    top_p, _, top_k, _ = filters_of(packed, row, packed_stride)
    if (inverse_temperature == 0) | ((top_k == TOP_K_OFF) & (top_p > 1.0)):
        return
    tops = chunk_tops(drawn, row, CHUNKS, CHUNKS_PADDED)
    best = tl.max(tops, 0)
    if tl.abs(best) == float("inf"):
        return
    index = tl.arange(0, PIVOTS)
    if DONE == 0:
        last = LAST_KEY
        if top_k <= CHUNKS:
            last = _limit(tops, best, inverse_temperature, top_k)
        pivots = tl.maximum(last - (PIVOTS - 1 - index) * _FIRST_STEP, 0)
    else:
        low, last, _, _, _, _, asked = _bracket(
            (keys, counted), row, top_k, top_p, DONE, ALL, PARTS, PARTS_PADDED
        )
        if tl.sum(asked, 0) <= ENOUGH:
            # Few enough are in question for _finish.
            if part == 0:
                tl.store(keys + row * ALL + DONE + index, index * 0 - 1)
            return
        step = (last - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (index + 1), last)
    if part == 0:
        tl.store(keys + row * ALL + DONE + index, pivots)

    at = counted + (row.to(tl.int64) * ALL + DONE + index) * PARTS + part
    mass_at = at + tl.num_programs(0).to(tl.int64) * ALL * PARTS
    # The part's own best is that of its chunks.
    chunk = tl.arange(0, CHUNKS_PADDED)
    mine = chunk // (BLOCK // CHUNK) == part
    top = tl.max(tl.where(mine, tops, float("-inf")), 0)
    if key_of(distance_of(top, best, inverse_temperature)) > last:
        tl.store(at, index * 0.0)
        tl.store(mass_at, index * 0.0)
        return
    block = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    l0, l1, l2, l3 = load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    n0, m0 = _within(distance_of(l0, best, inverse_temperature), pivots)
    n1, m1 = _within(distance_of(l1, best, inverse_temperature), pivots)
    n2, m2 = _within(distance_of(l2, best, inverse_temperature), pivots)
    n3, m3 = _within(distance_of(l3, best, inverse_temperature), pivots)
    tl.store(at, tl.sum(n0 + n1 + n2 + n3, 1).to(tl.float32))
    tl.store(mass_at, tl.sum(m0 + m1 + m2 + m3, 1))


# --- filters: drawing


@jit
def _allowed_score(distance, word, farthest, FAST: tl.constexpr):
    return tl.where(distance <= farthest, gumbel(word, FAST) - distance, float("-inf"))


@jit
def _put(listed, size, distance, token, wanted, place, LIST: tl.constexpr):
    fits = wanted & (place < LIST)
    tl.store(listed + place, distance, fits)
    tl.store(listed + size + place, token.to(tl.float32, bitcast=True), fits)
    return place + wanted.to(tl.int32)


@jit(do_not_specialize=["packed_stride"], do_not_specialize_on_alignment=["packed"])
def collect(
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
    inverse_temperature = inverse_temperature_of(packed, row)
    top_p, reach, top_k, filtered = filters_of(packed, row, packed_stride)
    if (inverse_temperature == 0) | (filtered == 0):
        return
    best = tl.max(chunk_tops(drawn, row, CHUNKS, CHUNKS_PADDED), 0)
    if tl.abs(best) == float("inf"):
        return
    score_at = certain + row * PARTS + part
    token_at = score_at + tl.num_programs(0) * PARTS

    farthest = reach
    low = -1
    high = -1
    start = 0  # of this part in the list
    in_question = 0  # tokens of this part
    if (top_k < TOP_K_OFF) | (top_p <= 1.0):
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
    l0, l1, l2, l3 = load4(logits + row.to(tl.int64) * logits_stride, block, vocabulary)
    d0 = distance_of(l0, best, inverse_temperature)
    d1 = distance_of(l1, best, inverse_temperature)
    d2 = distance_of(l2, best, inverse_temperature)
    d3 = distance_of(l3, best, inverse_temperature)
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
        w0, w1, w2, w3 = random_words(packed, row, packed_stride, block)
        score, token = best4(
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
        distance = distance_of(load_logits(logits, token, vocabulary), best, inverse_temperature)
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
        mass += tl.where(key_of(distance) <= key, tl.exp(-distance), 0.0)
    return tl.sum(mass, 0).to(tl.float64)


@jit
def filtered_token(
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
    """The token of a row with filters: from the draws of ``collect`` and the tokens still in question."""
    part = tl.arange(0, PARTS_PADDED)
    at = certain + row * PARTS + part
    scores = tl.load(at, part < PARTS, other=float("-inf"))
    tokens = key_of(tl.load(at + tl.num_programs(0) * PARTS, part < PARTS, other=0.0))
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, tokens, NO_KEY), 0)

    top_p, reach, top_k, _ = filters_of(packed, row, packed_stride)
    if (top_k < TOP_K_OFF) | (top_p <= 1.0):
        low, high, base_number, base_mass, total, _sure, in_question = _bracket(
            row_counts, row, top_k, top_p, ALL, ALL, PARTS, PARTS_PADDED
        )
        number = tl.sum(in_question, 0)
        size = number
        if number > LIST:
            size = vocabulary
        asked = (logits, listed + row * LIST, number, vocabulary, best, inverse_temperature, low, high)
        last = high
        if (top_k < TOP_K_OFF) & (number > 0):
            last = _search(
                asked, size, low, high, base_number.to(tl.float64), top_k.to(tl.float64), False, LIST, BLOCK
            )
            total = base_mass + _mass_within(asked, size, last, LIST, BLOCK)
        if (top_p <= 1.0) & (number > 0):
            last = _search(asked, size, low, last, base_mass, top_p.to(tl.float64) * total, True, LIST, BLOCK)
        farthest = tl.minimum(last.to(tl.float32, bitcast=True), reach)
        for start in range(0, size, BLOCK):
            distance, ids = _candidates(asked, start, LIST, BLOCK)
            w0, w1, w2, w3 = random_words(packed, row, packed_stride, ids // 4)
            odd = (ids & 1) == 1
            word = tl.where((ids & 2) == 2, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
            drawn = _allowed_score(distance, word, farthest, FAST)
            best_drawn = tl.max(drawn, 0)
            id_drawn = tl.min(tl.where(drawn == best_drawn, ids, NO_KEY), 0)
            if (best_drawn > score) | ((best_drawn == score) & (id_drawn < token)):
                score = best_drawn
                token = id_drawn
    return token
