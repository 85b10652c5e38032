"""Rows of stored states, by index, from layer-major codes to token-major bfloat16, in one pass.

Plain PyTorch twin: `reference.gather_dequant`. Packings, formulas: `coded_states`. docs/kernels.md,
"Gather and dequantise", has the bytes and what was measured.

Letters: K captured layers, T tokens, R rows taken, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.kernels import reference
from dflash_offline.kernels.coded_states import GROUP, CodedStates
from dflash_offline.kernels.optional_triton import tl, triton, use_triton

__all__ = ["CodedStates", "gather_dequant", "gather_linear", "warm_up"]

# Rows that a program takes one after the other, groups of 64 channels, warps: 8 channels a thread.
# 16-byte stores of 4 words, and loads of the same 4 pairs, so nothing moves between threads.
ROWS, GROUPS, WARPS = 16, 16, 4


@triton.jit
def _split_words(word):
    """Widen the two bfloat16 in each 32-bit word: (even channels, odd channels), float32."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _rotated_levels(ptr, codebook_ptr, group, num_groups, GROUPS: tl.constexpr):
    """Codebook levels of three bit planes, rotated by the Hadamard matrix: [GROUPS, 32] twice."""
    channel = tl.arange(0, 64)
    mask = (group < num_groups)[:, None]
    byte = group[:, None] * 24 + (channel // 8)[None, :]
    code = tl.zeros([GROUPS, 64], tl.int32)
    for plane in tl.static_range(3):
        packed = tl.load(ptr + byte + 8 * plane, mask=mask, other=0).to(tl.int32)
        code += ((packed >> (channel % 8)[None, :]) & 1) << plane
    level = tl.load(codebook_ptr + code)
    shared = channel[:, None] & channel[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    matrix = tl.where((shared & 1) == 0, 0.125, -0.125)
    # Levels have at most 11 bits and the matrix one, so tf32 products and their sums are exact.
    y = tl.dot(level, matrix, input_precision="tf32")
    return tl.split(tl.reshape(y, [GROUPS, 32, 2]))


@triton.jit
def _channel_pairs(ptr, pair, mask):
    """Load a float for each channel of some pairs: (even channels, odd channels)."""
    low = tl.load(ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _decode_row(
    value_ptr, scale_ptr, codebook_ptr, slot_ptr, exact_ptr, row, first_group,
    mean_low, mean_high, gain_low, gain_high,
    H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Decode 64 * GROUPS channels of one token of one layer, as pairs [GROUPS, 32] in float32."""
    group = first_group + tl.arange(0, GROUPS)
    pair = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = pair < H // 2
    if CODEC == "raw":
        low, high = _split_words(tl.load(value_ptr + row * (H // 2) + pair, mask=mask, other=0))
    else:
        if CODEC == "int8":
            word = tl.load(value_ptr + row * (H // 2) + pair, mask=mask, other=0).to(tl.int32)
            low, high = ((word << 24) >> 24).to(tl.float32), (word >> 8).to(tl.float32)
            scale = tl.load(scale_ptr + row).to(tl.float32)
        elif CODEC == "int4":
            word = tl.load(value_ptr + row * (H // 2) + pair, mask=mask, other=0).to(tl.int32)
            low, high = ((word & 15) - 8).to(tl.float32), ((word >> 4) - 8).to(tl.float32)
            scales = scale_ptr + row * (H // 64) + group
            scale = tl.load(scales, mask=group < H // 64, other=0.0).to(tl.float32)[:, None]
        else:
            codes = value_ptr + row * (H // 64 * 24)
            low, high = _rotated_levels(codes, codebook_ptr, group, H // 64, GROUPS)
            scale = tl.load(scale_ptr + row).to(tl.float32)
        low = mean_low + gain_low * (scale * low)
        high = mean_high + gain_high * (scale * high)
        if EXACT:
            slot = tl.load(slot_ptr + row)
            if slot >= 0:
                exact = exact_ptr + tl.cast(slot, tl.int64) * (H // 2)
                low, high = _split_words(tl.load(exact + pair, mask=mask, other=0))
    return low, high


@triton.jit
def _store_pairs(out_ptr, offset, pair, low, high, mask, PACKED: tl.constexpr):
    """Store pairs of channels; PACKED: as 32-bit words of two bfloat16, whose pointer is given."""
    if PACKED:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1
        )
        tl.store(out_ptr + offset // 2 + pair, word, mask=mask)
    else:
        out = out_ptr + offset + 2 * pair
        tl.store(out, low.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + 1, high.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_dequant_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, row_ptr, out_ptr,
    num_rows, num_tokens,
    K: tl.constexpr, H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr,
    INDEXED: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out[r, layer H + h] = decoded states[layer, rows[r], h]; means and gains stay in registers.

    Grid (row tiles, K * channel tiles).
    """
    TILES: tl.constexpr = (H + GROUPS * 64 - 1) // (GROUPS * 64)
    layer = tl.program_id(1) // TILES
    first_group = tl.program_id(1) % TILES * GROUPS
    pair = (first_group + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = pair < H // 2
    mean_low, mean_high, gain_low, gain_high = 0.0, 0.0, 0.0, 0.0
    if CODEC != "raw":
        mean_low, mean_high = _channel_pairs(mean_ptr + layer * H, pair, mask)
        gain_low, gain_high = _channel_pairs(gain_ptr + layer * H, pair, mask)
    start = tl.program_id(0) * ROWS
    for i in range(start, tl.minimum(start + ROWS, num_rows)):
        out_row = tl.cast(i, tl.int64)
        token = out_row
        if INDEXED:
            token = tl.load(row_ptr + i).to(tl.int64)
        row = tl.cast(layer, tl.int64) * num_tokens + token
        offset = out_row * (K * H) + layer * H
        if CODEC == "raw" and PACKED:
            word = tl.load(value_ptr + row * (H // 2) + pair, mask=mask, other=0)
            tl.store(out_ptr + offset // 2 + pair, word, mask=mask)
        else:
            low, high = _decode_row(
                value_ptr, scale_ptr, codebook_ptr, slot_ptr, exact_ptr, row, first_group,
                mean_low, mean_high, gain_low, gain_high, H, CODEC, EXACT, GROUPS,
            )  # fmt: skip
            _store_pairs(out_ptr, offset, pair, low, high, mask, PACKED)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_norm_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, row_ptr, out_ptr,
    num_rows, num_tokens, w_ptr, stride_w, eps,
    K: tl.constexpr, H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr,
    INDEXED: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """As above, each layer's state divided by its rms and multiplied by w. Grid (rows, K).

    A row is decoded twice, the second time from the cache.
    """
    out_row = tl.cast(tl.program_id(0), tl.int64)
    layer = tl.program_id(1)
    token = out_row
    if INDEXED:
        token = tl.load(row_ptr + out_row).to(tl.int64)
    square = 0.0
    rstd = 0.0
    for step in tl.static_range(2):
        if step == 1:
            rstd = tl.rsqrt(square / H + eps)
        for first_group in range(0, (H + 63) // 64, GROUPS):
            pair = (first_group + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = pair < H // 2
            mean_low, mean_high, gain_low, gain_high = 0.0, 0.0, 0.0, 0.0
            if CODEC != "raw":
                mean_low, mean_high = _channel_pairs(mean_ptr + layer * H, pair, mask)
                gain_low, gain_high = _channel_pairs(gain_ptr + layer * H, pair, mask)
            low, high = _decode_row(
                value_ptr, scale_ptr, codebook_ptr, slot_ptr, exact_ptr,
                tl.cast(layer, tl.int64) * num_tokens + token, first_group,
                mean_low, mean_high, gain_low, gain_high, H, CODEC, EXACT, GROUPS,
            )  # fmt: skip
            if step == 0:
                square += tl.sum(tl.where(mask, low * low + high * high, 0.0))
            else:
                w_low, w_high = _channel_pairs(w_ptr + layer * stride_w, pair, mask)
                low, high = low * rstd * w_low, high * rstd * w_high
                offset = out_row * (K * H) + layer * H
                _store_pairs(out_ptr, offset, pair, low, high, mask, PACKED)


def _words(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """View a row's channels two at a time."""
    return None if x is None else x.view(dtype)


def _launch(states: CodedStates, rows, norm_weight, eps: float, dtype: torch.dtype) -> Tensor:
    num_rows = states.num_tokens if rows is None else rows.shape[0]
    layers, hidden = states.num_layers, states.hidden
    out = torch.empty(num_rows, layers * hidden, dtype=dtype, device=states.values.device)
    if not num_rows:
        return out
    pair_dtype = {"raw": torch.int32, "int8": torch.int16}.get(states.codec, torch.uint8)
    packed = dtype == torch.bfloat16
    arguments = (
        _words(states.values, pair_dtype),
        states.scales,
        states.mean,
        states.gain,
        states.codebook,
        states.exact_slot,
        _words(states.exact, torch.int32),
        rows,
        out.view(torch.int32) if packed else out,
        num_rows,
        states.num_tokens,
    )
    groups = min(GROUPS, 1 << (-(-hidden // GROUP) - 1).bit_length())
    if states.codec == "int3":
        # The matrix units take no fewer rows.
        groups = 16
    constants = {
        "K": layers,
        "H": hidden,
        "CODEC": states.codec,
        "EXACT": states.exact is not None and states.exact.shape[0] > 0,
        "INDEXED": rows is not None,
        "PACKED": packed,
        "GROUPS": groups,
        "num_warps": WARPS,
        # The format rounds products before sums; `quantize.decode_states` gives the same bits.
        "enable_fp_fusion": False,
    }
    if norm_weight is None:
        grid = (-(-num_rows // ROWS), layers * -(-hidden // (groups * GROUP)))
        _gather_dequant_kernel[grid](*arguments, ROWS=ROWS, **constants)
    else:
        stride_w = norm_weight.stride(0) if norm_weight.dim() == 2 else 0
        _gather_norm_kernel[(num_rows, layers)](*arguments, norm_weight, stride_w, eps, **constants)
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
    if states.hidden % 2:
        raise ValueError(f"states are {states.hidden} wide, kernels take an even width")
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
