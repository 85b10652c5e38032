"""Every operation of `kernels` in plain PyTorch: what kernels are tested against, and the CPU path.

All of it is differentiable by autograd. float64 inputs are computed in float64, every other dtype
in float32 with one rounding at the end. Formulas: docs/kernels.md. The loss operations have their
twins in `reference_loss`.

Letters: T context tokens, A anchors, B block size, N = A * B rows, Hq query heads, Hkv key-value
heads, R = Hq / Hkv, D head dimension, K captured layers, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.common.codecs import GROUP
from dflash_offline.kernels.coded_states import (
    CodedStates,
    as_bfloat16,
    hadamard,
    unpack_codes,
)

# Scores held at a time by one softmax of block_attention, in elements (128 MiB in float32).
MAX_SCORES = 1 << 25


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a reference computes in: float64 stays, everything else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    tables,
    *,
    window: int | None = None,
    causal: bool = False,
    scale: float,
) -> Tensor:
    """Attend from every block to the context before its anchor and to itself.

    Same as `block_attention.block_attention`, whose docstring has the semantics. Anchors of one
    document share one matrix of context scores; the scores of the own block are put beside them
    before one softmax. Keys and values are never repeated for the query heads.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_ctx.shape[1]
    block = tables.block_size
    dtype = compute_dtype(q)
    # [Hkv, R, A, B, D] for queries, [Hkv, T, D] for the context, [Hkv, A, B, D] for own blocks.
    queries = (q.to(dtype) * scale).view(
        -1, block, num_kv_heads, num_q_heads // num_kv_heads, head_dim
    )
    queries = queries.permute(2, 3, 0, 1, 4)
    keys, values = (x.to(dtype).transpose(0, 1) for x in (k_ctx, v_ctx))
    own = (x.to(dtype).view(-1, block, num_kv_heads, head_dim) for x in (k_own, v_own))
    own_keys, own_values = (x.permute(2, 0, 1, 3) for x in own)

    outputs = []
    for first, last, start, stop in _anchor_runs(tables, num_q_heads, window):
        lo = tables.host_lo[first:last].to(q.device)
        hi = tables.host_hi[first:last].to(q.device)
        outputs.append(
            _attend(
                queries[:, :, first:last],
                keys[:, start:stop],
                values[:, start:stop],
                own_keys[:, first:last],
                own_values[:, first:last],
                context_mask(lo, hi, block, start=start, stop=stop, window=window),
                own_mask(block, window=window, causal=causal, device=q.device),
            )
        )
    if not outputs:
        return q + 0.0
    out = torch.cat(outputs, dim=2)  # [Hkv, R, A, B, D]
    return out.permute(2, 3, 0, 1, 4).reshape(num_rows, num_q_heads, head_dim).to(q.dtype)


def context_mask(
    lo: Tensor, hi: Tensor, block_size: int, *, start: int, stop: int, window: int | None
) -> Tensor:
    """Say which context tokens in [start, stop) each row of the anchors sees: bool [A, B, t]."""
    tokens = torch.arange(start, stop, device=lo.device)
    lo, hi = lo.long()[:, None, None], hi.long()[:, None, None]
    mask = (tokens >= lo) & (tokens < hi)
    if window is None:
        return mask.expand(-1, block_size, -1)
    positions = hi + torch.arange(block_size, device=lo.device)[None, :, None]
    return mask & (positions - tokens < window)


def own_mask(block_size: int, *, window: int | None, causal: bool, device=None) -> Tensor:
    """Say which slots of its own block each slot sees: bool [B, B]."""
    slots = torch.arange(block_size, device=device)
    distance = slots[:, None] - slots[None, :]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance < window)
    return mask


def _anchor_runs(tables, num_q_heads: int, window: int | None):
    """Yield (first anchor, last anchor, context start, context stop), bounded in scores."""
    lo, hi = tables.host_lo.tolist(), tables.host_hi.tolist()
    first = 0
    while first < len(lo):
        start = lo[first] if window is None else max(lo[first], hi[first] - window + 1)
        last = first + 1
        while last < len(lo) and lo[last] == lo[first]:
            rows = (last + 1 - first) * tables.block_size * num_q_heads
            if rows * (hi[last] - start) > MAX_SCORES:
                break
            last += 1
        yield first, last, start, hi[last - 1]
        first = last


