"""Token ids and loss masks of a store's packs, without their states."""

from collections.abc import Iterator, Sequence

import numpy as np

from dflash_offline.common.cache import Cache
from dflash_offline.common.pack_reader import read_flat
from dflash_offline.common.store import LOSS_MASK, TOKENS


def corpus_tokens(cache: Cache) -> Iterator[np.ndarray]:
    """Yield the token ids of every committed pack, int32 [tokens of the pack]."""
    lengths = np.zeros(cache.plan.num_packs, np.int64)
    ends = cache.plan.column("start") + cache.plan.column("length")
    np.maximum.at(lengths, cache.plan.column("pack"), ends)
    for pack in cache.packs:
        yield _read(cache, TOKENS, pack)[: lengths[pack]]


def loss_masks(cache: Cache, pack: int, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the loss mask of samples of one pack, uint8 [T] each."""
    mask = _read(cache, LOSS_MASK, pack)
    for index in indices:
        sample = cache.plan.samples[index]
        yield mask[sample.start : sample.start + sample.length]


def _read(cache: Cache, name: str, pack: int) -> np.ndarray:
    record = cache.record(pack)["arrays"][name]
    return read_flat(cache.blobs, cache.schema, name, pack, record)
