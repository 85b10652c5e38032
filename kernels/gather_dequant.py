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
from dflash_offline.kernels.gather_int4 import gather_int4_kernel
from dflash_offline.kernels.optional_triton import is_interpreted, tl, triton, use_triton

__all__ = ["CodedStates", "gather_dequant", "gather_linear", "warm_up"]

# Rows that a program takes one after the other, groups of 64 channels, warps: 8 channels a thread.
# 16-byte stores of 4 words, and loads of the same 4 pairs, so nothing moves between threads.
ROWS, GROUPS, WARPS = 16, 16, 4
# The rotation makes the threads of a program wait for each other: 1.89 ms with one warp, 2.26 with
# two, 2.86 with four (H200, 16,384 tokens of 25,600). A whole row for a norm takes 6.73 ms with one
# and 2.82 with four.
INT3_WARPS, INT3_NORM_WARPS = 1, 4


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
    eight = tl.arange(0, 8)
    mask = (group < num_groups)[:, None]
    code = tl.zeros([GROUPS, 8, 8], tl.int32)
    for plane in tl.static_range(3):
        byte = group[:, None] * 24 + eight[None, :] + 8 * plane
        packed = tl.load(ptr + byte, mask=mask, other=0).to(tl.int32)
        code += ((packed[:, :, None] >> eight[None, None, :]) & 1) << plane
    level = tl.load(codebook_ptr + tl.reshape(code, [GROUPS, 64]))
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
def _load_row(
    value_ptr, scale_ptr, slot_ptr, row_ptr, i, base, group, pair, mask,
    H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Load what row i of the result is made from: its place, words of codes, scale, exact slot."""
    row = base + i
    if INDEXED:
        row = base + tl.load(row_ptr + i).to(tl.int64)
    word = 0
    scale = 0.0
    slot = -1
    if CODEC != "int3":
        word = tl.load(value_ptr + row * (H // 2) + pair, mask=mask, other=0).to(tl.int32)
    if CODEC == "int4":
        scales = scale_ptr + row * (H // 64) + group
        scale = tl.load(scales, mask=group < H // 64, other=0.0).to(tl.float32)[:, None]
    elif CODEC != "raw":
        scale = tl.load(scale_ptr + row).to(tl.float32)
    if EXACT:
        slot = tl.load(slot_ptr + row)
    return row, word, scale, slot


@triton.jit
def _decode_row(
    value_ptr, codebook_ptr, exact_ptr, row, word, scale, slot, group, pair, mask,
    mean_low, mean_high, gain_low, gain_high,
    H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Decode 64 * GROUPS channels of one token of one layer, as pairs [GROUPS, 32] in float32."""
    if CODEC == "raw":
        low, high = _split_words(word)
    else:
        if CODEC == "int8":
            low, high = ((word << 24) >> 24).to(tl.float32), (word >> 8).to(tl.float32)
        elif CODEC == "int4":
            low, high = ((word & 15) - 8).to(tl.float32), ((word >> 4) - 8).to(tl.float32)
        else:
            codes = value_ptr + row * (H // 64 * 24)
            low, high = _rotated_levels(codes, codebook_ptr, group, H // 64, GROUPS)
        low = mean_low + gain_low * (scale * low)
        high = mean_high + gain_high * (scale * high)
        # The outer condition is decided at compile time.
        if EXACT:  # noqa: SIM102
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


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "stride_w"])
def _gather_dequant_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, codebook_ptr, slot_ptr, exact_ptr, row_ptr, w_ptr,
    out_ptr, num_rows, num_tokens, stride_w, eps,
    K: tl.constexpr, H: tl.constexpr, CODEC: tl.constexpr, EXACT: tl.constexpr,
    INDEXED: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """out[r, layer H + h] = decoded states[layer, rows[r], h], over its rms and times w if NORM.

    Grid (row tiles, K * channel tiles); with NORM a tile is a whole row of a layer. Means, gains
    and w stay in registers; the next row's codes are on their way while one is decoded.
    """
    TILES: tl.constexpr = (H + GROUPS * 64 - 1) // (GROUPS * 64)
    layer = tl.program_id(1) // TILES
    group = tl.program_id(1) % TILES * GROUPS + tl.arange(0, GROUPS)
    pair = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = pair < H // 2
    mean_low, mean_high, gain_low, gain_high, w_low, w_high = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if CODEC != "raw":
        mean_low, mean_high = _channel_pairs(mean_ptr + layer * H, pair, mask)
        gain_low, gain_high = _channel_pairs(gain_ptr + layer * H, pair, mask)
    if NORM:
        w_low, w_high = _channel_pairs(w_ptr + layer * stride_w, pair, mask)
    base = tl.cast(layer, tl.int64) * num_tokens
    start = tl.program_id(0) * ROWS
    end = tl.minimum(start + ROWS, num_rows)
    row, word, scale, slot = _load_row(
        value_ptr, scale_ptr, slot_ptr, row_ptr, start, base, group, pair, mask,
        H, CODEC, EXACT, INDEXED,
    )  # fmt: skip
    for i in range(start, end):
        next_row, next_word, next_scale, next_slot = _load_row(
            value_ptr, scale_ptr, slot_ptr, row_ptr, tl.minimum(i + 1, end - 1), base, group, pair,
            mask, H, CODEC, EXACT, INDEXED,
        )  # fmt: skip
        offset = tl.cast(i, tl.int64) * (K * H) + layer * H
        if CODEC == "raw" and PACKED and not NORM:
            tl.store(out_ptr + offset // 2 + pair, word, mask=mask)
        else:
            low, high = _decode_row(
                value_ptr, codebook_ptr, exact_ptr, row, word, scale, slot, group, pair, mask,
                mean_low, mean_high, gain_low, gain_high, H, CODEC, EXACT, GROUPS,
            )  # fmt: skip
            if NORM:
                square = tl.sum(tl.where(mask, low * low + high * high, 0.0))
                rstd = tl.rsqrt(square / H + eps)
                low, high = low * rstd * w_low, high * rstd * w_high
            _store_pairs(out_ptr, offset, pair, low, high, mask, PACKED)
        row, word, scale, slot = next_row, next_word, next_scale, next_slot


def _tile(codec: str, hidden: int, *, norm: bool) -> tuple[int, int]:
    """Return groups of channels in a tile, and warps."""
    whole = 1 << (-(-hidden // GROUP) - 1).bit_length()
    if norm:
        groups = whole
        warps = min(max(groups // 16, 1), 16)
    else:
        groups, warps = min(GROUPS, whole), WARPS
    # The matrix units take no fewer than 16 rows.
    if codec == "int3":
        return max(groups, 16), INT3_NORM_WARPS if norm else INT3_WARPS
    return groups, warps


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
    norm = norm_weight is not None
    groups, warps = _tile(states.codec, hidden, norm=norm)
    grid = (-(-num_rows // ROWS), layers * -(-hidden // (groups * GROUP)))
    has_exact = states.exact is not None and states.exact.shape[0] > 0
    if states.codec == "int4" and packed and not norm and not is_interpreted():
        _launch_int4(states, rows, out, grid, groups=groups, warps=warps, has_exact=has_exact)
        return out
    _gather_dequant_kernel[grid](
        _words(states.values, pair_dtype),
        states.scales,
        states.mean,
        states.gain,
        states.codebook,
        states.exact_slot,
        _words(states.exact, torch.int32),
        rows,
        norm_weight,
        out.view(torch.int32) if packed else out,
        num_rows,
        states.num_tokens,
        norm_weight.stride(0) if norm and norm_weight.dim() == 2 else 0,
        eps,
        K=layers,
        H=hidden,
        CODEC=states.codec,
        EXACT=has_exact,
        INDEXED=rows is not None,
        NORM=norm,
        PACKED=packed,
        ROWS=ROWS,
        GROUPS=groups,
        num_warps=warps,
        # The format rounds products before sums; `quantize.decode_states` gives the same bits.
        enable_fp_fusion=False,
    )
    return out


def _launch_int4(
    states: CodedStates, rows, out: Tensor, grid, *, groups: int, warps: int, has_exact: bool
) -> None:
    gather_int4_kernel[grid](
        _words(states.values, torch.int32),
        states.scales,
        states.mean,
        states.gain,
        states.exact_slot,
        _words(states.exact, torch.int32),
        rows,
        out.view(torch.int32),
        out.shape[0],
        states.num_tokens,
        K=states.num_layers,
        H=states.hidden,
        EXACT=has_exact,
        INDEXED=rows is not None,
        ROWS=ROWS,
        GROUPS=groups,
        num_warps=warps,
    )


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
    for name, each in vars(states).items():
        if torch.is_tensor(each) and not each.is_contiguous():
            raise ValueError(f"states.{name} must be contiguous: call .contiguous() on it once")
    if states.hidden % 2:
        raise ValueError(f"states are {states.hidden} wide, kernels take an even width")
    rows = None if rows is None else rows.contiguous()
    if norm_weight is not None and norm_weight.stride(-1) != 1:
        norm_weight = norm_weight.contiguous()
    with torch.cuda.device_of(states.values):
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
