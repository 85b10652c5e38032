"""Block attention: values and gradients against a dense softmax under an explicit mask."""

import pytest
import torch

from dflash_offline.kernels.attention_launch import Launch
from dflash_offline.kernels.attention_tables import build_tables
from dflash_offline.kernels.block_attention import (
    _packed,
    _token_source,
    block_attention,
    table_sizes,
    warm_up,
)

# Name: (T, anchors as (lo, hi)). Documents are [lo, next lo).
LAYOUTS = {
    "one document": (24, [(0, 0), (0, 1), (0, 9), (0, 22), (0, 23)]),
    "documents of one token, and one without anchors": (
        30,
        [(0, 0), (1, 1), (2, 2), (2, 7), (20, 20), (20, 29)],
    ),
    "two anchors at one place, padding anchors": (
        20,
        [(0, 6), (0, 6), (8, 12), (20, 20), (20, 20)],
    ),
    "no context": (0, [(0, 0), (0, 0)]),
    "one anchor": (13, [(0, 12)]),
    "more anchors than a tile holds": (24, [(0, t) for t in range(3, 23, 2)]),
}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Whatever is not written, or read without having been, is NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        # Not the 5 GB of the test of offsets, which must stay untouched.
        return x.fill_(float("nan")) if x.is_floating_point() and x.numel() < 2**31 else x

    monkeypatch.setattr(torch, "empty", poisoned)


def visible(lo, hi, *, block, num_ctx, window=None, causal=False):
    """Say key by key, from the definition, what each row sees: bool [N, T + N]."""
    rows = len(lo) * block
    mask = torch.zeros(rows, num_ctx + rows, dtype=torch.bool)
    for row in range(rows):
        anchor, slot = divmod(row, block)
        for token in range(lo[anchor], hi[anchor]):
            mask[row, token] = window is None or hi[anchor] + slot - token < window
        for other in range(block):
            seen = (not causal or other <= slot) and (window is None or slot - other < window)
            mask[row, num_ctx + anchor * block + other] = seen
    return mask


