"""The forward kernel of `block_attention` for Hopper: a warp for copies, two groups of four for
products.

Same arithmetic as `attention_kernels._block_attention_fwd_kernel`, whose names it shares. What is
different is who waits for what: scores of the next tile are made while the softmax of one is taken
and its values are multiplied, each group of warps goes at its own pace, and a program walks many
groups of anchors, so that queries and keys of the next are on their way while one is finished.

Letters: T context tokens, N rows, Hq and Hkv heads, R = Hq / Hkv, B block size, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.kernels.attention_tables import BlockTables
from dflash_offline.kernels.optional_triton import GluonDescriptor, gl, gluon, hopper

# Rows of one group of warps.
PART = gl.constexpr(64)


@gluon.jit
def _item(
    step, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B: gl.constexpr, CHUNKS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Find the program's work of one step.

    Items of a head are neighbours, so that its keys stay in the L2 cache. Groups get lighter in the
    last head, heavier in the one before and so on: weights change without jumps, and programs that
    take their items in turns, back and forth, get the same sum.
    """
    num_programs = gl.num_programs(0)
    place = gl.program_id(0)
    if step % 2 == 1:
        place = num_programs - 1 - place
    index = gl.minimum(step * num_programs + place, num_items - 1)
    group = index % num_groups
    walk = index // num_groups
    if (num_items // num_groups - walk) % 2 == 0:
        group = num_groups - 1 - group
    head = walk // CHUNKS
    chunk = walk % CHUNKS
    first = gl.load(group_ptr + 2 * group)
    count = gl.load(group_ptr + 2 * group + 1)
    begin = gl.load(lo_ptr + first)
    hi_min = gl.load(hi_ptr + first)
    hi_max = gl.load(hi_ptr + first + count - 1)
    inside = begin
    if WINDOW > 0:
        begin = gl.maximum(begin, hi_min - WINDOW + 1)
        inside = hi_max + B - WINDOW
    return first, count, head, chunk, begin, inside, hi_min, hi_max


@gluon.jit
def _num_steps(num_items):
    """Return how many groups this program has; the last round may be short."""
    num_programs = gl.num_programs(0)
    rounds = num_items // num_programs
    place = gl.program_id(0)
    if rounds % 2 == 1:
        place = num_programs - 1 - place
    return rounds + (place < num_items % num_programs).to(gl.int32)


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, k_own_desc, v_own_desc, lo_ptr, hi_ptr, group_ptr,
    q_smem, own_smem, k_smem, v_smem, row_bars, tile_bars, num_groups, num_items,
    R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, CHUNKS: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load queries, own keys and values and tiles of the context as soon as there is room."""
    q_full, q_free, own_full, own_free = row_bars
    k_full, k_free, v_full, v_free = tile_bars
    tile = 0
    for step in range(_num_steps(num_items)):
        first, _, head, chunk, begin, _, _, end = _item(
            step, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, CHUNKS, WINDOW
        )
        waited = (step & 1) ^ 1
        for part in gl.static_range(2):
            slot = first * B + chunk * SLOTS + part * (PART // R)
            hopper.mbarrier.wait(q_free.index(part), waited)
            hopper.mbarrier.expect(q_full.index(part), q_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(
                q_desc, [slot, head * R, 0], q_full.index(part), q_smem.index(part)
            )
        hopper.mbarrier.wait(own_free, waited)
        hopper.mbarrier.expect(own_full, 2 * k_own_desc.block_type.nbytes)
        at = [first * B, head * D]
        hopper.tma.async_copy_global_to_shared(k_own_desc, at, own_full, own_smem.index(0))
        hopper.tma.async_copy_global_to_shared(v_own_desc, at, own_full, own_smem.index(1))
        # An empty context has one tile, all of it masked.
        for start in range(begin, gl.maximum(end, begin + 1), BLOCK_N):
            stage = tile % STAGES
            waited_tile = (tile // STAGES & 1) ^ 1
            at_tile = [start, head * D]
            hopper.mbarrier.wait(k_free.index(stage), waited_tile)
            hopper.mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(
                k_desc, at_tile, k_full.index(stage), k_smem.index(stage)
            )
            hopper.mbarrier.wait(v_free.index(stage), waited_tile)
            hopper.mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(
                v_desc, at_tile, v_full.index(stage), v_smem.index(stage)
            )
            tile += 1


@gluon.jit
def _sees_own(
    part: gl.constexpr, chunk, count, R: gl.constexpr, B: gl.constexpr, SLOTS: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_C: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Say which of the group's own slots each row sees."""
    row = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    slot_n = chunk * SLOTS + row // R
    slot_c = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, LAYOUT))
    distance = slot_n[:, None] - slot_c[None, :]
    mask = (slot_n // B)[:, None] == (slot_c // B)[None, :]
    mask = mask & ((row < SLOTS * R) & (slot_n < count * B))[:, None]
    mask = mask & (slot_c < count * B)[None, :]
    if CAUSAL:
        mask = mask & (distance >= 0)
    if WINDOW > 0:
        mask = mask & (distance < WINDOW)
    return mask


@gluon.jit
def _softmax(s, m, total, scale_log2):
    """One online-softmax step: probabilities, maximum, sum, and what shrinks the older sums."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _context_scores(
    s, start, hi, floor, hi_min, inside, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Mask scores of a context tile at a ragged end or a window's edge."""
    if (start + BLOCK_N > hi_min) | (start < inside):
        token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        visible = token[None, :] < hi[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > floor[:, None])
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _attend(
    part: gl.constexpr, out_ptr, lse_ptr, lo_ptr, hi_ptr, group_ptr,
    q_smem, own_smem, k_smem, v_smem, row_bars, tile_bars, num_groups, num_items,
    scale_log2, num_rows,
    HQ: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    CHUNKS: gl.constexpr, WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take the softmax of 64 rows of every group of anchors that the program has."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    q_full, q_free, own_full, own_free = row_bars
    k_full, k_free, v_full, v_free = tile_bars
    q = q_smem.index(part).reshape([PART, D])
    row = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, S))
    row_b = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, STORE))
    col_b = gl.arange(0, D, layout=gl.SliceLayout(0, STORE))
    zeros = gl.zeros([PART, BLOCK_N], gl.float32, S)
    own_zeros = gl.zeros([PART, BLOCK_C], gl.float32, OWN)
    tile = 0
    num_steps = _num_steps(num_items)
    first, count, head, chunk, begin, inside, hi_min, _ = _item(
        0, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, CHUNKS, WINDOW
    )
    for step in range(num_steps):
        # Read a step ahead.
        first_, count_, head_, chunk_, begin_, inside_, hi_min_, _end = _item(
            step + 1, num_groups, num_items, group_ptr, lo_ptr, hi_ptr, B, CHUNKS, WINDOW
        )
        slot = chunk * SLOTS + row // R
        valid = (row < SLOTS * R) & (slot < count * B)
        hi = gl.load(hi_ptr + first + slot // B, mask=valid, other=0)
        floor = hi + slot % B - WINDOW
        # Not carried from step to step: nothing uses it but the bounds of a loop.
        end = gl.load(hi_ptr + first + count - 1)

        # The own block first: every valid row sees something in it, so no maximum stays at -inf.
        # The first context tile too, so that the tensor cores have work meanwhile.
        hopper.mbarrier.wait(q_full.index(part), step & 1)
        hopper.mbarrier.wait(own_full, step & 1)
        next_own = hopper.warpgroup_mma(
            q, own_smem.index(0).permute((1, 0)), own_zeros, use_acc=False, is_async=True
        )
        stage = tile % STAGES
        hopper.mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
        next_s = hopper.warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        s_own = hopper.warpgroup_mma_wait(1, deps=[next_own])
        seen = _sees_own(part, chunk, count, R, B, SLOTS, WINDOW, CAUSAL, BLOCK_C, OWN)
        s_own = gl.where(seen, s_own, float("-inf"))
        m_own = gl.maximum(gl.max(s_own, 1) * scale_log2, -1e30)
        p_own = gl.exp2(s_own * scale_log2 - m_own[:, None])
        total = gl.convert_layout(gl.sum(p_own, 1), gl.SliceLayout(1, S))
        m = gl.convert_layout(m_own, gl.SliceLayout(1, S))
        next_acc = hopper.warpgroup_mma(
            gl.convert_layout(p_own.to(dtype), P), own_smem.index(1),
            gl.zeros([PART, D], gl.float32, ACC), use_acc=False, is_async=True,
        )  # fmt: skip
        s = hopper.warpgroup_mma_wait(1, deps=[next_s])
        hopper.mbarrier.arrive(k_free.index(stage), count=1)
        s = _context_scores(s, begin, hi, floor, hi_min, inside, WINDOW, BLOCK_N, S)
        p, m, total, alpha = _softmax(s, m, total, scale_log2)
        acc = hopper.warpgroup_mma_wait(0, deps=[next_acc])
        hopper.mbarrier.arrive(own_free, count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        p16 = gl.convert_layout(p.to(dtype), P)
        for start in range(begin + BLOCK_N, end, BLOCK_N):
            tile += 1
            stage = tile % STAGES
            before = (tile - 1) % STAGES
            hopper.mbarrier.wait(k_full.index(stage), tile // STAGES & 1)
            next_s = hopper.warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            hopper.mbarrier.wait(v_full.index(before), (tile - 1) // STAGES & 1)
            next_acc = hopper.warpgroup_mma(p16, v_smem.index(before), acc, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=[next_s])
            hopper.mbarrier.arrive(k_free.index(stage), count=1)
            s = _context_scores(s, start, hi, floor, hi_min, inside, WINDOW, BLOCK_N, S)
            p, m, total, alpha = _softmax(s, m, total, scale_log2)
            acc = hopper.warpgroup_mma_wait(0, deps=[next_acc])
            hopper.mbarrier.arrive(v_free.index(before), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
            p16 = gl.convert_layout(p.to(dtype), P)
        hopper.mbarrier.arrive(q_free.index(part), count=1)
        stage = tile % STAGES
        hopper.mbarrier.wait(v_full.index(stage), tile // STAGES & 1)
        acc = hopper.warpgroup_mma(p16, v_smem.index(stage), acc)
        hopper.mbarrier.arrive(v_free.index(stage), count=1)
        tile += 1

        total = gl.where(valid, total, 1.0)
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, ACC))
        out = gl.convert_layout((acc * inverse[:, None]).to(dtype), STORE)
        slot_b = chunk * SLOTS + row_b // R
        line = (first.to(gl.int64) * B + slot_b) * HQ + head * R + row_b % R
        mask = ((row_b < SLOTS * R) & (slot_b < count * B))[:, None] & (col_b < D)[None, :]
        gl.store(out_ptr + line[:, None] * D + col_b[None, :], out, mask=mask)
        at = (head.to(gl.int64) * num_rows + first * B + slot) * R + row % R
        gl.store(lse_ptr + at, m + gl.log2(total), mask=valid)
        first, count, head, chunk = first_, count_, head_, chunk_
        begin, inside, hi_min = begin_, inside_, hi_min_


@gluon.jit(do_not_specialize=["num_rows", "num_groups", "num_items"])
def block_attention_fwd_kernel(
    q_desc, k_desc, v_desc, k_own_desc, v_own_desc, out_ptr, lse_ptr, lo_ptr, hi_ptr, group_ptr,
    scale_log2, num_rows, num_groups, num_items,
    HQ: gl.constexpr, R: gl.constexpr, B: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    CHUNKS: gl.constexpr, WINDOW: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale q [k_ctx, k_own]^T + mask) [v_ctx, v_own]; saves out and lse.

    Grid: as many programs as run at once. Items are chunks of a group with one key-value head.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, PART // R, R, D], q_desc.layout)
    own_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_C, D], k_own_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    own_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    hopper.mbarrier.init(own_full, count=1)
    hopper.mbarrier.init(own_free, count=2)
    for i in gl.static_range(2):
        hopper.mbarrier.init(q_full.index(i), count=1)
        hopper.mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(i), count=1)
        hopper.mbarrier.init(v_full.index(i), count=1)
        hopper.mbarrier.init(k_free.index(i), count=2)
        hopper.mbarrier.init(v_free.index(i), count=2)
    hopper.fence_async_shared()
    row_bars = (q_full, q_free, own_full, own_free)
    tile_bars = (k_full, k_free, v_full, v_free)
    gl.warp_specialize(
        [
            (_attend, (
                0, out_ptr, lse_ptr, lo_ptr, hi_ptr, group_ptr, q_smem, own_smem, k_smem, v_smem,
                row_bars, tile_bars, num_groups, num_items, scale_log2, num_rows,
                HQ, R, B, D, SLOTS, CHUNKS, WINDOW, CAUSAL, BLOCK_N, BLOCK_C, STAGES,
            )),
            (_attend, (
                1, out_ptr, lse_ptr, lo_ptr, hi_ptr, group_ptr, q_smem, own_smem, k_smem, v_smem,
                row_bars, tile_bars, num_groups, num_items, scale_log2, num_rows,
                HQ, R, B, D, SLOTS, CHUNKS, WINDOW, CAUSAL, BLOCK_N, BLOCK_C, STAGES,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, k_own_desc, v_own_desc, lo_ptr, hi_ptr, group_ptr,
                q_smem, own_smem, k_smem, v_smem, row_bars, tile_bars, num_groups, num_items,
                R, B, D, SLOTS, CHUNKS, WINDOW, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Context tokens of a tile, tiles on their way, registers a thread at the start; H200, D 128.
BLOCK_N, STAGES, REGISTERS = 128, 2, 168
MAX_OWN_TOKENS = 64


def is_supported(q: Tensor, k_ctx: Tensor, own_tokens: int) -> bool:
    """Say whether the kernel takes these: dimension 128 of 2 bytes, on Hopper, a ratio that is a
    power of two, and at most 64 tokens in the blocks of a group."""
    ratio = q.shape[1] // k_ctx.shape[1]
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and (q.shape[2], q.element_size()) == (128, 2)
        and ratio & (ratio - 1) == 0
        and own_tokens <= MAX_OWN_TOKENS
        and k_ctx.shape[0] > 0
    )


def _source(x: Tensor, box: list[int]) -> GluonDescriptor:
    """Return what boxes of [tokens, D] or [slots, R, D] of a tensor [rows, heads, D] come from."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    shape, strides = list(x.shape), list(x.stride())
    if len(box) == 2:
        shape, strides = [shape[0], shape[1] * shape[2]], [strides[0], 1]
    return GluonDescriptor(x, shape, strides, box, layout)


def forward(
    inputs: tuple[Tensor, ...], tables: BlockTables, groups: Tensor, out: Tensor, lse: Tensor, *,
    slots: int, chunks: int, own_tokens: int, window: int, causal: bool, scale_log2: float,
) -> None:  # fmt: skip
    """Fill `out` [N, Hq, D] and `lse`; a tile of 128 rows holds `slots` slots of a group."""
    q, k_ctx, v_ctx, k_own, v_own = inputs
    num_rows, heads, dim = q.shape
    kv_heads = k_ctx.shape[1]
    ratio = heads // kv_heads
    num_items = groups.shape[0] * kv_heads * chunks
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    block_attention_fwd_kernel[(min(processors, num_items),)](
        _source(q, [PART.value // ratio, ratio, dim]),
        _source(k_ctx, [BLOCK_N, dim]),
        _source(v_ctx, [BLOCK_N, dim]),
        _source(k_own, [own_tokens, dim]),
        _source(v_own, [own_tokens, dim]),
        out,
        lse,
        tables.lo,
        tables.hi,
        groups,
        scale_log2,
        num_rows,
        groups.shape[0],
        num_items,
        HQ=heads,
        R=ratio,
        B=tables.block_size,
        D=dim,
        SLOTS=slots,
        CHUNKS=chunks,
        WINDOW=window,
        CAUSAL=causal,
        BLOCK_N=BLOCK_N,
        BLOCK_C=own_tokens,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
    )
