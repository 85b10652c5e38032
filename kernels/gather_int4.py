"""int4 codes to bfloat16, eight at a time.

A word of codes becomes four words of two bfloat16 by a piece of assembly, so this runs on GPUs
alone. Each operation is rounded as the format says: the bits are those of the kernel in
`gather_dequant`, which takes every codec and a norm.

Letters: K captured layers, H hidden width.
"""

from __future__ import annotations

from dflash_offline.kernels.optional_triton import tl, triton


# One word of eight codes to four words of two bfloat16. A code's four bits become the low bits of a
# float's mantissa, so that the float is the code plus a power of two: an operation to mask and set
# and one to subtract, where a conversion takes a shift and two operations at a quarter of the rate.
def _asm() -> tuple[str, str]:
    lines = ["shr.b32 high, $4, 16;"]
    for channel in range(8):
        bit, word = channel % 4 * 4, "$4" if channel < 4 else "high"
        magic = (150 - bit) << 23
        lines += [
            f"lop3.b32 t, {word}, {0xF << bit:#x}, {magic:#x}, 0xEA;",
            f"mov.b32 f{channel}, t;",
            f"sub.rn.f32 f{channel}, f{channel}, {float(2 ** (23 - bit) + 8)};",
            f"mul.rn.f32 f{channel}, f{channel}, $5;",
            f"mul.rn.f32 f{channel}, f{channel}, ${6 + channel};",
            f"add.rn.f32 f{channel}, f{channel}, ${14 + channel};",
        ]
    lines += [f"cvt.rn.bf16x2.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(4)]
    body = " ".join(lines)
    asm = "{ .reg .b32 t, high; .reg .f32 f<8>; " + body + " }"
    return asm, ",".join(["=&r"] * 4 + ["r"] + ["f"] * 17)


ASM, CONSTRAINTS = map(tl.constexpr, _asm())


@triton.jit
def _eight_channels(ptr, word, H: tl.constexpr):
    """Load a float for each of the eight channels of every word: eight tensors like `word`."""
    channel = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    x = tl.load(ptr + channel, mask=channel < H, other=0.0)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 8, 4, 2]))
    c04, c26 = tl.split(tl.reshape(even, [x.shape[0], 8, 2, 2]))
    c15, c37 = tl.split(tl.reshape(odd, [x.shape[0], 8, 2, 2]))
    c0, c4 = tl.split(c04)
    c1, c5 = tl.split(c15)
    c2, c6 = tl.split(c26)
    c3, c7 = tl.split(c37)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _load_words(
    value_ptr, scale_ptr, slot_ptr, row_ptr, i, base, group, word,
    H: tl.constexpr, EXACT: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Load what row i of the result is made from: words of codes, scales, exact slot."""
    row = base + i
    if INDEXED:
        row = base + tl.load(row_ptr + i).to(tl.int64)
    codes = tl.load(value_ptr + row * (H // 8) + word, mask=word < H // 8, other=0)
    scale = tl.load(scale_ptr + row * (H // 64) + group, mask=group < H // 64, other=0.0)
    slot = -1
    if EXACT:
        slot = tl.load(slot_ptr + row)
    return codes, scale.to(tl.float32)[:, None], slot


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def gather_int4_kernel(
    value_ptr, scale_ptr, mean_ptr, gain_ptr, slot_ptr, exact_ptr, row_ptr, out_ptr,
    num_rows, num_tokens,
    K: tl.constexpr, H: tl.constexpr, EXACT: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out[r, layer H + h] = decoded states[layer, rows[r], h] of int4 codes, in bfloat16.

    Grid (row tiles, K * channel tiles). A thread has a word of codes and its means and gains; the
    next row's codes are on their way while one is decoded.
    """
    TILES: tl.constexpr = (H + GROUPS * 64 - 1) // (GROUPS * 64)
    layer = tl.program_id(1) // TILES
    group = tl.program_id(1) % TILES * GROUPS + tl.arange(0, GROUPS)
    word = group[:, None] * 8 + tl.arange(0, 8)[None, :]  # [GROUPS, 8]
    m0, m1, m2, m3, m4, m5, m6, m7 = _eight_channels(mean_ptr + layer * H, word, H)
    g0, g1, g2, g3, g4, g5, g6, g7 = _eight_channels(gain_ptr + layer * H, word, H)
    base = tl.cast(layer, tl.int64) * num_tokens
    start = tl.program_id(0) * ROWS
    end = tl.minimum(start + ROWS, num_rows)
    column = tl.program_id(1) % TILES * (GROUPS * 32) + tl.arange(0, GROUPS * 32)
    codes, scale, slot = _load_words(
        value_ptr, scale_ptr, slot_ptr, row_ptr, start, base, group, word, H, EXACT, INDEXED
    )
    for i in range(start, end):
        after = tl.minimum(i + 1, end - 1)
        next_codes, next_scale, next_slot = _load_words(
            value_ptr, scale_ptr, slot_ptr, row_ptr, after, base, group, word, H, EXACT, INDEXED
        )
        out = out_ptr + tl.cast(i, tl.int64) * (K * H // 2) + layer * (H // 2) + column
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS,
            [codes, scale, g0, g1, g2, g3, g4, g5, g6, g7, m0, m1, m2, m3, m4, m5, m6, m7],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [GROUPS * 32])
        # The outer condition is decided at compile time.
        if EXACT:  # noqa: SIM102
            if slot >= 0:
                exact = exact_ptr + tl.cast(slot, tl.int64) * (H // 2)
                words = tl.load(exact + column, mask=column < H // 2, other=0)
        tl.store(out, words, mask=column < H // 2)
        codes, scale, slot = next_codes, next_scale, next_slot