def dense_attention(q, k_ctx, v_ctx, k_own, v_own, mask):
    repeat = q.shape[1] // k_ctx.shape[1]
    k = torch.cat([k_ctx, k_own]).repeat_interleave(repeat, 1)
    v = torch.cat([v_ctx, v_own]).repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def random_inputs(
    rows, num_ctx, *, heads, kv_heads, dim, dtype=torch.float64, device="cpu", seed=0
):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads), (num_ctx, kv_heads), (num_ctx, kv_heads)]
    shapes += [(rows, kv_heads), (rows, kv_heads)]
    return [
        torch.randn(*shape, dim, dtype=torch.float64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]


def value_and_gradients(out, inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    upstream = upstream.to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def compare(layout, *, block, ratio, window, causal, dtype, implementation, kv_heads=2, dim=8):
    num_ctx, anchors = layout
    lo, hi = zip(*anchors, strict=True)
    rows = len(anchors) * block
    inputs = random_inputs(rows, num_ctx, heads=ratio * kv_heads, kv_heads=kv_heads, dim=dim)
    mask = visible(lo, hi, block=block, num_ctx=num_ctx, window=window, causal=causal)
    wanted = value_and_gradients(dense_attention(*inputs, mask), inputs)
    given = [x.detach().to(dtype).requires_grad_() for x in inputs]
    tables = build_tables(lo, hi, block_size=block, num_ctx=num_ctx)
    out = block_attention(
        *given, tables, window=window, causal=causal, implementation=implementation
    )
    got = value_and_gradients(out, given)
    errors = [(a.double() - b).abs().max() for a, b in zip(got, wanted, strict=True) if b.numel()]
    # Python's max would pass over NaN.
    return torch.stack(errors).max().item()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_reference(layout, window, causal):
    error = compare(
        layout, block=4, ratio=2, window=window, causal=causal, dtype=torch.float64,
        implementation="reference",
    )  # fmt: skip
    assert error < 1e-12


def test_reference_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr("dflash_offline.kernels.reference.MAX_SCORES", 300)
    layout = LAYOUTS["more anchors than a tile holds"]
    error = compare(
        layout, block=3, ratio=3, window=None, causal=False, dtype=torch.float64,
        implementation="reference",
    )  # fmt: skip
    assert error < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("window", "causal"), [(None, False), (5, True), (100, False)], ids=str)
def test_kernels_on_layouts(layout, window, causal):
    error = compare(
        layout, block=4, ratio=2, window=window, causal=causal, dtype=torch.float32,
        implementation="triton", kv_heads=1,
    )  # fmt: skip
    # float32 sums of at most 64 terms of size one.
    assert error < 1e-5


# Blocks of 7 and 10 and ratios of 3, 5, 6 and 7 leave rows of a tile empty; 16 x 4 and 3 x 16 rows
# are more than a tile has, so a block takes several.
@pytest.mark.parametrize(
    ("block", "ratio"), [(7, 3), (10, 1), (2, 5), (3, 6), (2, 7), (4, 16), (16, 3)]
)
def test_kernels_on_shapes(block, ratio):
    layout = (21, [(0, 0), (0, 19), (20, 21)])
    error = compare(
        layout, block=block, ratio=ratio, window=9, causal=False, dtype=torch.float32,
        implementation="triton", kv_heads=1, dim=12,
    )  # fmt: skip
    assert error < 1e-5


def test_a_window_of_more_than_a_tile():
    """Its first tile has no ragged end, and not every slot of a block sees all of it."""
    error = compare(
        (70, [(0, 30), (32, 66)]), block=4, ratio=2, window=20, causal=True,
        dtype=torch.float32, implementation="triton", kv_heads=1,
    )  # fmt: skip
    assert error < 1e-5


def test_kernels_in_float16():
    error = compare(
        LAYOUTS["one document"], block=4, ratio=2, window=None, causal=False, dtype=torch.float16,
        implementation="triton",
    )  # fmt: skip
    # Values of size one in 11 bits, summed over a few dozen terms in float32.
    assert error < 2e-2


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [None, 3, 5])
def test_mask_table(window, causal, implementation):
    """With equal scores and one-hot values a row's output is positive exactly where it sees a key.

    Twelve tokens in two documents, of 5 and 7; anchors at a first token, inside, last but one.
    """
    lo, hi, block, num_ctx = [0, 0, 5, 5], [0, 3, 5, 10], 4, 12
    keys = num_ctx + len(lo) * block
    one_hot = torch.eye(32)[:keys, None]
    q, zeros = torch.zeros(len(lo) * block, 1, 32), torch.zeros(keys, 1, 32)
    out = block_attention(
        q, zeros[:num_ctx], one_hot[:num_ctx], zeros[num_ctx:], one_hot[num_ctx:],
        build_tables(lo, hi, block_size=block, num_ctx=num_ctx),
        window=window, causal=causal, implementation=implementation,
    )  # fmt: skip
    seen = out[:, 0, :keys] > 0
    wanted = visible(lo, hi, block=block, num_ctx=num_ctx, window=window, causal=causal)
    assert torch.equal(seen, wanted)
    if (window, causal) == (3, True):
        rows = ["".join("#" if x else "." for x in row) for row in seen[4:8, :24].tolist()]
        assert rows == [
            ".##.............#.......",
            "..#.............##......",
            "................###.....",
            ".................###....",
        ]


def test_nothing_leaks():
    """Tokens from the anchor on, other documents and other blocks do not move a block at all."""
    lo, hi, block, num_ctx = [0, 0, 8], [3, 6, 11], 4, 16
    inputs = random_inputs(12, num_ctx, heads=2, kv_heads=1, dim=8, dtype=torch.float32)
    tables = build_tables(lo, hi, block_size=block, num_ctx=num_ctx)
    before = block_attention(*inputs, tables, implementation="triton")[4:8]
    with torch.no_grad():
        for x in inputs[1:3]:
            x[6:] += 1
        for x in inputs[3:]:
            x[:4] += 1
            x[8:] += 1
    assert torch.equal(block_attention(*inputs, tables, implementation="triton")[4:8], before)
    with torch.no_grad():
        inputs[2][5] += 1
    assert not torch.equal(block_attention(*inputs, tables, implementation="triton")[4:8], before)


def test_strided_inputs():
    """Queries and keys may be views into one wide product, and the upstream gradient expanded."""
    rows, dim = 8, 16
    wide = torch.randn(rows, 4 * dim, dtype=torch.float32)
    q = wide[:, : 2 * dim].unflatten(1, (2, dim)).detach().requires_grad_()
    own = wide[:, 2 * dim :].unflatten(1, (2, dim)).detach()
    ctx = torch.randn(6, 1, dim)
    tables = build_tables([0, 0], [2, 6], block_size=4, num_ctx=6)
    grads = []
    for implementation in ("triton", "reference"):
        out = block_attention(
            q, ctx, ctx, own[:, :1], own[:, 1:], tables, implementation=implementation
        )
        grads.append(torch.autograd.grad(out, q, torch.ones(1).expand_as(out))[0])
    torch.testing.assert_close(*grads)


