"""Rows of stored states, by index, from layer-major codes to token-major bfloat16, in one pass.

Plain PyTorch twin: `reference.gather_dequant`. Packings, formulas: `coded_states`. docs/kernels.md,
"Gather and dequantise", has the bytes and what was measured.

Letters: K captured layers, T tokens, R rows taken, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.kernels import reference
from dflash_offline.kernels.coded_states import GROUP, CodedStates, as_bfloat16
from dflash_offline.kernels.optional_triton import is_interpreted, tl, triton, use_triton

__all__ = ["CodedStates", "gather_dequant", "gather_linear", "warm_up"]

# Rows and channels of a program and its warps.
TILE = {"raw": (8, 1024, 4), "int8": (8, 1024, 8), "int4": (8, 1024, 8), "int3": (4, 512, 4)}
NORM_CHANNELS = 1024


@triton.jit
def _codes_int8(ptr, row, column, mask, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """Signed codes of channels [column, column + BLOCK_H): float32 [BLOCK_R, BLOCK_H]."""
    offs = row[:, None] + (column + tl.arange(0, BLOCK_H))[None, :]
    return tl.load(ptr + offs, mask=mask, other=0).to(tl.float32)


@triton.jit
def _codes_int4(ptr, row, column, groups, H, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr):
    """Signed codes [BLOCK_R, GROUPS, 64]: a byte's low nibble comes first."""
    byte = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = (row >= 0)[:, None, None] & (column // 2 + byte < H // 2)[None, :, :]
    packed = tl.load(ptr + row[:, None, None] + column // 2 + byte[None, :, :], mask=mask, other=0)
    packed = packed.to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCK_R, GROUPS, 64]).to(tl.float32) - 8.0


