"""The kernel of `block_attention` for dK, dV of the context on Hopper: a warp for copies, two
groups of four for products.

Same arithmetic as `attention_kernels._block_attention_bwd_kv_kernel`. A program has 128 tokens, 64
for each group of warps. Both groups use the same rows, which are so read half as often as by
programs of 64 tokens.

Letters: T context tokens, N rows, Hq and Hkv heads, R = Hq / Hkv, B block size, D head dimension.
"""

from __future__ import annotations

import math

from torch import Tensor

from dflash_offline.kernels import attention_hopper
from dflash_offline.kernels.attention_hopper import PART, _source
from dflash_offline.kernels.attention_tables import BlockTables
from dflash_offline.kernels.optional_triton import gl, gluon, hopper


@gluon.jit
def _range(
    tile_ptr, hi_ptr, B: gl.constexpr, SLOTS: gl.constexpr, WINDOW: gl.constexpr,
    LINE: gl.constexpr,
):  # fmt: skip
    """Return the tile's tokens, its slots [begin, stop), between which of them all see all of it,
    and how many tiles of rows they take; where there are none, one whose rows are all masked."""
    at = tile_ptr + 5 * gl.program_id(0)
    start = gl.load(at)
    end = gl.load(at + 1)
    first = gl.load(at + 2)
    last = gl.load(at + 3)
    whole = gl.load(at + 4) * B
    stop = last * B
    ragged = stop
    if WINDOW > 0:
        line = gl.arange(0, 256, layout=LINE)
        num_any = 0
        num_all = 0
        for anchor in range(first, last, 256):
            inside = anchor + line < last
            hi = gl.load(hi_ptr + anchor + line, mask=inside, other=0)
            num_any += gl.sum((inside & (hi - WINDOW < end - 1)).to(gl.int32), 0)
            num_all += gl.sum((inside & (hi + B - 1 - WINDOW < start)).to(gl.int32), 0)
        stop = (first + num_any) * B
        ragged = (first + num_all) * B
    begin = first * B
    num_tiles = gl.maximum((stop - begin + SLOTS - 1) // SLOTS, 1)
    return start, end, begin, stop, whole, ragged, num_tiles


@gluon.jit
def _copy(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, hi_ptr, tile_ptr, smem, stats, kv_full,
    bars, num_rows, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load keys and values, then tiles of queries and upstream gradients as there is room."""
    SLOTS: gl.constexpr = PART // R
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    k_smem, v_smem, q_smem, do_smem = smem
    lse_smem, delta_smem, hi_smem = stats
    full, stats_full, free = bars
    head = gl.program_id(1)
    start, _, begin, stop, _, _, num_tiles = _range(
        tile_ptr, hi_ptr, B, SLOTS, WINDOW, gl.BlockedLayout([8], [32], [1], [0])
    )
    hopper.mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
    for part in gl.static_range(2):
        from_ = [start + part * PART, head * D]
        hopper.tma.async_copy_global_to_shared(k_desc, from_, kv_full, k_smem.index(part))
        hopper.tma.async_copy_global_to_shared(v_desc, from_, kv_full, v_smem.index(part))
    line = gl.arange(0, PART, layout=LINE)
    for i in range(num_tiles):
        stage = i % STAGES
        slot = begin + i * SLOTS
        # What lies behind the last row is finite so, and masked.
        valid = line < (stop - slot) * R
        at = (head.to(gl.int64) * num_rows + slot) * R + line
        lse = gl.load(lse_ptr + at, mask=valid, other=0.0)
        delta = gl.load(delta_ptr + at, mask=valid, other=0.0)
        hi = gl.load(hi_ptr + (slot + line // R) // B, mask=valid, other=0)
        hopper.mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes)
        bar = full.index(stage)
        hopper.tma.async_copy_global_to_shared(
            q_desc, [slot, head * R, 0], bar, q_smem.index(stage)
        )
        hopper.tma.async_copy_global_to_shared(
            do_desc, [slot, head * R, 0], bar, do_smem.index(stage)
        )
        lse_smem.index(stage).store(lse)
        delta_smem.index(stage).store(delta)
        hi_smem.index(stage).store(hi)
        hopper.mbarrier.arrive(stats_full.index(stage), count=1)


@gluon.jit
def _probabilities(
    s, stage, slot, token, masked, stats, scale_log2, R: gl.constexpr, B: gl.constexpr,
    WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Mask a tile of rows of which not all see all tokens, and return its probabilities."""
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    lse_smem, _, hi_smem = stats
    if masked:
        hi = hi_smem.index(stage).load(ROW)
        visible = token[:, None] < hi[None, :]
        if WINDOW > 0:
            slot_n = slot + gl.arange(0, PART, layout=ROW) // R
            visible = visible & (token[:, None] > (hi + slot_n % B - WINDOW)[None, :])
        s = gl.where(visible, s, float("-inf"))
    lse = lse_smem.index(stage).load(ROW)
    return gl.exp2(s * scale_log2 - lse[None, :])


@gluon.jit
def _store(pointer, x, token, end, head, HKV: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    col = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    at = token.to(gl.int64) * (HKV * D) + head * D
    mask = (token < end)[:, None] & (col < D)[None, :]
    gl.store(pointer + at[:, None] + col[None, :], x, mask=mask)


@gluon.jit
def _sum(
    part: gl.constexpr, dk_ptr, dv_ptr, hi_ptr, tile_ptr, smem, stats, kv_full, bars, turns,
    scale_log2, scale, HKV: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take dK and dV of 64 tokens over all rows that see them."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    SLOTS: gl.constexpr = PART // R
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    k_smem, v_smem, q_smem, do_smem = smem
    _, delta_smem, _ = stats
    full, stats_full, free = bars
    head = gl.program_id(1)
    start, end, begin, _, whole, ragged, num_tiles = _range(
        tile_ptr, hi_ptr, B, SLOTS, WINDOW, gl.BlockedLayout([2], [32], [4], [0])
    )
    start = start + part * PART
    token = start + gl.arange(0, PART, layout=gl.SliceLayout(1, S))
    zeros = gl.zeros([PART, PART], gl.float32, S)
    k = k_smem.index(part)
    v = v_smem.index(part)
    dk = gl.zeros([PART, D], gl.float32, ACC)
    dv = gl.zeros([PART, D], gl.float32, ACC)

    hopper.mbarrier.wait(kv_full, 0)
    hopper.mbarrier.wait(full.index(0), 0)
    next_s = hopper.warpgroup_mma(
        k, q_smem.index(0).reshape([PART, D]).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    next_dp = hopper.warpgroup_mma(
        v, do_smem.index(0).reshape([PART, D]).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    hopper.mbarrier.wait(stats_full.index(0), 0)
    s = hopper.warpgroup_mma_wait(1, deps=[next_s])
    masked = (begin < whole) | (begin + SLOTS > ragged)
    p = _probabilities(s, 0, begin, token, masked, stats, scale_log2, R, B, WINDOW, S)
    next_dv = hopper.warpgroup_mma(
        gl.convert_layout(p.to(dtype), P), do_smem.index(0).reshape([PART, D]), dv, is_async=True
    )
    dp = hopper.warpgroup_mma_wait(1, deps=[next_dp])
    delta = delta_smem.index(0).load(ROW)
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), P)
    dv = hopper.warpgroup_mma_wait(0, deps=[next_dv])
    for i in range(1, num_tiles):
        before = (i - 1) % STAGES
        stage = i % STAGES
        parity = i // STAGES & 1
        q = q_smem.index(stage).reshape([PART, D])
        do = do_smem.index(stage).reshape([PART, D])
        # In turns, so that one group has products under way while the other is at its softmax.
        hopper.mbarrier.wait(turns.index(part), ((i - 1) & 1) ^ (1 - part))
        next_dk = hopper.warpgroup_mma(
            ds, q_smem.index(before).reshape([PART, D]), dk, is_async=True
        )
        hopper.mbarrier.wait(full.index(stage), parity)
        next_s = hopper.warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        next_dp = hopper.warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        hopper.mbarrier.arrive(turns.index(1 - part), count=1)
        hopper.mbarrier.wait(stats_full.index(stage), parity)
        dk, s = hopper.warpgroup_mma_wait(1, deps=[next_dk, next_s])
        hopper.mbarrier.arrive(free.index(before), count=1)
        slot = begin + i * SLOTS
        masked = (slot < whole) | (slot + SLOTS > ragged)
        p = _probabilities(s, stage, slot, token, masked, stats, scale_log2, R, B, WINDOW, S)
        next_dv = hopper.warpgroup_mma(gl.convert_layout(p.to(dtype), P), do, dv, is_async=True)
        dp = hopper.warpgroup_mma_wait(1, deps=[next_dp])
        delta = delta_smem.index(stage).load(ROW)
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), P)
        dv = hopper.warpgroup_mma_wait(0, deps=[next_dv])
    last = (num_tiles - 1) % STAGES
    dk = hopper.warpgroup_mma(ds, q_smem.index(last).reshape([PART, D]), dk)

    token_b = start + gl.arange(0, PART, layout=gl.SliceLayout(1, STORE))
    x = gl.convert_layout(dv.to(dtype), STORE)
    _store(dv_ptr, x, token_b, end, head, HKV, D, STORE)
    x = gl.convert_layout((dk * scale).to(dtype), STORE)
    _store(dk_ptr, x, token_b, end, head, HKV, D, STORE)


@gluon.jit(do_not_specialize=["num_rows"])
def block_attention_bwd_kv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_ptr, dv_ptr, lse_ptr, delta_ptr, hi_ptr, tile_ptr,
    scale_log2, scale, num_rows,
    HKV: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dk_ctx = scale ds^T q and dv_ctx = p^T do of one tile of tokens, over all rows that see it.

    Grid (tiles, HKV). Tiles that no anchor sees store zeros, so the outputs need no clearing.
    """
    dtype: gl.constexpr = dk_ptr.dtype.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    STATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_smem = gl.allocate_shared_memory(dtype, [2, PART, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, PART, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, PART // R, R, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, PART // R, R, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, PART], STATS)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, PART], STATS)
    hi_smem = gl.allocate_shared_memory(gl.int32, [STAGES, PART], STATS)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    stats_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    hopper.mbarrier.init(kv_full, count=1)
    for i in gl.static_range(2):
        hopper.mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(stats_full.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
    smem = (k_smem, v_smem, q_smem, do_smem)
    stats = (lse_smem, delta_smem, hi_smem)
    bars = (full, stats_full, free)
    gl.warp_specialize(
        [
            (_sum, (
                0, dk_ptr, dv_ptr, hi_ptr, tile_ptr, smem, stats, kv_full, bars, turns, scale_log2,
                scale, HKV, R, B, D, WINDOW, STAGES,
            )),
            (_sum, (
                1, dk_ptr, dv_ptr, hi_ptr, tile_ptr, smem, stats, kv_full, bars, turns, scale_log2,
                scale, HKV, R, B, D, WINDOW, STAGES,
            )),
            (_copy, (
                q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, hi_ptr, tile_ptr, smem, stats,
                kv_full, bars, num_rows, R, B, D, WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Tokens of a tile, tiles of rows on their way, registers a thread at the start; H200, D 128.
TOKENS, STAGES, REGISTERS = 128, 4, 168


def is_supported(q: Tensor, k_ctx: Tensor) -> bool:
    """Say whether the kernel takes these: what the forward takes, with blocks of any size."""
    return q.shape[0] > 0 and attention_hopper.is_supported(q, k_ctx, 0)


def backward_kv(
    inputs: tuple[Tensor, ...], tables: BlockTables, d_out: Tensor, lse: Tensor, delta: Tensor,
    dk: Tensor, dv: Tensor, *, window: int, scale: float,
) -> None:  # fmt: skip
    """Fill `dk` and `dv` [T, Hkv, D]."""
    q, k_ctx, v_ctx = inputs
    heads, dim = q.shape[1:]
    kv_heads = k_ctx.shape[1]
    ratio = heads // kv_heads
    tiles = tables.tiles(TOKENS)
    rows = [PART.value // ratio, ratio, dim]
    block_attention_bwd_kv_kernel[(tiles.shape[0], kv_heads)](
        _source(q, rows),
        _source(d_out, rows),
        _source(k_ctx, [PART.value, dim]),
        _source(v_ctx, [PART.value, dim]),
        dk,
        dv,
        lse,
        delta,
        tables.hi,
        tiles,
        scale * math.log2(math.e),
        scale,
        q.shape[0],
        HKV=kv_heads,
        R=ratio,
        B=tables.block_size,
        D=dim,
        WINDOW=window,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
    )