def test_the_copy_engine_takes_what_it_is_given():
    launch = Launch(rows=64, tokens=32, warps=4, stages=2, tma=True)
    for num_ctx, sizes in ((0, [1, 128]), (5, [5, 128])):
        source = _token_source(torch.zeros(num_ctx, 2, 64), launch)
        assert (source.shape, source.block_shape) == (sizes, [32, 64])
    rows = torch.zeros(4 * 128 + 8)
    # Memory of a tensor begins at a multiple of 16 bytes, the first view four bytes behind one.
    for start, is_taken in ((1, False), (4, True)):
        view = rows[start : start + 4 * 128].view(4, 2, 64)
        assert (_packed(view) is view) == is_taken
        assert _packed(view).data_ptr() % 16 == 0


@pytest.mark.slow
def test_offsets_beyond_31_bits():
    """Context rows 2 ** 24 elements apart: the last lies 2.7e9 elements behind the first.

    5.4 GB of address space, of which only the pages of the 160 rows are ever touched.
    """
    num_ctx, dim = 160, 8
    near = torch.randn(num_ctx, 1, dim, dtype=torch.float16)
    far = torch.empty(num_ctx * 2**24, dtype=torch.float16).as_strided(near.shape, (2**24, dim, 1))
    far.copy_(near)
    q = torch.randn(8, 2, dim, dtype=torch.float16)
    own = torch.randn(8, 1, dim, dtype=torch.float16)
    tables = build_tables([0, 0], [70, 160], block_size=4, num_ctx=num_ctx)
    given = [(q.clone(), ctx.detach(), own.clone()) for ctx in (near, far)]
    results = []
    for q_, ctx, own_ in given:
        inputs = [x.requires_grad_() for x in (q_, ctx, own_)]
        out = block_attention(q_, ctx, ctx, own_, own_, tables, implementation="triton")
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_no_anchors():
    tables = build_tables([], [], block_size=4, num_ctx=6)
    inputs = random_inputs(0, 6, heads=2, kv_heads=1, dim=8, dtype=torch.float32)
    for implementation in ("triton", "reference"):
        out = block_attention(*inputs, tables, implementation=implementation)
        assert out.shape == (0, 2, 8)
        grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
        assert grads[1] is None or not grads[1].any()


# An anchor stands at the end of a tile of 5 tokens.
@pytest.mark.parametrize("size", [4, 5])
def test_tables_cover_everything_once(size):
    lo, hi = zip(*LAYOUTS["documents of one token, and one without anchors"][1], strict=True)
    tables = build_tables(lo, hi, block_size=4, num_ctx=30, group_sizes=(2,), tile_sizes=(size,))
    anchors = [a for first, count in tables.groups(2).tolist() for a in range(first, first + count)]
    assert sorted(anchors) == list(range(6))
    tiles = tables.tiles(size).tolist()
    tokens = [t for start, end, *_ in tiles for t in range(start, end)]
    assert sorted(tokens) == list(range(30))
    for start, end, first, last, full in tiles:
        reached = [a for a in range(6) if lo[a] < end and hi[a] > start]
        assert reached == list(range(first, last))
        assert [a for a in reached if hi[a] >= end] == list(range(full, last))
    sizes = [last - first for _, _, first, last, _ in tiles]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_tables_move_as_one_buffer(count):
    """Parts of any length stay aligned: kernels are compiled for pointers that are."""
    tables = build_tables(
        [3] * count, [9] * count, block_size=4, num_ctx=30, group_sizes=(2, 3), tile_sizes=(4,)
    )
    moves = []
    moved = tables._map(lambda x: moves.append(x) or x.clone())
    assert len(moves) == 1
    before, after = ([x.lo, x.hi, x.groups(2), x.groups(3), x.tiles(4)] for x in (tables, moved))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
        assert new.untyped_storage().data_ptr() == moved.packed.data_ptr()
        assert new.storage_offset() % 4 == 0


@pytest.mark.parametrize(
    ("lo", "hi", "block", "message"),
    [
        ([0, 0], [5, 3], 4, "sorted"),
        ([0, 4], [5, 6], 4, "overlap"),
        ([0], [11], 4, r"\[0, 10\]"),
        ([2], [1], 4, "lo <= hi"),
        ([0], [1], 65, "2 to 64"),
    ],
)
def test_bad_anchors(lo, hi, block, message):
    with pytest.raises(ValueError, match=message):
        build_tables(lo, hi, block_size=block, num_ctx=10)


