"""The walk of the attention kernel for Hopper through its work, run as plain Python."""

from types import SimpleNamespace

import pytest
import torch

from dflash_offline.kernels import attention_hopper
from dflash_offline.kernels.attention_tables import build_tables
from dflash_offline.kernels.optional_triton import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton's lower language: triton 3.6")


class Pointer:
    """A pointer into a tensor, as kernels add to it."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, offset):
        return Pointer(self.values, self.at + int(offset))

    def __sub__(self, offset):
        return self + -offset


@pytest.fixture
def program(monkeypatch):
    """Stand in for the language; the program's number is what the test sets."""
    place = SimpleNamespace(index=0, count=1)
    language = SimpleNamespace(
        program_id=lambda _axis: torch.tensor(place.index),
        num_programs=lambda _axis: place.count,
        minimum=min,
        maximum=max,
        int32=torch.int32,
        load=lambda pointer: pointer.values.flatten()[pointer.at],
    )
    monkeypatch.setattr(attention_hopper, "gl", language)
    return place


def walk(program, tables, groups, *, heads, chunks, window=0):
    """Return what every program takes: lists of (first anchor, head, chunk, tokens of context)."""
    num_items = groups.shape[0] * heads * chunks
    pointers = [Pointer(x) for x in (groups, tables.lo, tables.hi)]
    taken = []
    for index in range(program.count):
        program.index = index
        steps = int(attention_hopper._num_steps.fn(num_items))
        items = [
            attention_hopper._item.fn(
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
def test_every_item_is_taken_once(program, num_anchors, heads, chunks, programs):
    program.count = programs
    hi = [3 * i for i in range(num_anchors)]
    tables = build_tables([0] * num_anchors, hi, block_size=4, num_ctx=64)
    groups = tables.groups(2)
    taken = walk(program, tables, groups, heads=heads, chunks=chunks)
    items = sorted(item[:3] for part in taken for item in part)
    firsts = groups[:, 0].tolist()
    wanted = [(f, h, c) for f in firsts for h in range(heads) for c in range(chunks)]
    assert items == sorted(wanted)


@pytest.mark.parametrize("heads", [7, 8])
def test_programs_get_equal_work(program, heads):
    """One document: groups see from 0 to all of its tokens. Heaviest first for every head gives
    the heaviest program 1.2 times the mean."""
    program.count = 132
    hi = list(range(0, 4096, 8))
    tables = build_tables([0] * len(hi), hi, block_size=16, num_ctx=4096)
    taken = walk(program, tables, tables.groups(2), heads=heads, chunks=1)
    # Two tiles' worth of tokens for the own block and the ends.
    work = [sum(item[3] + 256 for item in part) for part in taken]
    assert max(work) < 1.08 * sum(work) / len(work)


@pytest.mark.parametrize(("window", "tokens"), [(0, 40), (16, 40), (4, 40 - (10 - 4 + 1))])
def test_a_window_moves_the_start_of_the_context(program, window, tokens):
    """The first anchor's slot 0, at 10, reaches back to 10 - 16 + 1 < 0, or to 10 - 4 + 1."""
    tables = build_tables([0, 0], [10, 40], block_size=4, num_ctx=64)
    taken = walk(program, tables, tables.groups(2), heads=1, chunks=1, window=window)
    assert taken == [[(0, 0, 0, tokens)]]
