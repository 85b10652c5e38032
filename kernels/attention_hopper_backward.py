"""The dQ kernel of `block_attention` for Hopper, with dK and dV of own blocks: a warp for copies,
two groups of four for products.

Same arithmetic as `attention_kernels._block_attention_bwd_q_kernel`, in the form of the forward of
`attention_hopper`: a program walks many groups of anchors, and copies for the next are on their way
while one is finished. Everything that comes in tiles goes through one ring: a group's outputs (for
delta), its own blocks, then its context. Queries and upstream gradients stay in registers where
launched so, which halves what the products read from shared memory.

Letters: T context tokens, N rows, Hq and Hkv heads, R = Hq / Hkv, B block size, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_offline.kernels import attention_hopper
from dflash_offline.kernels.attention_hopper import PART, _item, _num_steps, _source
from dflash_offline.kernels.attention_hopper_own import (
    _delta,
    _own_gradients,
    _own_sums,
    _store_own,
)
from dflash_offline.kernels.attention_tables import BlockTables
from dflash_offline.kernels.optional_triton import gl, gluon, hopper


@gluon.jit
def _copy_tile(k_desc, v_desc, k_at, v_at, tile, tiles, bars, STAGES: gl.constexpr):
    """Load one pair of boxes to where the ring's next tiles begin, as soon as there is room."""
    k_smem, v_smem = tiles
    full, free = bars
    stage = tile % STAGES
    k_to = k_smem.index(stage)._reinterpret(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_to = v_smem.index(stage)._reinterpret(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    hopper.mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
    bar = full.index(stage)
    hopper.mbarrier.expect(bar, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(k_desc, k_at, bar, k_to)
    hopper.tma.async_copy_global_to_shared(v_desc, v_at, bar, v_to)
    return tile + 1


@gluon.jit
def _copy(
    q_desc, do_desc, out_desc, k_desc, v_desc, k_own_desc, v_own_desc, lists, rows, tiles, row_bars,
    bars, num_groups, num_items,
    R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load outputs, own keys and values, queries and upstream gradients, and the context."""
    lo_ptr, hi_ptr, group_ptr = lists
    q_smem, do_smem = rows
    rows_full, rows_free = row_bars
    HALF: gl.constexpr = PART // R
    tile = 0
    for step in range(_num_steps(num_items)):
        first, _, head, _, begin, _, _, end = _item(
            step, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, 1, WINDOW
        )
        slot = first * B
        q_at = [slot, head * R, 0]
        q_at_1 = [slot + HALF, head * R, 0]
        tile = _copy_tile(out_desc, out_desc, q_at, q_at_1, tile, tiles, bars, STAGES)
        at = [slot, head * D]
        tile = _copy_tile(k_own_desc, v_own_desc, at, at, tile, tiles, bars, STAGES)
        hopper.mbarrier.wait(rows_free, (step & 1) ^ 1)
        hopper.mbarrier.expect(rows_full, 4 * q_desc.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(q_desc, q_at, rows_full, q_smem.index(0))
        hopper.tma.async_copy_global_to_shared(do_desc, q_at, rows_full, do_smem.index(0))
        hopper.tma.async_copy_global_to_shared(q_desc, q_at_1, rows_full, q_smem.index(1))
        hopper.tma.async_copy_global_to_shared(do_desc, q_at_1, rows_full, do_smem.index(1))
        # An empty context has one tile, all of it masked.
        for start in range(begin, gl.maximum(end, begin + 1), BLOCK_N):
            at = [start, head * D]
            tile = _copy_tile(k_desc, v_desc, at, at, tile, tiles, bars, STAGES)


@gluon.jit
def _probabilities(
    s, lse, start, hi, floor, hi_min, inside, scale_log2, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Mask a context tile at a ragged end or a window's edge, and return its probabilities."""
    if (start + BLOCK_N > hi_min) | (start < inside):
        token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        visible = token[None, :] < hi[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > floor[:, None])
        s = gl.where(visible, s, float("-inf"))
    return gl.exp2(s * scale_log2 - lse[:, None])


@gluon.jit
def _attend(
    part: gl.constexpr, outs, per_row, lists, rows, tiles, own, shared, turns, row_bars, bars,
    num_groups, num_items, scale_log2, scale, num_rows,
    HQ: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Take dQ of 64 rows of every group of anchors that the program has, and a half of the rest."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROWS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    OWN_ROWS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OWN, k_width=2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    STORE_OWN: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    dq_ptr, dk_own_ptr, dv_own_ptr = outs
    lse_ptr, delta_ptr = per_row
    lo_ptr, hi_ptr, group_ptr = lists
    q_smem, do_smem = rows
    k_smem, v_smem = tiles
    rows_full, rows_free = row_bars
    full, free = bars
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    q_tile = q_smem.index(part).reshape([PART, D])
    do = do_smem.index(part).reshape([PART, D])
    row = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, S))
    zeros = gl.zeros([PART, BLOCK_N], gl.float32, S)
    own_zeros = gl.zeros([PART, BLOCK_C], gl.float32, OWN)
    tile = 0
    turn = 0
    num_steps = _num_steps(num_items)
    first, count, head, _, begin, inside, hi_min, _ = _item(
        0, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, 1, WINDOW
    )
    for step in range(num_steps):
        slot = row // R
        valid = (row < SLOTS * R) & (slot < count * B)
        line = (head.to(gl.int64) * num_rows + first * B + slot) * R + row % R
        hi = gl.load(hi_ptr + first + slot // B, mask=valid, other=0)
        # Not carried from step to step: Triton drops a carried value that nothing uses but the
        # bounds of a loop, and every step would have the end of the first.
        end = gl.load(hi_ptr + first + count - 1)
        floor = hi + slot % B - WINDOW
        # Rows that only fill the tile get p = exp2(0 - inf) = 0.
        lse = gl.load(lse_ptr + line, mask=valid, other=float("inf"))

        hopper.mbarrier.wait(rows_full, step & 1)
        q = q_tile.load(ROWS)
        q_own = gl.convert_layout(q, OWN_ROWS)

        # The ring has the outputs, then the own blocks, then the context.
        at = (tile + 1) % STAGES
        parity = (tile + 1) // STAGES & 1
        k_own = k_smem.index(at)._reinterpret(dtype, [BLOCK_C, D], k_smem.layout)
        v_own = v_smem.index(at)._reinterpret(dtype, [BLOCK_C, D], v_smem.layout)
        hopper.mbarrier.wait(full.index(at), parity)
        s_own = hopper.warpgroup_mma(
            q_own, k_own.permute((1, 0)), own_zeros, use_acc=False, is_async=True
        )
        dp_own = hopper.warpgroup_mma(
            do, v_own.permute((1, 0)), own_zeros, use_acc=False, is_async=True
        )
        stage = tile % STAGES
        hopper.mbarrier.wait(full.index(stage), tile // STAGES & 1)
        delta = _delta(part, stage, do, tiles, D)
        delta = gl.convert_layout(delta, gl.SliceLayout(1, S))
        hopper.mbarrier.arrive(free.index(stage), count=1)
        gl.store(delta_ptr + line, delta, mask=valid)
        tile += 2

        # The first context tile, so that the tensor cores have work while own blocks are at it.
        stage = tile % STAGES
        hopper.mbarrier.wait(full.index(stage), tile // STAGES & 1)
        next_s = hopper.warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        next_dp = hopper.warpgroup_mma(
            do, v_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        # Read a step ahead, while there are products under way.
        first_, count_, head_, _chunk, begin_, inside_, hi_min_, _end = _item(
            step + 1, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, 1, WINDOW
        )

        s_own, dp_own = hopper.warpgroup_mma_wait(2, deps=[s_own, dp_own])
        p_own, ds_own = _own_gradients(
            s_own, dp_own, lse, delta, part, count, scale_log2, R, B, SLOTS, WINDOW, CAUSAL,
            BLOCK_C, OWN, dtype,
        )  # fmt: skip
        # There is room for p and ds: these rows came when the last step's sums were done.
        sums = _own_sums(part, p_own, ds_own, rows, own, shared, step & 1, D, BLOCK_C, OWN)
        sums, s, dp = hopper.warpgroup_mma_wait(0, deps=[sums, next_s, next_dp])
        if part == 1:
            sums = sums * scale
        sums = gl.convert_layout(sums.to(dtype), STORE_OWN)
        acc = hopper.warpgroup_mma(
            gl.convert_layout(ds_own, DS), k_own, gl.zeros([PART, D], gl.float32, ACC),
            use_acc=False, is_async=True,
        )  # fmt: skip
        if part == 0:
            _store_own(dv_own_ptr, sums, first, count, head, HQ // R, B, D, BLOCK_C, STORE_OWN)
        else:
            _store_own(dk_own_ptr, sums, first, count, head, HQ // R, B, D, BLOCK_C, STORE_OWN)
        p = _probabilities(s, lse, begin, hi, floor, hi_min, inside, scale_log2, WINDOW, BLOCK_N, S)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), DS)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(free.index(at), count=1)

        for start in range(begin + BLOCK_N, end, BLOCK_N):
            before = tile % STAGES
            tile += 1
            stage = tile % STAGES
            # In turns, so that one group has products under way while the other is at its softmax.
            hopper.mbarrier.wait(turns.index(part), (turn & 1) ^ (1 - part))
            turn += 1
            next_acc = hopper.warpgroup_mma(ds, k_smem.index(before), acc, is_async=True)
            hopper.mbarrier.wait(full.index(stage), tile // STAGES & 1)
            next_s = hopper.warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            next_dp = hopper.warpgroup_mma(
                do, v_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            hopper.mbarrier.arrive(turns.index(1 - part), count=1)
            acc, s = hopper.warpgroup_mma_wait(1, deps=[next_acc, next_s])
            hopper.mbarrier.arrive(free.index(before), count=1)
            p = _probabilities(
                s, lse, start, hi, floor, hi_min, inside, scale_log2, WINDOW, BLOCK_N, S
            )
            dp = hopper.warpgroup_mma_wait(0, deps=[next_dp])
            ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), DS)
        hopper.mbarrier.arrive(rows_free, count=1)
        stage = tile % STAGES
        acc = hopper.warpgroup_mma(ds, k_smem.index(stage), acc)
        hopper.mbarrier.arrive(free.index(stage), count=1)
        tile += 1

        # Anew in every step (`step` has no such bit): kept, rows and masks would not fit registers.
        row_b = part * PART + (step >> 30) + gl.arange(0, PART, layout=gl.SliceLayout(1, STORE))
        col_b = gl.arange(0, D, layout=gl.SliceLayout(0, STORE))
        dq = gl.convert_layout((acc * scale).to(dtype), STORE)
        slot_b = row_b // R
        line_b = (first.to(gl.int64) * B + slot_b) * HQ + head * R + row_b % R
        mask = ((row_b < SLOTS * R) & (slot_b < count * B))[:, None] & (col_b < D)[None, :]
        gl.store(dq_ptr + line_b[:, None] * D + col_b[None, :], dq, mask=mask)
        first, count, head = first_, count_, head_
        begin, inside, hi_min = begin_, inside_, hi_min_


@gluon.jit(do_not_specialize=["num_rows", "num_groups", "num_items"])
def block_attention_bwd_q_kernel(
    q_desc, do_desc, out_desc, k_desc, v_desc, k_own_desc, v_own_desc, dq_ptr, dk_own_ptr,
    dv_own_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, group_ptr, scale_log2, scale, num_rows,
    num_groups, num_items,
    HQ: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dq = scale ds [k_ctx, k_own]; dk_own = scale ds^T q, dv_own = p^T do; delta = sum(out do).

    Grid: as many programs as run at once. Items are groups with one key-value head.
    """
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    OWN: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * BLOCK_C), element_bitwidth=16, rank=2
    )
    q_smem = gl.allocate_shared_memory(dtype, [2, PART // R, R, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, PART // R, R, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    p_smem = gl.allocate_shared_memory(dtype, [2, PART, BLOCK_C], OWN)
    ds_smem = gl.allocate_shared_memory(dtype, [2, PART, BLOCK_C], OWN)
    rows_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    rows_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    shared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    hopper.mbarrier.init(rows_full, count=1)
    hopper.mbarrier.init(rows_free, count=2)
    hopper.mbarrier.init(shared, count=2)
    for i in gl.static_range(2):
        hopper.mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)
    hopper.fence_async_shared()
    outs = (dq_ptr, dk_own_ptr, dv_own_ptr)
    per_row = (lse_ptr, delta_ptr)
    lists = (lo_ptr, hi_ptr, group_ptr)
    rows = (q_smem, do_smem)
    tiles = (k_smem, v_smem)
    own = (p_smem, ds_smem)
    row_bars = (rows_full, rows_free)
    bars = (full, free)
    gl.warp_specialize(
        [
            (_attend, (
                0, outs, per_row, lists, rows, tiles, own, shared, turns, row_bars, bars,
                num_groups, num_items, scale_log2, scale, num_rows, HQ, R, B, D, SLOTS, WINDOW,
                CAUSAL, BLOCK_N, BLOCK_C, STAGES,
            )),
            (_attend, (
                1, outs, per_row, lists, rows, tiles, own, shared, turns, row_bars, bars,
                num_groups, num_items, scale_log2, scale, num_rows, HQ, R, B, D, SLOTS, WINDOW,
                CAUSAL, BLOCK_N, BLOCK_C, STAGES,
            )),
            (_copy, (
                q_desc, do_desc, out_desc, k_desc, v_desc, k_own_desc, v_own_desc, lists, rows,
                tiles, row_bars, bars, num_groups, num_items, R, B, D, WINDOW, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Context tokens of a tile, tiles on their way, registers a thread at the start; H200, D 128.
BLOCK_N, STAGES, REGISTERS = 64, 4, 168


def is_supported(q: Tensor, k_ctx: Tensor, *, own_tokens: int, chunks: int) -> bool:
    """Say whether the kernel takes these: what the forward takes, if a tile holds whole blocks."""
    room = own_tokens <= 32 or STAGES > 2
    return chunks == 1 and room and attention_hopper.is_supported(q, k_ctx, own_tokens)


def backward_q(
    inputs: tuple[Tensor, ...], tables: BlockTables, groups: Tensor, saved: tuple[Tensor, ...],
    grads: tuple[Tensor, ...], *,
    slots: int, own_tokens: int, window: int, causal: bool, scale: float,
) -> None:  # fmt: skip
    """Fill `grads`, (delta, dq, dk_own, dv_own), from `saved`, (out, lse, d_out).

    A tile of 128 rows holds `slots` slots of a group.
    """
    q, k_ctx, v_ctx, k_own, v_own = inputs
    out, lse, d_out = saved
    delta, dq, dk_own, dv_own = grads
    num_rows, heads, dim = q.shape
    kv_heads = k_ctx.shape[1]
    ratio = heads // kv_heads
    rows = [PART.value // ratio, ratio, dim]
    num_items = groups.shape[0] * kv_heads
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    block_attention_bwd_q_kernel[(min(processors, num_items),)](
        _source(q, rows),
        _source(d_out, rows),
        _source(out, rows),
        _source(k_ctx, [BLOCK_N, dim]),
        _source(v_ctx, [BLOCK_N, dim]),
        _source(k_own, [own_tokens, dim]),
        _source(v_own, [own_tokens, dim]),
        dq,
        dk_own,
        dv_own,
        lse,
        delta,
        tables.lo,
        tables.hi,
        groups,
        scale * math.log2(math.e),
        scale,
        num_rows,
        groups.shape[0],
        num_items,
        HQ=heads,
        R=ratio,
        B=tables.block_size,
        D=dim,
        SLOTS=slots,
        WINDOW=window,
        CAUSAL=causal,
        BLOCK_N=BLOCK_N,
        BLOCK_C=own_tokens,
        # Own p and ds of 64 slots take the room of a tile.
        STAGES=STAGES if own_tokens <= 32 else STAGES - 1,
        num_warps=4,
        maxnreg=REGISTERS,
    )
