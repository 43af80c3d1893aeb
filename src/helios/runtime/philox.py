"""Counter-based random numbers: Philox4x32-10 in plain torch.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). There is no state: a 64-bit key
and a 128-bit counter give four 32-bit words, so the number of one token depends on nothing but what names
it. Here the key belongs to one choice of one request (``row_seed``) and the counter is
(vocabulary id // 4, position, 0, 0); the word ``vocabulary id % 4`` is the token's. These are the words of
``tl.randint4x(key, position << 32 | vocabulary id // 4)`` in Triton, so a kernel can draw the same numbers.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def row_seed(seed: int | None, choice: int) -> int:
    """The 64-bit key of one choice of a request; drawn from the operating system without a seed.

    Equal seeds give equal keys on every machine. The mixing (SplitMix64's finalizer) keeps neighbouring
    seeds and choices apart: seed 1 choice 2 must not be seed 2 choice 1.
    """
    if seed is None:
        return secrets.randbits(64)
    return _mix(_mix(seed) + choice)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    ``key`` (low, high) and the four ``counter`` words are int64 tensors of values below 2**32 that
    broadcast against each other; so are the results. A product of two 32-bit words wraps in int64 with the
    right bits, and shifting them down and masking undoes the sign.
    """
    c0, c1, c2, c3 = counter
    rounds = torch.arange(_ROUNDS, device=key[0].device)
    # [10, ...]: the keys of all rounds at once. Bits above 32 are masked where they are used.
    keys_0 = (key[0] + _tail(rounds * _KEY_STEP_0, key[0])).unbind()
    keys_1 = (key[1] + _tail(rounds * _KEY_STEP_1, key[1])).unbind()
    for k0, k1 in zip(keys_0, keys_1, strict=True):
        # Broadcasting makes the first round nearly free: its words are still per row or per column.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK)
        c2 = ((product_0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK)
        # Not masked: c1 and c3 are only ever xored into words that are masked then.
        c1, c3 = product_1, product_0
    return c0, c1 & _MASK, c2, c3 & _MASK


def _tail(rounds: Tensor, like: Tensor) -> Tensor:
    """``rounds`` [10] shaped to broadcast against ``like`` from a new first dimension."""
    return rounds.view(-1, *(1,) * like.dim())


def random_words(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary_size: int) -> Tensor:
    """One 32-bit word (as int64) for every token of the vocabulary, [rows, vocabulary_size].

    ``key`` is two and ``positions`` one int64 tensor [rows]. One Philox call serves four tokens.
    """
    blocks = torch.arange((vocabulary_size + 3) // 4, device=positions.device)[None, :]  # [1, vocab / 4]
    zero = torch.zeros_like(positions)[:, None]
    words = philox4x32((key[0][:, None], key[1][:, None]), (blocks, positions[:, None], zero, zero))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocabulary_size]


def random_words_at(key: tuple[Tensor, Tensor], positions: Tensor, token_ids: Tensor) -> Tensor:
    """The words of ``random_words`` at ``token_ids`` [rows, n] only, [rows, n]."""
    zero = torch.zeros_like(positions)[:, None]
    counter = (token_ids >> 2, positions[:, None], zero, zero)
    w0, w1, w2, w3 = philox4x32((key[0][:, None], key[1][:, None]), counter)
    odd, high = (token_ids & 1).bool(), (token_ids & 2).bool()
    return torch.where(high, torch.where(odd, w3, w2), torch.where(odd, w1, w0))


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise (float32) from 32-bit words: -log(E) with E exponential.

    E comes from 1 - u, not u, because the tokens that win are those with a small E, and there float32 keeps
    all 32 bits: the noise reaches 22.9 where a 24-bit uniform would end at 17.
    """
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
