"""Index tables of block attention, built on the CPU before a step touches the device.

An anchor sees context tokens [lo, hi): lo is the first token of its document, hi the anchor itself.
Anchors are sorted by document and position, so a document's anchors are neighbours, a group of
neighbours shares all context tiles but the last, and the anchors that see a context tile are a
contiguous range. What the kernels need follows from that in a few kB of int32; no mask exists.

Letters: T context tokens, A anchors, B block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Numbers of int32 to which parts of a buffer are padded: kernels are compiled for aligned pointers.
ALIGNED = 4


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """What `block_attention` needs to know about anchors; made by `build_tables`.

    `host_lo` and `host_hi` stay on the CPU; all else is where the kernels read it, what
    `build_tables` prepared as parts of one buffer, `packed`, that moves as a whole. Work items are
    listed heaviest first, one table for each group or tile size:

    groups: int32 [num_groups, 2], first anchor and number of anchors; never across documents.
    tiles: int32 [num_tiles, 5]: first token, end token, first anchor whose context reaches into the
        tile, end anchor (of the document), first anchor that sees the whole tile. Tiles partition
        [0, T); one that no anchor sees has an empty range.
    """

    block_size: int
    num_ctx: int
    group_sizes: tuple[int, ...]  # prepared
    tile_sizes: tuple[int, ...]  # prepared
    host_lo: Tensor  # int32 [A], CPU
    host_hi: Tensor  # int32 [A], CPU
    packed: Tensor  # int32, 1-D
    lo: Tensor  # int32 [A]
    hi: Tensor  # int32 [A]
    groups_by_size: dict[int, Tensor]
    tiles_by_size: dict[int, Tensor]

    @property
    def num_anchors(self) -> int:
        return self.host_lo.shape[0]

    def to(self, device, *, non_blocking: bool = True) -> BlockTables:
        """Copy to `device`: a few kB, without waiting for it where `pin_memory` was called."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> BlockTables:
        """Copy to page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> BlockTables:
        groups = {size: self.groups_by_size[size].shape for size in self.group_sizes}
        tiles = {size: self.tiles_by_size[size].shape for size in self.tile_sizes}
        return replace(self, **_parts(move(self.packed), self.num_anchors, groups, tiles))

    def groups(self, anchors: int) -> Tensor:
        """Return the groups of at most `anchors` anchors; built here if not prepared."""
        if anchors not in self.groups_by_size:
            table = _groups(self.host_lo.numpy(), self.host_hi.numpy(), anchors)
            self.groups_by_size[anchors] = self._place(table)
        return self.groups_by_size[anchors]

    def tiles(self, tokens: int) -> Tensor:
        """Return the context tiles of at most `tokens` tokens; built here if not prepared."""
        if tokens not in self.tiles_by_size:
            table = _tiles(self.host_lo.numpy(), self.host_hi.numpy(), tokens, self.num_ctx)
            self.tiles_by_size[tokens] = self._place(table)
        return self.tiles_by_size[tokens]

    def _place(self, table: np.ndarray) -> Tensor:
        return torch.from_numpy(table).to(self.lo.device, non_blocking=True)


def build_tables(
    lo,
    hi,
    *,
    block_size: int,
    num_ctx: int,
    group_sizes: tuple[int, ...] = (),
    tile_sizes: tuple[int, ...] = (),
) -> BlockTables:
    """Build the tables of one pass over `A` anchors, on the CPU.

    Args:
        lo: integer [A], first context token that the anchor sees: the start of its document.
        hi: integer [A], end of the context that it sees: the anchor's own row. An anchor with an
            empty context has hi = lo; rows that only pad a batch use lo = hi = num_ctx.
        block_size: slots in a block, 2 to 64.
        num_ctx: T, context tokens in the pass.
        group_sizes, tile_sizes: what to prepare now, in the loader, rather than at first use;
            `block_attention.table_sizes` names those that a model needs.

    Raises:
        ValueError: anchors are not sorted by (lo, hi), or leave [0, T], or two documents overlap.
    """
    lo = np.array(lo, dtype=np.int32)
    hi = np.array(hi, dtype=np.int32)
    _check(lo, hi, block_size, num_ctx)
    groups = {size: _groups(lo, hi, size) for size in group_sizes}
    tiles = {size: _tiles(lo, hi, size, num_ctx) for size in tile_sizes}
    tables = [lo, hi, *groups.values(), *tiles.values()]
    packed = np.zeros(sum(_padded(table.size) for table in tables), np.int32)
    at = 0
    for table in tables:
        packed[at : at + table.size] = table.reshape(-1)
        at += _padded(table.size)
    parts = _parts(
        torch.from_numpy(packed),
        len(lo),
        {size: table.shape for size, table in groups.items()},
        {size: table.shape for size, table in tiles.items()},
    )
    return BlockTables(
        block_size=block_size,
        num_ctx=num_ctx,
        group_sizes=tuple(groups),
        tile_sizes=tuple(tiles),
        host_lo=parts["lo"],
        host_hi=parts["hi"],
        **parts,
    )


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _parts(packed: Tensor, num_anchors: int, groups: dict, tiles: dict) -> dict:
    """Return the fields of `BlockTables` that are `packed` or parts of it.

    `groups` and `tiles` have the shapes of the tables of each size.
    """
    at = 0

    def part(shape: tuple[int, ...]) -> Tensor:
        nonlocal at
        columns = shape[1] if len(shape) == 2 else 1
        strides = (columns, 1)[: len(shape)]
        x = packed.as_strided(shape, strides, at)
        at += _padded(shape[0] * columns)
        return x

    return {
        "packed": packed,
        "lo": part((num_anchors,)),
        "hi": part((num_anchors,)),
        "groups_by_size": {size: part(shape) for size, shape in groups.items()},
        "tiles_by_size": {size: part(shape) for size, shape in tiles.items()},
    }


def _check(lo: np.ndarray, hi: np.ndarray, block_size: int, num_ctx: int) -> None:
    if lo.ndim != 1 or lo.shape != hi.shape:
        raise ValueError(f"lo and hi have shapes {lo.shape} and {hi.shape}, must be equal and 1-D")
    if not 2 <= block_size <= 64:
        raise ValueError(f"block_size is {block_size}, must be 2 to 64")
    if lo.size == 0:
        return
    if lo.min() < 0 or hi.max() > num_ctx or (hi < lo).any():
        raise ValueError(f"anchor contexts [lo, hi) must lie in [0, {num_ctx}] with lo <= hi")
    same = lo[1:] == lo[:-1]
    # The next of the document, or the next document.
    if (hi[:-1] <= np.where(same, hi[1:], lo[1:])).all():
        return
    if (lo[1:] < lo[:-1]).any() or (hi[1:] < hi[:-1])[same].any():
        raise ValueError("anchors must be sorted by (lo, hi): sort them within each document")
    raise ValueError("contexts of two documents overlap: lo must be the document's first token")


def _documents(lo: np.ndarray) -> np.ndarray:
    """Return the first anchor of every document that has anchors, and the number of anchors."""
    if lo.size == 0:
        return np.zeros(1, np.int64)
    edges = np.flatnonzero(lo[1:] != lo[:-1]) + 1
    return np.concatenate([[0], edges, [lo.size]])


def _groups(lo: np.ndarray, hi: np.ndarray, anchors_per_group: int) -> np.ndarray:
    firsts = _documents(lo)
    within = np.arange(lo.size) - np.repeat(firsts[:-1], firsts[1:] - firsts[:-1])
    first = np.flatnonzero(within % anchors_per_group == 0)
    end = np.concatenate([first[1:], [lo.size]])[: first.size]
    order = np.argsort(lo[first] - hi[end - 1], kind="stable")
    table = np.empty((first.size, 2), np.int32)
    table[:, 0] = first[order]
    table[:, 1] = (end - first)[order]
    return table


def _tiles(lo: np.ndarray, hi: np.ndarray, tile_tokens: int, num_ctx: int) -> np.ndarray:
    """Cut [0, T) at document starts and every `tile_tokens`, and find who sees each tile."""
    firsts = _documents(lo)
    # A span is what one document's anchors can see, or at first a gap that none can.
    starts = np.concatenate([[0], lo[firsts[:-1]], [num_ctx]])
    counts = -((starts[:-1] - starts[1:]) // tile_tokens)
    ends = np.cumsum(counts)
    start = np.repeat(starts[:-1] - (ends - counts) * tile_tokens, counts)
    start += np.arange(ends[-1]) * tile_tokens
    end = np.minimum(start + tile_tokens, np.repeat(starts[1:], counts))
    # A document's anchors end before the next one's context begins, so that `hi` is sorted.
    first = np.searchsorted(hi, start, side="right")
    last = np.repeat(firsts, counts)
    order = np.argsort(first - last, kind="stable")
    table = np.empty((order.size, 5), np.int32)
    for column, x in enumerate((start, end, first, last, np.searchsorted(hi, end))):
        table[:, column] = x[order]
    return table
