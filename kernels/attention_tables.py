"""Index tables of block attention, built on the CPU before a step touches the device.

An anchor sees context tokens [lo, hi): lo is the first token of its document, hi the anchor itself.
Anchors are sorted by document and position, so a document's anchors are neighbours, a group of
neighbours shares all context tiles but the last, and the anchors that see a context tile are a
contiguous range. What the kernels need follows from that in a few kB of int32; no mask exists.

Letters: T context tokens, A anchors, B block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """What `block_attention` needs to know about anchors; made by `build_tables`.

    `host_lo` and `host_hi` stay on the CPU; all else is where the kernels read it. Work items are
    listed heaviest first, one table for each group or tile size:

    groups: int32 [num_groups, 2], first anchor and number of anchors; never across documents.
    tiles: int32 [num_tiles, 5]: first token, end token, first anchor whose context reaches into the
        tile, end anchor (of the document), first anchor that sees the whole tile. Tiles partition
        [0, T); one that no anchor sees has an empty range.
    """

    block_size: int
    num_ctx: int
    host_lo: Tensor  # int32 [A], CPU
    host_hi: Tensor  # int32 [A], CPU
    lo: Tensor  # int32 [A]
    hi: Tensor  # int32 [A]
    groups_by_size: dict[int, Tensor] = field(default_factory=dict)
    tiles_by_size: dict[int, Tensor] = field(default_factory=dict)

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
        return replace(
            self,
            lo=move(self.lo),
            hi=move(self.hi),
            groups_by_size={size: move(x) for size, x in self.groups_by_size.items()},
            tiles_by_size={size: move(x) for size, x in self.tiles_by_size.items()},
        )

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
    host_lo, host_hi = torch.from_numpy(lo), torch.from_numpy(hi)
    tables = BlockTables(
        block_size=block_size,
        num_ctx=num_ctx,
        host_lo=host_lo,
        host_hi=host_hi,
        lo=host_lo,
        hi=host_hi,
    )
    for size in group_sizes:
        tables.groups(size)
    for size in tile_sizes:
        tables.tiles(size)
    return tables


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
    if (lo[1:] < lo[:-1]).any() or (hi[1:] < hi[:-1])[same].any():
        raise ValueError("anchors must be sorted by (lo, hi): sort them within each document")
    if (hi[:-1] > lo[1:])[~same].any():
        raise ValueError("contexts of two documents overlap: lo must be the document's first token")


def _documents(lo: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first and end anchor of every document that has anchors."""
    if lo.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    edges = np.flatnonzero(lo[1:] != lo[:-1]) + 1
    return np.concatenate([[0], edges]), np.concatenate([edges, [lo.size]])


def _groups(lo: np.ndarray, hi: np.ndarray, anchors_per_group: int) -> np.ndarray:
    firsts, ends = _documents(lo)
    counts = -(-(ends - firsts) // anchors_per_group)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(firsts, counts) + within * anchors_per_group
    count = np.minimum(np.repeat(ends, counts) - first, anchors_per_group)
    length = hi[first + count - 1] - lo[first] if first.size else first
    order = np.argsort(-length, kind="stable")
    return np.stack([first, count], axis=1)[order].astype(np.int32)


def _tiles(lo: np.ndarray, hi: np.ndarray, tile_tokens: int, num_ctx: int) -> np.ndarray:
    """Cut [0, T) at document starts and every `tile_tokens`, and find who sees each tile."""
    firsts, ends = _documents(lo)
    # A span is what one document's anchors can see, or a gap that none can.
    starts = np.concatenate([[0], lo[firsts], [num_ctx]]).astype(np.int64)
    span_first = np.concatenate([[0], firsts])
    span_end = np.concatenate([[0], ends])
    counts = -(-np.diff(starts) // tile_tokens)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts[:-1], counts) + within * tile_tokens
    end = np.minimum(start + tile_tokens, np.repeat(starts[1:], counts))
    first = np.empty_like(start)
    full = np.empty_like(start)
    last = np.repeat(span_end, counts)
    tile = 0
    for a, b, num in zip(span_first, span_end, counts, strict=True):
        part = slice(tile, tile + num)
        first[part] = a + np.searchsorted(hi[a:b], start[part], side="right")
        full[part] = a + np.searchsorted(hi[a:b], end[part], side="left")
        tile += num
    order = np.argsort(first - last, kind="stable")
    return np.stack([start, end, first, last, full], axis=1)[order].astype(np.int32)
