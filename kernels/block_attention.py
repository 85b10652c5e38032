"""Attention of anchored blocks to the context before their anchor and to themselves.

Plain PyTorch twin: `reference.block_attention`. Tables: `attention_tables`. docs/kernels.md, "Block
attention", has the formulas, the tiling and what was measured.
"""

from __future__ import annotations

from torch import Tensor

from dflash_offline.kernels import reference
from dflash_offline.kernels.attention_tables import BlockTables, build_tables

__all__ = ["BlockTables", "block_attention", "build_tables"]


def block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    tables: BlockTables,
    *,
    window: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend from every block to the context before its anchor and to itself.

    Row (j, k), slot k of anchor j, stands at row j * B + k and at position hi[j] + k. It sees
    context token t iff lo[j] <= t < hi[j] and, with a window, hi[j] + k - t < window; and slot k'
    of its own block iff (k' <= k if causal) and, with a window, k - k' < window.

    Args:
        q: [N, Hq, D], N = A * B rows, anchor-major.
        k_ctx, v_ctx: [T, Hkv, D]; Hq is 1 to 16 times Hkv.
        k_own, v_own: [N, Hkv, D]
        tables: `build_tables(...)` on the device of `q`.
        window: tokens that a row reaches back, itself included; None for all.
        causal: whether a slot sees only the slots up to itself in its own block.
        scale: of the scores; D ** -0.5 by default.
        implementation: "reference" or "triton"; by default Triton on CUDA.

    Returns:
        [N, Hq, D] in the dtype of `q`; differentiable in q and all keys and values.
    """
    return reference.block_attention(
        q, k_ctx, v_ctx, k_own, v_own, tables, window=window, causal=causal, scale=scale
    )
