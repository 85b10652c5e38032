"""Rows that are a prefix of another row, as a conversation expanded turn by turn gives.

A causal target's states do not depend on what follows, so the longer row holds the states of the
shorter one, and only its loss mask has to grow. Rows are merged within a source and licence, by
which samples are selected later.
"""

from dataclasses import dataclass

import numpy as np

from dflash_offline.common.store import supervised
from dflash_offline.extract.token_rows import TokenRows

# Places of the filter for each row: one in as many other prefixes gets past it.
_FILTER_BITS = 5


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What merging leaves.

    Attributes:
        kept: rows that stand for themselves, int64, ascending.
        num_rows: rows that are part of another.
        num_tokens: tokens of those rows, which need no forward and no room.
    """

    kept: np.ndarray
    num_rows: int
    num_tokens: int


def merge_prefixes(rows: TokenRows) -> Merge:
    """Supervise in the longest row what its prefixes supervise; equal rows are prefixes too.

    Two rows are compared token by token before one is given up.
    """
    part_of = _longer_rows(rows)
    merged = np.flatnonzero(part_of >= 0)
    for index in merged:
        mask, length = rows.mask_of(int(part_of[index])), rows.lengths[index]
        mask[:length] = union(mask[:length], rows.mask_of(int(index)))
    return Merge(
        kept=np.flatnonzero(part_of < 0),
        num_rows=len(merged),
        num_tokens=int(rows.lengths[merged].sum()),
    )


def union(mask: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return `LossMask` bits, uint8 [T], that supervise what either of two masks does."""
    ours, theirs = supervised(mask), supervised(other)
    return np.where(theirs, np.where(ours, mask | other, other), mask)


def _longer_rows(rows: TokenRows) -> np.ndarray:
    """Return for each row the longest one that begins with it, the first of several; else -1."""
    weights = np.random.Philox(key=0).random_raw(int(rows.lengths.max()))
    sums = np.array([_prefix_sums(rows, i, weights)[-1] for i in range(len(rows))], np.uint64)
    labels = _labels(rows)
    part_of = np.full(len(rows), -1, np.int64)
    # Stable, so that among equal rows the first one comes first.
    order = np.lexsort((labels, rows.lengths, sums))
    first = order[0]
    for index in order[1:]:
        if labels[index] == labels[first] and _begins_with(rows, index, first, equal=True):
            part_of[index] = first
        else:
            first = index
    unique = order[part_of[order] < 0]
    unique_sums = sums[unique]
    shift = np.uint64(64 - min(28, len(unique).bit_length() + _FILTER_BITS))
    is_seen = np.zeros(1 << int(64 - shift), bool)
    is_seen[unique_sums >> shift] = True
    for index in np.sort(unique):
        prefixes = _prefix_sums(rows, index, weights)[:-1]
        maybe = prefixes[is_seen[prefixes >> shift]]
        starts = np.searchsorted(unique_sums, maybe, side="left")
        stops = np.searchsorted(unique_sums, maybe, side="right")
        for start, stop in zip(starts, stops, strict=True):
            for short in unique[start:stop]:
                known = part_of[short]
                if (
                    labels[short] == labels[index]
                    and rows.lengths[short] < rows.lengths[index]
                    and (known < 0 or rows.lengths[known] < rows.lengths[index])
                    and _begins_with(rows, index, short)
                ):
                    part_of[short] = index
    # Equal rows follow the one they were merged into.
    again = part_of >= 0
    again[again] = part_of[part_of[again]] >= 0
    part_of[again] = part_of[part_of[again]]
    return part_of


def _prefix_sums(rows: TokenRows, index: int, weights: np.ndarray) -> np.ndarray:
    """Return a hash of every prefix of a row, uint64 [T]: a sum of tokens with random weights."""
    tokens = rows.tokens_of(int(index)).astype(np.uint64)
    return np.cumsum((tokens + np.uint64(1)) * weights[: len(tokens)])


def _begins_with(rows: TokenRows, long: int, short: int, *, equal: bool = False) -> bool:
    length = rows.lengths[short]
    if rows.lengths[long] < length or (equal and rows.lengths[long] != length):
        return False
    return np.array_equal(rows.tokens_of(int(long))[:length], rows.tokens_of(int(short)))


def _labels(rows: TokenRows) -> np.ndarray:
    """Return a number for each row that only rows of its source and licence share."""
    codes = [
        rows.column(name).combine_chunks().dictionary_encode().indices.to_numpy()
        for name in ("source", "licence")
    ]
    return codes[0].astype(np.int64) * len(rows) + codes[1]