def test_bad_shapes():
    tables = build_tables([0], [3], block_size=4, num_ctx=6)
    q, ctx, own = torch.zeros(4, 4, 8), torch.zeros(6, 2, 8), torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="k_own has shape"):
        block_attention(q, ctx, ctx, own[:3], own, tables)
    with pytest.raises(ValueError, match="1 to 16"):
        block_attention(q[:, :3], ctx, ctx, own, own, tables)
    with pytest.raises(ValueError, match="window is 0"):
        block_attention(q, ctx, ctx, own, own, tables, window=0)
    with pytest.raises(ValueError, match="scale is 0"):
        block_attention(q, ctx, ctx, own, own, tables, scale=0)
    with pytest.raises(ValueError, match="rows"):
        block_attention(q[:3], ctx, ctx, own[:3], own[:3], tables)
    doubles = (x.double() for x in (q, ctx, ctx, own, own))
    with pytest.raises(ValueError, match="float64"):
        block_attention(*doubles, tables, implementation="triton")


# Head dimension, rows of a slot, block, window, in-block causality. 3, 5, 6 and 7 rows and blocks
# of 7 and 10 do not fill a tile; 16 x 64 rows take several.
GPU_SHAPES = [
    (128, 4, 16, None, False),
    (128, 4, 16, 100, True),
    (128, 4, 32, 300, False),
    (128, 1, 64, None, True),
    (128, 3, 16, None, False),
    (128, 5, 10, 50, False),
    (128, 6, 16, None, True),
    (128, 7, 7, None, False),
    (128, 16, 64, 200, False),
    (64, 2, 16, None, False),
    (96, 3, 10, 64, True),
    (256, 4, 16, None, False),
    (256, 1, 8, 100, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_without_context(dim):
    tables = build_tables([0, 0], [0, 0], block_size=16, num_ctx=0).to("cuda")
    shape = {"heads": 8, "kv_heads": 2, "dim": dim, "dtype": torch.bfloat16, "device": "cuda"}
    inputs = random_inputs(32, 0, **shape)
    results = [
        value_and_gradients(block_attention(*inputs, tables, implementation=each), inputs)
        for each in (None, "reference")
    ]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def gpu_case(dim, ratio, block, window, causal, *, dtype=torch.bfloat16, num_anchors=60, seed=0):
    """Three documents, of 1, 500 and 900 tokens, with random anchors: (inputs, tables, options)."""
    generator = torch.Generator().manual_seed(seed)
    lo, hi = [0, 0], [0, 1]
    for start, end in ((1, 501), (501, 1401)):
        picked = torch.randint(start, end, (num_anchors // 2,), generator=generator).sort().values
        lo += [start] * len(picked)
        hi += picked.tolist()
    tables = build_tables(lo, hi, block_size=block, num_ctx=1401).to("cuda")
    inputs = random_inputs(
        len(lo) * block, 1401, heads=2 * ratio, kv_heads=2, dim=dim, dtype=dtype, device="cuda",
        seed=seed,
    )  # fmt: skip
    return inputs, tables, {"window": window, "causal": causal}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_kernels_in_bfloat16(shape):
    inputs, tables, options = gpu_case(*shape)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = block_attention(*exact, tables, implementation="reference", **options)
    wanted = value_and_gradients(out, exact)
    got = value_and_gradients(block_attention(*inputs, tables, **options), inputs)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dk_own", "dv_own"), got, wanted, strict=True):
        error = (a.double() - b).flatten(1).norm(dim=1)
        size = b.flatten(1).norm(dim=1)
        # bfloat16 rounds operands and results by 2 ** -9; a row of a gradient is a sum of terms
        # that may cancel, so the worst row is held against the mean size too.
        assert (error.norm() / size.norm()).item() < 6e-3, name
        assert (error / (size + size.mean())).max().item() < 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
def test_the_same_bits_every_time(window):
    inputs, tables, options = gpu_case(128, 4, 16, window, False, num_anchors=400)
    first = value_and_gradients(block_attention(*inputs, tables, **options), inputs)
    for _ in range(100):
        again = value_and_gradients(block_attention(*inputs, tables, **options), inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_nothing_is_compiled_after_warm_up():
    import triton

    compiled = []
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 16}
    warm_up(windows=(None, 200), **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
        )
        for step in range(50):
            for window in (None, 200):
                inputs, tables, options = gpu_case(
                    128, 4, 16, window, False, num_anchors=2 + 2 * step, seed=step
                )
                value_and_gradients(block_attention(*inputs, tables, **options), inputs)
    assert not compiled
    sizes = table_sizes(inputs[0], num_kv_heads=2, block_size=16)
    assert set(sizes["group_sizes"]) == set(tables.groups_by_size)
    assert set(sizes["tile_sizes"]) == set(tables.tiles_by_size)


@pytest.mark.gpu
def test_unsupported_head_dimension():
    inputs, tables, options = gpu_case(80, 4, 16, None, False)
    with pytest.raises(ValueError, match="head dimension is 80"):
        block_attention(*inputs, tables, **options)