@triton.jit
def _codes_int3(
    ptr, codebook_ptr, row, column, groups, H, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr
):
    """Rotated levels [BLOCK_R, GROUPS, 64]: three bit planes, the codebook, the Hadamard matrix."""
    channel = tl.arange(0, 64)
    mask = (row >= 0)[:, None, None] & (column + groups * 64 < H)[None, :, None]
    byte = (column // 64 + groups)[:, None] * 24 + (channel // 8)[None, :]
    code = tl.zeros([BLOCK_R, GROUPS, 64], tl.int32)
    for plane in tl.static_range(3):
        packed = tl.load(
            ptr + row[:, None, None] + byte[None, :, :] + 8 * plane, mask=mask, other=0
        )
        code += ((packed.to(tl.int32) >> (channel % 8)[None, None, :]) & 1) << plane
    level = tl.load(codebook_ptr + code)
    shared = channel[:, None] & channel[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    matrix = tl.where((shared & 1) == 0, 0.125, -0.125)
    # Levels and matrix are exact in bfloat16, so also in the matrix units' tf32.
    y = tl.dot(tl.reshape(level, [BLOCK_R * GROUPS, 64]), matrix, input_precision="tf32")
    return tl.reshape(y, [BLOCK_R, GROUPS, 64])


@triton.jit
def _decode_tile(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr,
    token, valid, layer, column, num_tokens,
    H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Decode channels [column, column + BLOCK_H) of some tokens of a layer: float32."""
    offs_h = column + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    mask = valid[:, None] & mask_h[None, :]
    row = tl.cast(layer, tl.int64) * num_tokens + token
    if CODEC == "raw":
        x = tl.load(value_ptr + row[:, None] * H + offs_h[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
    else:
        GROUPS: tl.constexpr = BLOCK_H // 64
        groups = tl.arange(0, GROUPS)
        if CODEC == "int4":
            start = tl.where(valid, row * (H // 2), -1)
            y = _codes_int4(value_ptr, start, column, groups, H, BLOCK_R, GROUPS)
            group = column // 64 + groups
            scale = tl.load(
                scale_ptr + row[:, None] * (H // 64) + group[None, :],
                mask=valid[:, None] & (group < H // 64)[None, :],
                other=0.0,
            )
            y = tl.reshape(y * scale.to(tl.float32)[:, :, None], [BLOCK_R, BLOCK_H])
        else:
            if CODEC == "int8":
                y = _codes_int8(value_ptr, row * H, column, mask, BLOCK_R, BLOCK_H)
            else:
                start = tl.where(valid, row * (H // 64 * 24), -1)
                y = _codes_int3(value_ptr, codebook_ptr, start, column, groups, H, BLOCK_R, GROUPS)
                y = tl.reshape(y, [BLOCK_R, BLOCK_H])
            y *= tl.load(scale_ptr + row, mask=valid, other=0.0).to(tl.float32)[:, None]
        mean = tl.load(mean_ptr + layer * H + offs_h, mask=mask_h, other=0.0)
        gain = tl.load(gain_ptr + layer * H + offs_h, mask=mask_h, other=0.0)
        x = mean[None, :] + gain[None, :] * y
        if EXACT:
            slot = tl.load(slot_ptr + row, mask=valid, other=-1)
            is_exact = (slot >= 0)[:, None] & mask_h[None, :]
            offs = tl.cast(slot, tl.int64)[:, None] * H + offs_h[None, :]
            exact = tl.load(exact_ptr + offs, mask=is_exact, other=0.0)
            x = tl.where(is_exact, exact.to(tl.float32), x)
    return x


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_dequant_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, row_ptr, out_ptr,
    num_rows, num_tokens,
    K: tl.constexpr, H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr,
    INDEXED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[r, layer H + h] = decoded states[layer, rows[r], h]; a program takes a tile of one layer.

    Grid (row tiles, K * channel tiles).
    """
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    layer = tl.program_id(1) // tiles
    column = tl.program_id(1) % tiles * BLOCK_H
    valid = offs_r < num_rows
    if INDEXED:
        token = tl.load(row_ptr + offs_r, mask=valid, other=0).to(tl.int64)
    else:
        token = tl.cast(offs_r, tl.int64)
    x = _decode_tile(
        value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, token, valid,
        layer, column, num_tokens, H, CODEC, EXACT, BLOCK_R, BLOCK_H,
    )  # fmt: skip
    offs_h = column + tl.arange(0, BLOCK_H)
    out = out_ptr + tl.cast(offs_r, tl.int64)[:, None] * (K * H) + (layer * H + offs_h)[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (offs_h < H)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_norm_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, row_ptr, w_ptr,
    out_ptr, num_rows, num_tokens, stride_w, eps,
    K: tl.constexpr, H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr,
    INDEXED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """As above, each layer's state divided by its rms and multiplied by w: decoded twice, read once
    from device memory and once from the cache. Grid (row tiles, K).
    """
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    layer = tl.program_id(1)
    valid = offs_r < num_rows
    if INDEXED:
        token = tl.load(row_ptr + offs_r, mask=valid, other=0).to(tl.int64)
    else:
        token = tl.cast(offs_r, tl.int64)
    square = tl.zeros([BLOCK_R], tl.float32)
    for column in range(0, H, BLOCK_H):
        x = _decode_tile(
            value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, token,
            valid, layer, column, num_tokens, H, CODEC, EXACT, BLOCK_R, BLOCK_H,
        )  # fmt: skip
        inside = (column + tl.arange(0, BLOCK_H) < H)[None, :]
        square += tl.sum(tl.where(inside, x * x, 0.0), 1)
    rstd = tl.rsqrt(square / H + eps)
    for column in range(0, H, BLOCK_H):
        x = _decode_tile(
            value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, token,
            valid, layer, column, num_tokens, H, CODEC, EXACT, BLOCK_R, BLOCK_H,
        )  # fmt: skip
        offs_h = column + tl.arange(0, BLOCK_H)
        w = tl.load(w_ptr + layer * stride_w + offs_h, mask=offs_h < H, other=0.0).to(tl.float32)
        out = out_ptr + tl.cast(offs_r, tl.int64)[:, None] * (K * H) + (layer * H + offs_h)[None, :]
        y = (x * rstd[:, None] * w[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out, y, mask=valid[:, None] & (offs_h < H)[None, :])


def _tile(states: CodedStates, *, norm: bool) -> tuple[int, int, int]:
    """Return rows and channels of a program, and its warps."""
    rows, channels, warps = TILE[states.codec]
    # The rotation by the matrix units needs 16 groups in a tile.
    fewest_rows = 1
    if is_interpreted():
        rows, channels = 4, 256
    if norm:
        rows = 2
    channels = min(channels, max(GROUP, 1 << (states.hidden - 1).bit_length()))
    if states.codec == "int3":
        fewest_rows = max(1, 16 * GROUP // channels)
    return max(rows, fewest_rows), channels, warps


def _launch(states: CodedStates, rows, norm_weight, eps: float, dtype: torch.dtype) -> Tensor:
    num_rows = states.num_tokens if rows is None else rows.shape[0]
    values = as_bfloat16(states.values)
    if states.codec == "int8":
        values = values.view(torch.int8)
    layers, hidden = states.num_layers, states.hidden
    out = torch.empty(num_rows, layers * hidden, dtype=dtype, device=values.device)
    block_rows, block_hidden, warps = _tile(states, norm=norm_weight is not None)
    if not num_rows:
        return out
    exact = None if states.exact is None else as_bfloat16(states.exact)
    sources = (states.scales, states.mean, states.gain, states.codebook, states.exact_slot, exact)
    constants = {
        "K": layers,
        "H": hidden,
        "CODEC": states.codec,
        "EXACT": exact is not None and exact.shape[0] > 0,
        "INDEXED": rows is not None,
        "BLOCK_R": block_rows,
        "BLOCK_H": block_hidden,
        "num_warps": warps,
        # The format rounds products before sums; `quantize.decode_states` gives the same bits.
        "enable_fp_fusion": False,
    }
    row_tiles = -(-num_rows // block_rows)
    if norm_weight is None:
        grid = (row_tiles, layers * -(-hidden // block_hidden))
        _gather_dequant_kernel[grid](
            values, *sources, rows, out, num_rows, states.num_tokens, **constants
        )
    else:
        stride_w = norm_weight.stride(0) if norm_weight.dim() == 2 else 0
        _gather_norm_kernel[(row_tiles, layers)](
            values, *sources, rows, norm_weight, out, num_rows, states.num_tokens, stride_w, eps,
            **constants,
        )  # fmt: skip
    return out


def gather_dequant(
    states: CodedStates,
    rows: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
    implementation: str | None = None,
) -> Tensor:
    """Decode rows of layer-major states and lay a token's layers side by side.

        x = decode(states)[:, rows]                                   # [K, R, H]
        x = rms_norm(x, norm_weight, eps)                             # if norm_weight is given
        return x.transpose(0, 1).reshape(R, K * H)

    Args:
        states: packed states of K layers and T tokens; no gradient reaches them.
        rows: integer [R] in [0, T), in any order, repeated or not; None takes all T in order.
        norm_weight: [H] or [K, H]; normalises each layer's state.
        eps: of the norm.
        dtype: of the result.
        implementation: "reference" or "triton"; by default Triton on CUDA.

    Returns:
        [R, K * H]
    """
    if not use_triton(states.values, implementation):
        return reference.gather_dequant(states, rows, norm_weight=norm_weight, eps=eps, dtype=dtype)
    if not states.values.is_contiguous():
        raise ValueError("states.values must be contiguous [K, T, ...]: call .contiguous() once")
    return _launch(states, rows, norm_weight, eps, dtype)


class _GatherLinear(torch.autograd.Function):
    """Keeps the codes, not the decoded rows: they are decoded again for the weight's gradient."""

    @staticmethod
    def forward(ctx, states, rows, weight, implementation):
        ctx.states, ctx.rows, ctx.implementation = states, rows, implementation
        ctx.dtype = weight.dtype
        x = gather_dequant(states, rows, dtype=weight.dtype, implementation=implementation)
        return x @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        x = gather_dequant(ctx.states, ctx.rows, dtype=ctx.dtype, implementation=ctx.implementation)
        return None, None, d_out.t() @ x, None


def gather_linear(
    states: CodedStates,
    weight: Tensor,
    rows: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return gather_dequant(states, rows) @ weight.T, keeping only the codes for backward.

    Args:
        states: packed states of K layers and T tokens.
        weight: [F, K * H]; its dtype is that of the decoded rows. It alone gets a gradient.
        rows: integer [R] or None, as in `gather_dequant`.
    """
    return _GatherLinear.apply(states, rows, weight, implementation)


def warm_up(states: CodedStates, *, norm_weight: Tensor | None = None) -> None:
    """Compile the kernels for states like these, with and without an index."""
    rows = torch.zeros(1, dtype=torch.int64, device=states.values.device)
    gather_dequant(states, rows)
    gather_dequant(states)
    if norm_weight is not None:
        gather_dequant(states, rows, norm_weight=norm_weight)
        gather_dequant(states, norm_weight=norm_weight)
