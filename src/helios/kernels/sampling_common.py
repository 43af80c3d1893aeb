"""What the sampling kernels share: parameters of a row, noise, blocks of four logits, distances."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import struct

from helios.kernels.common import constant, jit, tl
from helios.runtime.sampler import NOISE_RANGE


def bits(number: float) -> int:
    """The bits of a float32 as an integer: for non-negative numbers they have the same order."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


REACH = constant(NOISE_RANGE)
LAST_KEY = constant(bits(NOISE_RANGE))  # tokens beyond are treated as if they were not there
TOP_K_OFF = constant(2**31 - 1)
NO_KEY = constant(2**31 - 1)


# --- parameters, noise


@jit
def inverse_temperature_of(packed, row):
    return tl.load(packed + row).to(tl.float32, bitcast=True)


@jit
def filters_of(packed, row, stride):
    """top_p, the greatest distance that min_p and the noise allow, top_k, and whether any filter is on."""
    top_p = tl.load(packed + stride + row).to(tl.float32, bitcast=True)
    reach = -tl.load(packed + 2 * stride + row).to(tl.float32, bitcast=True)
    top_k = tl.load(packed + 3 * stride + row)
    on = (top_k < TOP_K_OFF) | (top_p <= 1.0) | (reach < REACH)
    return top_p, reach, top_k, on


@jit
def random_words(packed, row, stride, block):
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
def gumbel(word, FAST: tl.constexpr):
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
def load_logits(logits, token, vocabulary):
    """Logits in float32: -inf beyond the vocabulary, +inf for NaN, so that a maximum shows both."""
    value = tl.load(logits + token, token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(value != value, float("inf"), value)


@jit
def load4(logits, block, vocabulary):
    token = block * 4
    return (
        load_logits(logits, token, vocabulary),
        load_logits(logits, token + 1, vocabulary),
        load_logits(logits, token + 2, vocabulary),
        load_logits(logits, token + 3, vocabulary),
    )


@jit
def better(value, token, other_value, other_token):
    """The larger value with its token; the first where they tie."""
    other = other_value > value
    return tl.where(other, other_value, value), tl.where(other, other_token, token)


@jit
def best4(v0, v1, v2, v3, block):
    """The largest of all values and the first token that has it."""
    token = block * 4
    v01, t01 = better(v0, token, v1, token + 1)
    v23, t23 = better(v2, token + 2, v3, token + 3)
    value, token = better(v01, t01, v23, t23)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, NO_KEY), 0)


@jit
def distance_of(logit, best, inverse_temperature):
    """How far a token lies below the best, after temperature. abs: -0.0 would have the bits of a giant."""
    return tl.abs((best - logit) * inverse_temperature)


@jit
def key_of(distance):
    return distance.to(tl.int32, bitcast=True)


@jit
def chunk_tops(drawn, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The largest logits of a row's chunks."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.load(drawn + row * CHUNKS + chunk, chunk < CHUNKS, other=float("-inf"))