def _attend(queries, keys, values, own_keys, own_values, mask_ctx, mask_own) -> Tensor:
    """Attend for anchors of one document: queries [Hkv, R, A, B, D] -> the same shape."""
    kv_heads, ratio, anchors, block, head_dim = queries.shape
    flat = queries.reshape(kv_heads, ratio * anchors * block, head_dim)
    ctx = (flat @ keys.transpose(1, 2)).view(kv_heads, ratio, anchors, block, -1)
    own = torch.einsum("hrabd,hacd->hrabc", queries, own_keys)
    minus_inf = float("-inf")
    scores = torch.cat(
        [ctx.masked_fill(~mask_ctx, minus_inf), own.masked_fill(~mask_own, minus_inf)], dim=-1
    )
    weights = scores.softmax(-1)
    weights_ctx, weights_own = weights.split([keys.shape[1], block], dim=-1)
    out = weights_ctx.reshape(kv_heads, ratio * anchors * block, -1) @ values
    return out.view_as(queries) + torch.einsum("hrabc,hacd->hrabd", weights_own, own_values)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the root mean square over the last axis and multiply by `weight` [..., H]."""
    wide = x.to(compute_dtype(x))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded to the dtype of `x`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the rotary frequencies, float32 [D / 2]: theta ** (-2 i / D)."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    return 1.0 / (theta**exponents)


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale * cosines, then sines, of the positions' angles, float32 [N, D].

    Args:
        positions: integer [N]
        frequencies: float32 [D / 2], `inverse_frequencies` or scaled ones.
        scale: of cosines and sines; YaRN has one.
    """
    angles = positions.float()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    return table if scale == 1.0 else table.mul_(scale)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the two halves of every head by its row's angles (Qwen3's rotate-half form).

    Args:
        x: [N, heads, D]
        table: `rotary_table` of the rows' positions, float32 [N, D] for every dtype of x.
    """
    dtype = compute_dtype(x)
    cos, sin = table[:, None].to(dtype).chunk(2, dim=-1)
    left, right = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def norm_rope(x: Tensor, weight: Tensor, table: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return rope(rms_norm(x, weight), table) of [N, heads, D], rounded once."""
    wide = x.to(compute_dtype(x))
    return rope(rms_norm(wide, weight, eps), table).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    wide = gate.to(compute_dtype(gate))
    return (torch.nn.functional.silu(wide) * up.to(wide.dtype)).to(gate.dtype)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return swiglu(gate, up) @ weight.T."""
    return torch.nn.functional.linear(swiglu(gate, up), weight)


def gather_dequant(
    states: CodedStates,
    rows: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Turn layer-major states into token-major rows [R, K * H].

    Same as `gather_dequant.gather_dequant`; `coded_states` has the formulas.
    """
    values = as_bfloat16(states.values)
    if rows is not None:
        values = values[:, rows.long()]
    x = values if states.codec == "raw" else _decode(states, values, rows)
    if norm_weight is not None:
        x = rms_norm(x.to(compute_dtype(x)), norm_weight.expand(x.shape[0], -1)[:, None], eps)
    return x.transpose(0, 1).flatten(1).to(dtype)


def _decode(states: CodedStates, codes: Tensor, rows: Tensor | None) -> Tensor:
    """Decode codes [K, R, bytes] to float32 [K, R, H]."""
    scales = states.scales if rows is None else states.scales[:, rows.long()]
    y = unpack_codes(states, codes)
    if states.codec == "int3":
        y = (y.unflatten(-1, (-1, GROUP)) @ hadamard(device=y.device)).flatten(-2)
    groups = scales.shape[-1]
    y = y.unflatten(-1, (groups, states.hidden // groups)) * scales[..., None].float()
    x = states.mean[:, None] + states.gain[:, None] * y.flatten(-2)
    if states.exact_slot is None:
        return x
    slot = states.exact_slot if rows is None else states.exact_slot[:, rows.long()]
    exact = as_bfloat16(states.exact)
    if exact.shape[0] == 0:
        return x
    return torch.where((slot >= 0)[..., None], exact[slot.clamp(min=0).long()].float(), x)
