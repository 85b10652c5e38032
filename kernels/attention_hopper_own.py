"""What the dQ kernel for Hopper does with a group's own blocks and outputs, before the context.

Own blocks are seen by the group's rows alone, so that dK and dV of own blocks are complete here.

Letters: R = Hq / Hkv, B block size, D head dimension.
"""

from __future__ import annotations

from dflash_offline.kernels.attention_hopper import PART, _sees_own
from dflash_offline.kernels.optional_triton import gl, gluon, hopper


@gluon.jit
def _delta(part: gl.constexpr, stage, do_tile, tiles, D: gl.constexpr):
    """Sum out * do over each row; the first part's outputs are where keys go, else values."""
    SUM: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k_smem, v_smem = tiles
    out_smem = k_smem.index(stage) if part == 0 else v_smem.index(stage)
    out = out_smem._reinterpret(out_smem.dtype, [PART, D], out_smem.layout).load(SUM)
    return gl.sum(out.to(gl.float32) * do_tile.load(SUM).to(gl.float32), 1)


@gluon.jit
def _own_gradients(
    s, dp, lse, delta, part: gl.constexpr, count, scale_log2, R: gl.constexpr, B: gl.constexpr,
    SLOTS: gl.constexpr, WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_C: gl.constexpr,
    LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Return p and ds of own blocks, zero where nothing is seen."""
    # A group of the dQ kernel fits a tile, so it is not cut into chunks.
    mask = _sees_own(part, 0, count, R, B, SLOTS, WINDOW, CAUSAL, BLOCK_C, LAYOUT)
    lse = gl.convert_layout(lse, gl.SliceLayout(1, LAYOUT))
    delta = gl.convert_layout(delta, gl.SliceLayout(1, LAYOUT))
    p = gl.where(mask, gl.exp2(s * scale_log2 - lse[:, None]), 0.0)
    ds = gl.where(mask, p * (dp - delta[:, None]), 0.0)
    return p.to(dtype), ds.to(dtype)


@gluon.jit
def _own_sums(
    part: gl.constexpr, p, ds, rows, own, shared, parity, D: gl.constexpr, BLOCK_C: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Begin dV, transposed, of the group's own blocks if this is the first part, else their dK.

    Each is a sum over rows of both parts, which hand each other their p and ds.
    """
    q_smem, do_smem = rows
    p_smem, ds_smem = own
    p_smem.index(part).store(p)
    ds_smem.index(part).store(ds)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(shared, count=1)
    hopper.mbarrier.wait(shared, parity)
    a_smem, b_smem = (do_smem, p_smem) if part == 0 else (q_smem, ds_smem)
    total = hopper.warpgroup_mma(
        a_smem.index(0).reshape([PART, D]).permute((1, 0)), b_smem.index(0),
        gl.zeros([D, BLOCK_C], gl.float32, LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    return hopper.warpgroup_mma(
        a_smem.index(1).reshape([PART, D]).permute((1, 0)), b_smem.index(1), total, is_async=True
    )


@gluon.jit
def _store_own(
    pointer, x, first, count, head, HKV: gl.constexpr, B: gl.constexpr, D: gl.constexpr,
    BLOCK_C: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a gradient [D, BLOCK_C] of the group's own keys or values."""
    col = gl.arange(0, D, layout=gl.SliceLayout(1, LAYOUT))
    slot = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, LAYOUT))
    at = (first.to(gl.int64) * B + slot) * (HKV * D) + head * D
    mask = (slot < count * B)[None, :] & (col < D)[:, None]
    gl.store(pointer + at[None, :] + col[:, None], x, mask=mask)
