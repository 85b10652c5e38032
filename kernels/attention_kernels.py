"""The Triton kernels of `block_attention`: forward, dQ with own-block dK and dV, context dK and dV.

A program of the first two owns a group of anchors and one key-value head. Its tile holds rows
(slot n of the group, query head r of the head's R), n slow, so the rows of a slot are neighbours in
memory. A program of the third owns a tile of context tokens and walks the rows of all anchors that
see it. Every output has one writer: no atomics, the same bits every time.

Scores are kept in units of log2: scale_log2 = scale * log2(e), lse = max + log2(sum). lse and delta
are float32 [Hkv, N, R], so that the rows of one key-value head are contiguous.

Letters: T context tokens, N rows, Hq and Hkv heads, R = Hq / Hkv, B block size, D head dimension.
"""

from __future__ import annotations

from dflash_offline.kernels.optional_triton import tl, triton


@triton.jit
def _load_tokens(
    src, start, end, head, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load tokens [start, start + BLOCK_N) of one head: [BLOCK_N, BLOCK_D], zeros from `end` on."""
    if TMA:
        # Past `end` come the next document's tokens, then zeros; the caller's mask covers both.
        x = src.load([start, head * D])
    else:
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        offs = offs_n[:, None] * STRIDE + offs_d[None, :]
        mask = (start + offs_n < end)[:, None] & (offs_d < D)[None, :]
        x = tl.load(src + tl.cast(start, tl.int64) * STRIDE + head * D + offs, mask=mask, other=0.0)
    return x


@triton.jit
def _row_offsets(row, head, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of the vectors of (row, head) pairs in a tensor [N, heads, D]."""
    offs_d = tl.arange(0, BLOCK_D)
    return tl.cast(row, tl.int64)[:, None] * STRIDE + (head * D)[:, None] + offs_d[None, :]


@triton.jit
def _own_mask(
    slot_n, slot_c, valid_n, valid_c, B: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Who sees whom inside the blocks of one group: slots count through the group."""
    distance = slot_n[:, None] - slot_c[None, :]
    mask = (slot_n // B)[:, None] == (slot_c // B)[None, :]
    mask = mask & valid_n[:, None] & valid_c[None, :]
    if CAUSAL:
        mask = mask & (distance >= 0)
    if WINDOW > 0:
        mask = mask & (distance < WINDOW)
    return mask


@triton.jit
def _fwd_step(acc, m, total, s, v, scale_log2, PRECISION: tl.constexpr):
    """One online-softmax step with scores s [BLOCK_M, n] (masked: -inf) and values v [n, D]."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, total


@triton.jit
def _context_range(lo, hi_min, hi_max, B: tl.constexpr, WINDOW: tl.constexpr):
    """Return where a group's context begins, and from where on its lower bounds need no mask."""
    begin = lo
    inside = lo
    if WINDOW > 0:
        begin = tl.maximum(lo, hi_min - WINDOW + 1)
        inside = hi_max + B - WINDOW
    return begin, inside


@triton.jit(do_not_specialize=["num_rows"])
def _block_attention_fwd_kernel(
    q_ptr, k_src, v_src, k_own_ptr, v_own_ptr, out_ptr, lse_ptr, lo_ptr, hi_ptr, group_ptr,
    scale_log2, num_rows,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    STRIDE_KO: tl.constexpr, STRIDE_VO: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, R: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale q [k_ctx, k_own]^T + mask) [v_ctx, v_own]; saves out and lse.

    Grid (groups, HKV * CHUNKS). A tile holds SLOTS slots of the group, R rows each; CHUNKS > 1
    where one block has more rows than a tile.
    """
    group = tl.program_id(0)
    head = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    first = tl.load(group_ptr + 2 * group)
    count = tl.load(group_ptr + 2 * group + 1)
    lo = tl.load(lo_ptr + first)
    hi_min = tl.load(hi_ptr + first)
    hi_max = tl.load(hi_ptr + first + count - 1)

    offs_m = tl.arange(0, BLOCK_M)
    slot = chunk * SLOTS + offs_m // R
    valid = (offs_m < SLOTS * R) & (slot < count * B)
    row = tl.cast(first, tl.int64) * B + slot
    q_head = head * R + offs_m % R
    hi = tl.load(hi_ptr + first + slot // B, mask=valid, other=0)
    floor = hi + slot % B - WINDOW
    mask_d = tl.arange(0, BLOCK_D) < D
    mask_q = valid[:, None] & mask_d[None, :]
    q = tl.load(q_ptr + _row_offsets(row, q_head, STRIDE_Q, D, BLOCK_D), mask=mask_q, other=0.0)

    # The own block first: every valid row sees something in it, so no maximum stays at -inf.
    offs_c = tl.arange(0, BLOCK_C)
    valid_c = offs_c < count * B
    row_c = tl.cast(first, tl.int64) * B + offs_c
    head_c = tl.zeros_like(offs_c) + head
    mask_c = valid_c[:, None] & mask_d[None, :]
    k_own = tl.load(
        k_own_ptr + _row_offsets(row_c, head_c, STRIDE_KO, D, BLOCK_D), mask=mask_c, other=0.0
    )
    v_own = tl.load(
        v_own_ptr + _row_offsets(row_c, head_c, STRIDE_VO, D, BLOCK_D), mask=mask_c, other=0.0
    )
    s_own = tl.dot(q, tl.trans(k_own), input_precision=PRECISION)
    mask = _own_mask(slot, offs_c, valid, valid_c, B, CAUSAL, WINDOW)
    s_own = tl.where(mask, s_own, float("-inf"))
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, m, total = _fwd_step(acc, m, total, s_own, v_own, scale_log2, PRECISION)

    offs_n = tl.arange(0, BLOCK_N)
    begin, inside = _context_range(lo, hi_min, hi_max, B, WINDOW)
    for start in range(begin, hi_max, BLOCK_N):
        k = _load_tokens(k_src, start, hi_max, head, STRIDE_K, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if (start + BLOCK_N > hi_min) | (start < inside):
            visible = (start + offs_n)[None, :] < hi[:, None]
            if WINDOW > 0:
                visible = visible & ((start + offs_n)[None, :] > floor[:, None])
            s = tl.where(visible, s, float("-inf"))
        v = _load_tokens(v_src, start, hi_max, head, STRIDE_V, D, BLOCK_N, BLOCK_D, TMA)
        acc, m, total = _fwd_step(acc, m, total, s, v, scale_log2, PRECISION)

    total = tl.where(valid, total, 1.0)
    out = acc / total[:, None]
    out_ptrs = out_ptr + _row_offsets(row, q_head, HQ * D, D, BLOCK_D)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_q)
    offs_l = tl.cast(head, tl.int64) * num_rows * R + row * R + offs_m % R
    tl.store(lse_ptr + offs_l, m + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def _block_attention_bwd_q_kernel(
    q_ptr, k_src, v_src, k_own_ptr, v_own_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr,
    dq_ptr, dk_own_ptr, dv_own_ptr, lo_ptr, hi_ptr, group_ptr, scale_log2, scale, num_rows,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    STRIDE_KO: tl.constexpr, STRIDE_VO: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, R: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale ds [k_ctx, k_own]; dk_own = scale ds^T q, dv_own = p^T do; delta = sum(out do).

    Grid (groups, HKV). The own blocks of a group are seen by its rows alone, so their gradients are
    complete here; a group with more rows than a tile is walked in CHUNKS.
    """
    group = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(group_ptr + 2 * group)
    count = tl.load(group_ptr + 2 * group + 1)
    lo = tl.load(lo_ptr + first)
    hi_min = tl.load(hi_ptr + first)
    hi_max = tl.load(hi_ptr + first + count - 1)

    offs_m = tl.arange(0, BLOCK_M)
    mask_d = tl.arange(0, BLOCK_D) < D
    q_head = head * R + offs_m % R
    offs_c = tl.arange(0, BLOCK_C)
    valid_c = offs_c < count * B
    row_c = tl.cast(first, tl.int64) * B + offs_c
    head_c = tl.zeros_like(offs_c) + head
    mask_c = valid_c[:, None] & mask_d[None, :]
    offs_n = tl.arange(0, BLOCK_N)
    k_own = tl.load(
        k_own_ptr + _row_offsets(row_c, head_c, STRIDE_KO, D, BLOCK_D), mask=mask_c, other=0.0
    )
    v_own = tl.load(
        v_own_ptr + _row_offsets(row_c, head_c, STRIDE_VO, D, BLOCK_D), mask=mask_c, other=0.0
    )
    dk = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)

    for chunk in range(CHUNKS):
        slot = chunk * SLOTS + offs_m // R
        valid = (offs_m < SLOTS * R) & (slot < count * B)
        row = tl.cast(first, tl.int64) * B + slot
        hi = tl.load(hi_ptr + first + slot // B, mask=valid, other=0)
        floor = hi + slot % B - WINDOW
        mask_q = valid[:, None] & mask_d[None, :]
        offs_q = _row_offsets(row, q_head, STRIDE_Q, D, BLOCK_D)
        offs_o = _row_offsets(row, q_head, HQ * D, D, BLOCK_D)
        q = tl.load(q_ptr + offs_q, mask=mask_q, other=0.0)
        do = tl.load(do_ptr + offs_o, mask=mask_q, other=0.0)
        out = tl.load(out_ptr + offs_o, mask=mask_q, other=0.0)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        offs_l = tl.cast(head, tl.int64) * num_rows * R + row * R + offs_m % R
        tl.store(delta_ptr + offs_l, delta, mask=valid)
        # Rows that only fill the tile get p = exp2(0 - inf) = 0.
        lse = tl.load(lse_ptr + offs_l, mask=valid, other=float("inf"))

        s_own = tl.dot(q, tl.trans(k_own), input_precision=PRECISION)
        dp_own = tl.dot(do, tl.trans(v_own), input_precision=PRECISION)
        mask = _own_mask(slot, offs_c, valid, valid_c, B, CAUSAL, WINDOW)
        p_own = tl.where(mask, tl.exp2(s_own * scale_log2 - lse[:, None]), 0.0)
        ds_own = (p_own * (dp_own - delta[:, None])).to(q.dtype)
        dv = tl.dot(tl.trans(p_own.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds_own), q, dk, input_precision=PRECISION)
        if chunk == CHUNKS - 1:
            offs_own = _row_offsets(row_c, head_c, HKV * D, D, BLOCK_D)
            dk_ptrs, dv_ptrs = dk_own_ptr + offs_own, dv_own_ptr + offs_own
            tl.store(dk_ptrs, (dk * scale).to(dk_own_ptr.dtype.element_ty), mask=mask_c)
            tl.store(dv_ptrs, dv.to(dv_own_ptr.dtype.element_ty), mask=mask_c)
        dq = tl.dot(ds_own, k_own, input_precision=PRECISION)

        begin, inside = _context_range(lo, hi_min, hi_max, B, WINDOW)
        for start in range(begin, hi_max, BLOCK_N):
            k = _load_tokens(k_src, start, hi_max, head, STRIDE_K, D, BLOCK_N, BLOCK_D, TMA)
            v = _load_tokens(v_src, start, hi_max, head, STRIDE_V, D, BLOCK_N, BLOCK_D, TMA)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if (start + BLOCK_N > hi_min) | (start < inside):
                visible = (start + offs_n)[None, :] < hi[:, None]
                if WINDOW > 0:
                    visible = visible & ((start + offs_n)[None, :] > floor[:, None])
                s = tl.where(visible, s, float("-inf"))
            p = tl.exp2(s * scale_log2 - lse[:, None])
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        dq_ptrs = dq_ptr + _row_offsets(row, q_head, HQ * D, D, BLOCK_D)
        tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask_q)


@triton.jit
def _load_slots(
    src, start, valid, head, STRIDE: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load the rows of slots [start, start + SLOTS) of one key-value head: [BLOCK_M, BLOCK_D]."""
    if TMA:
        x = tl.reshape(src.load([start, head * R, 0]), [BLOCK_M, BLOCK_D])
    else:
        offs_m = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        offs = (offs_m // R * STRIDE + (head * R + offs_m % R) * D)[:, None] + offs_d[None, :]
        mask = valid[:, None] & (offs_d < D)[None, :]
        x = tl.load(src + tl.cast(start, tl.int64) * STRIDE + offs, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _block_attention_bwd_kv_kernel(
    q_src, k_ptr, v_ptr, do_src, lse_ptr, delta_ptr, dk_ptr, dv_ptr, hi_ptr, tile_ptr,
    scale_log2, scale, num_rows,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, R: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk_ctx = scale ds^T q and dv_ctx = p^T do of one tile of tokens, over all rows that see it.

    Grid (tiles, HKV). Tiles that no anchor sees store zeros, so the outputs need no clearing.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(tile_ptr + 5 * tile)
    end = tl.load(tile_ptr + 5 * tile + 1)
    first = tl.load(tile_ptr + 5 * tile + 2)
    last = tl.load(tile_ptr + 5 * tile + 3)
    full = tl.load(tile_ptr + 5 * tile + 4)
    lse_ptr += tl.cast(head, tl.int64) * num_rows * R
    delta_ptr += tl.cast(head, tl.int64) * num_rows * R

    tokens = start + tl.arange(0, BLOCK_N)
    k = _load_tokens(k_ptr, start, end, head, STRIDE_K, D, BLOCK_N, BLOCK_D, False)
    v = _load_tokens(v_ptr, start, end, head, STRIDE_V, D, BLOCK_N, BLOCK_D, False)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Slots [whole, ragged) see all of the tile and need no mask.
    stop = last * B
    whole = full * B
    ragged = stop
    if WINDOW > 0:
        offs_a = tl.arange(0, 256)
        num_any = 0
        num_all = 0
        for anchor in range(first, last, 256):
            inside = anchor + offs_a < last
            hi = tl.load(hi_ptr + anchor + offs_a, mask=inside, other=0)
            num_any += tl.sum((inside & (hi - WINDOW < end - 1)).to(tl.int32))
            num_all += tl.sum((inside & (hi + B - 1 - WINDOW < start)).to(tl.int32))
        stop = (first + num_any) * B
        ragged = (first + num_all) * B

    offs_m = tl.arange(0, BLOCK_M)
    for slot in range(first * B, stop, SLOTS):
        valid = offs_m < tl.minimum(SLOTS, stop - slot) * R
        q = _load_slots(q_src, slot, valid, head, STRIDE_Q, R, D, SLOTS, BLOCK_M, BLOCK_D, TMA)
        do = _load_slots(do_src, slot, valid, head, HQ * D, R, D, SLOTS, BLOCK_M, BLOCK_D, TMA)
        # Unmasked: a tile that runs over `stop` reads other rows or padding, and masks them below.
        offs_l = tl.cast(slot, tl.int64) * R + offs_m
        lse = tl.load(lse_ptr + offs_l)
        delta = tl.load(delta_ptr + offs_l)
        if SLOTS * R < BLOCK_M:
            # Rows that only fill the tile: p = exp2(0 - inf) = 0.
            lse = tl.where(offs_m < SLOTS * R, lse, float("inf"))
            delta = tl.where(offs_m < SLOTS * R, delta, 0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if (slot < whole) | (slot + SLOTS > ragged):
            hi = tl.load(hi_ptr + (slot + offs_m // R) // B, mask=valid, other=0)
            visible = (tokens[:, None] < hi[None, :]) & valid[None, :]
            if WINDOW > 0:
                floor = hi + (slot + offs_m // R) % B - WINDOW
                visible = visible & (tokens[:, None] > floor[None, :])
            s = tl.where(visible, s, float("-inf"))
            lse = tl.where(valid, lse, 0.0)
            delta = tl.where(valid, delta, 0.0)
        p = tl.exp2(s * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    offs = _row_offsets(tokens, tl.zeros_like(tokens) + head, HKV * D, D, BLOCK_D)
    mask = (tokens < end)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(dk_ptr + offs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=mask)
