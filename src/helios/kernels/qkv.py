"""From the packed q, k, v projection to attention's inputs: norm, rotation and cache write in one kernel."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch

from helios.kernels.common import cuda, jit, launch_options, next_power_of_2, tl

# Up to this many tokens the card is far from full, and more, smaller programs answer sooner.
_FEW_TOKENS = 64


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> torch.Tensor:
    """The plain form of :func:`qk_norm_rope_write`."""
    kv_heads, head_dim = k_pages.shape[2:]
    qkv = qkv.view(len(qkv), -1, head_dim)
    heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    if qk_norm is not None:
        wide = qk.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        qk = (wide * qk_norm.float()).to(qkv.dtype)
    cos, sin = rope[positions.long()][:, None].unbind(2)  # [T, 1, head_dim / 2] each
    first, second = qk.float().chunk(2, dim=-1)
    qk = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q, k = qk.split((heads, kv_heads), dim=1)
    k_pages.flatten(0, 1).index_copy_(0, slots.long(), k)
    v_pages.flatten(0, 1).index_copy_(0, slots.long(), v)
    return q.contiguous()


def qk_norm_rope_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into their slots; queries ``[T, heads, dim]``.

    ``qkv [T, (heads + 2 * kv_heads) * dim]``, ``qk_norm [heads + kv_heads, dim]`` (None: no norm), ``rope
    [max_position, 2, dim / 2]`` float32 cosines and sines, ``positions`` and ``slots [T]`` int32 or int64,
    pages ``[pages, PAGE_SIZE, kv_heads, dim]`` with ``slot = page * PAGE_SIZE + offset``. ``dim`` is a
    power of two from 16 on. Slots may repeat only where nobody reads (the dummy page).

    With programmatic dependent launch, positions and slots must not come from the kernel directly before
    this one, which is the projection in every model: they are read while it may still run.
    """
    assert all(tensor.is_contiguous() for tensor in (qkv, rope, k_pages, v_pages))
    tokens = qkv.shape[0]
    kv_heads, head_dim = k_pages.shape[2], k_pages.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert head_dim >= 16, "head_dim must be a power of two from 16 on"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two from 16 on"
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        # Per program 4 heads in one warp or 16 in four: with 128 dimensions each thread then has 8 values of
        # both halves, one 16-byte load each, and a head's norm is a reduction within a warp.
        group = min(4 if tokens <= _FEW_TOKENS else 16, next_power_of_2(heads + 2 * kv_heads))
        _qkv_kernel[(tokens, (heads + 2 * kv_heads + group - 1) // group)](
            qkv,
            q if qk_norm is None else qk_norm,
            eps,
            rope,
            positions,
            slots,
            k_pages,
            v_pages,
            q,
            HAS_NORM=qk_norm is not None,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            GROUP=group,
            **launch_options(max(group * head_dim // 512, 1)),
        )
    return q


@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _qkv_kernel(
    qkv,
    qk_norm,
    eps,
    rope,
    positions,
    slots,
    k_pages,
    v_pages,
    q,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    ROTATED: tl.constexpr = HEADS + KV_HEADS
    dtype = q.dtype.element_ty
    # 64-bit addresses: a pool may hold more than 2**31 values, and so may the projections of a long prompt.
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]  # [GROUP, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    rotated = head < ROTATED
    where = head * DIM + pair  # of the first half; the second lies HALF behind it

    # Nothing of this is written by the kernel before.
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    turn = rope + position * DIM + (head * 0 + pair)  # every head its own, in the layout of its values
    cos = tl.load(turn)
    sin = tl.load(turn + HALF)
    if HAS_NORM:
        scale_0 = tl.load(qk_norm + where, rotated, other=0.0).to(tl.float32)
        scale_1 = tl.load(qk_norm + where + HALF, rotated, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()

    source = qkv + token * ((ROTATED + KV_HEADS) * DIM) + where
    present = head < ROTATED + KV_HEADS
    raw_0 = tl.load(source, present, other=0.0)
    raw_1 = tl.load(source + HALF, present, other=0.0)
    x_0 = raw_0.to(tl.float32)
    x_1 = raw_1.to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x_0 * x_0 + x_1 * x_1, 1) / DIM + eps)[:, None]  # [GROUP, 1]
        # Rounded here because the norm, as a layer of its own, returns the model's dtype.
        x_0 = (x_0 * inverse * scale_0).to(dtype).to(tl.float32)
        x_1 = (x_1 * inverse * scale_1).to(dtype).to(tl.float32)
    y_0 = (x_0 * cos - x_1 * sin).to(dtype)
    y_1 = (x_1 * cos + x_0 * sin).to(dtype)

    is_query = head < HEADS
    target = q + token * (HEADS * DIM) + where
    tl.store(target, y_0, is_query)
    tl.store(target + HALF, y_1, is_query)
    is_key = rotated & (head >= HEADS)
    target = k_pages + slot * (KV_HEADS * DIM) + (where - HEADS * DIM)
    tl.store(target, y_0, is_key)
    tl.store(target + HALF, y_1, is_key)
    is_value = present & (head >= ROTATED)
    target = v_pages + slot * (KV_HEADS * DIM) + (where - ROTATED * DIM)
    tl.store(target, raw_0, is_value)
    tl.store(target + HALF, raw_1, is_value)
