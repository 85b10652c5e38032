"""The attention kernel for Hopper, run as plain Python: its walk through its work, its values."""

import math

import pytest
import torch

from dflash_offline.kernels import attention_hopper, reference
from dflash_offline.kernels.attention_launch import RowTile, power_of_two
from dflash_offline.kernels.attention_tables import build_tables
from dflash_offline.kernels.optional_triton import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton's lower language: triton 3.6")


@pytest.fixture
def machine(gluon, monkeypatch):
    """Runs the kernel as plain Python."""
    machine = gluon.Machine(seed=0)
    gluon.patch(monkeypatch, machine, attention_hopper)
    return machine


def walk(gluon, machine, tables, groups, *, heads, chunks, window=0):
    """Return what every program takes: lists of (first anchor, head, chunk, tokens of context)."""
    num_items = groups.shape[0] * heads * chunks
    pointers = [gluon.Pointer(x) for x in (groups, tables.lo, tables.hi)]
    taken = []
    for index in range(*machine.programs):
        machine.program = (index,)
        steps = int(attention_hopper._num_steps(num_items))
        items = [
            attention_hopper._item(
                step, groups.shape[0], num_items, *pointers, tables.block_size, chunks, window
            )
            for step in range(steps)
        ]
        taken.append([(int(i[0]), int(i[2]), int(i[3]), int(i[7] - i[4])) for i in items])
    return taken


@pytest.mark.parametrize(
    ("num_anchors", "heads", "chunks", "programs"),
    [(1, 1, 1, 1), (7, 2, 1, 5), (12, 3, 2, 13), (20, 8, 1, 16), (9, 1, 3, 27), (5, 2, 1, 4)],
)
def test_every_item_is_taken_once(gluon, machine, num_anchors, heads, chunks, programs):
    machine.programs = (programs,)
    hi = [3 * i for i in range(num_anchors)]
    tables = build_tables([0] * num_anchors, hi, block_size=4, num_ctx=64)
    groups = tables.groups(2)
    taken = walk(gluon, machine, tables, groups, heads=heads, chunks=chunks)
    items = sorted(item[:3] for part in taken for item in part)
    firsts = groups[:, 0].tolist()
    wanted = [(f, h, c) for f in firsts for h in range(heads) for c in range(chunks)]
    assert items == sorted(wanted)


@pytest.mark.parametrize("heads", [7, 8])
def test_programs_get_equal_work(gluon, machine, heads):
    """One document: groups see from 0 to all of its tokens. Heaviest first for every head gives
    the heaviest program 1.2 times the mean."""
    machine.programs = (132,)
    hi = list(range(0, 4096, 8))
    tables = build_tables([0] * len(hi), hi, block_size=16, num_ctx=4096)
    taken = walk(gluon, machine, tables, tables.groups(2), heads=heads, chunks=1)
    # Two tiles' worth of tokens for the own block and the ends.
    work = [sum(item[3] + 256 for item in part) for part in taken]
    assert max(work) < 1.08 * sum(work) / len(work)


@pytest.mark.parametrize(("window", "tokens"), [(0, 40), (16, 40), (4, 40 - (10 - 4 + 1))])
def test_a_window_moves_the_start_of_the_context(gluon, machine, window, tokens):
    """The first anchor's slot 0, at 10, reaches back to 10 - 16 + 1 < 0, or to 10 - 4 + 1."""
    tables = build_tables([0, 0], [10, 40], block_size=4, num_ctx=64)
    taken = walk(gluon, machine, tables, tables.groups(2), heads=1, chunks=1, window=window)
    assert taken == [[(0, 0, 0, tokens)]]


# Name: (T, anchors as (lo, hi)). Documents are [lo, next lo).
LAYOUTS = {
    "one document": (300, [(0, 0), (0, 1), (0, 90), (0, 150), (0, 151), (0, 299)]),
    "documents": (200, [(0, 0), (1, 1), (2, 2), (2, 70), (120, 120), (120, 199), (200, 200)]),
}


# Ratio, block, window, in-block causality: blocks that divide a tile and do not, several in a tile
# and several tiles for one.
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("ratio", "block", "window", "causal"),
    [
        (4, 16, None, False),
        (4, 10, 50, True),
        (8, 7, 5, False),
        (4, 32, None, True),
        # An anchor has a group of its own, whose first tile only some slots see all of.
        (4, 32, 100, True),
        (16, 16, 9, True),
    ],
)
def test_values(gluon, monkeypatch, layout, ratio, block, window, causal):
    num_ctx, anchors = layout
    lo, hi = zip(*anchors, strict=True)
    heads, dim, rows, scale = 2, 32, block * len(lo), 32**-0.5
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(*shape, dim, dtype=torch.float64, generator=generator)
        for shape in [(rows, ratio * heads)] + 2 * [(num_ctx, heads)] + 2 * [(rows, heads)]
    ]
    tables = build_tables(lo, hi, block_size=block, num_ctx=num_ctx)
    tile = RowTile.of(128, ratio, block)
    own_tokens = max(16, power_of_two(tile.anchors * block))
    groups = tables.groups(tile.anchors)
    items = groups.shape[0] * heads * tile.chunks
    boxes = [[64 // ratio, ratio, dim]] + 2 * [[64, dim]] + 2 * [[own_tokens, dim]]
    sources = [gluon.Descriptor(x, box) for x, box in zip(inputs, boxes, strict=True)]
    for seed in range(2):
        machine = gluon.Machine(seed=seed)
        gluon.patch(monkeypatch, machine, attention_hopper)
        out = torch.full_like(inputs[0], float("nan"))
        lse = torch.full((heads, rows, ratio), float("nan"), dtype=torch.float64)
        pointers = [gluon.Pointer(x) for x in (out, lse, tables.lo, tables.hi, groups)]
        gluon.launch(
            machine, attention_hopper.block_attention_fwd_kernel, (3,), *sources, *pointers,
            scale * math.log2(math.e), rows, groups.shape[0], items,
            HQ=ratio * heads, R=ratio, B=block, D=dim, SLOTS=tile.slots, CHUNKS=tile.chunks,
            WINDOW=window or 0, CAUSAL=causal, BLOCK_N=64, BLOCK_C=own_tokens, STAGES=2,
        )  # fmt: skip
        wanted = reference.block_attention(
            *inputs, tables, window=window, causal=causal, scale=scale
        )
        assert (out - wanted).abs().max() < 1e-12
        assert lse.isfinite().all()
