"""Which sample comes when: the endless, deterministic order of samples over epochs and stores.

Every store is a sequence of rounds over its training samples: round 0 in the plan's order, later
rounds with windows of a few neighbouring packs in another order, and shuffled inside. An epoch
takes weight x size samples from every store, where the last epoch left off, and interleaves them
evenly. Nothing here depends on the number of processes or on memory.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_offline.common.errors import BadInput

# Packs shuffled together; the reader holds about two windows.
WINDOW_PACKS = 4


@dataclass(frozen=True, kw_only=True)
class StoreSamples:
    """The samples of one store that may be trained on, in plan order."""

    indices: Sequence[int]
    packs: Sequence[int]  # the pack of each
    weight: float = 1.0  # rounds an epoch


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One sample to train on, and the names its anchors are drawn under."""

    store: int
    index: int
    epoch: int
    occurrence: int


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a run stands: samples of `epoch` before `position` are done."""

    epoch: int = 0
    position: int = 0


class SampleOrder:
    """The order over one or several stores."""

    def __init__(self, stores: Sequence[StoreSamples], seed: int) -> None:
        for number, store in enumerate(stores):
            if not len(store.indices):
                raise BadInput(f"--cache number {number + 1} holds no training sample; drop it")
        if sum(store.weight * len(store.indices) for store in stores) < 1:
            raise BadInput("--weight: an epoch would have less than one sample; raise them")
        self._stores = list(stores)
        self._seed = seed
        self._epoch = functools.lru_cache(maxsize=2)(self._build_epoch)
        self._round = functools.lru_cache(maxsize=2 * len(stores))(self._build_round)

    def epoch_length(self, epoch: int) -> int:
        """Return the number of samples of an epoch, over all stores."""
        return sum(stop - start for start, stop in self._shares(epoch))

    def num_before(self, state: StreamState) -> int:
        """Return the number of samples of a run that stands at `state`."""
        return sum(map(self.epoch_length, range(state.epoch))) + state.position

    def take(self, state: StreamState, count: int) -> tuple[list[Draw], StreamState]:
        """Return the next `count` samples, across the ends of epochs, and the state after them."""
        draws: list[Draw] = []
        epoch, position = state.epoch, state.position
        while len(draws) < count:
            length = self.epoch_length(epoch)
            stop = min(length, position + count - len(draws))
            draws += [self._draw(epoch, at) for at in range(position, stop)]
            epoch, position = (epoch + 1, 0) if stop == length else (epoch, stop)
        return draws, StreamState(epoch=epoch, position=position)

    def _draw(self, epoch: int, position: int) -> Draw:
        store, at = (int(value) for value in self._epoch(epoch)[position])
        size = len(self._stores[store].indices)
        first_round = self._shares(epoch)[store][0] // size
        number, within = divmod(at, size)
        return Draw(
            store=store,
            index=int(self._round(store, number)[within]),
            epoch=epoch,
            occurrence=number - first_round,
        )

    def _shares(self, epoch: int) -> list[tuple[int, int]]:
        """Return for each store the part of its endless sequence that makes up the epoch."""
        shares = []
        for store in self._stores:
            per_epoch = store.weight * len(store.indices)
            shares.append((round(epoch * per_epoch), round((epoch + 1) * per_epoch)))
        return shares

    def _build_epoch(self, epoch: int) -> np.ndarray:
        """Return int64 [samples, 2]: store and place in its sequence, evenly interleaved."""
        rows, keys = [], []
        for number, (start, stop) in enumerate(self._shares(epoch)):
            places = np.arange(start, stop)
            rows.append(np.stack([np.full_like(places, number), places], axis=1))
            keys.append((np.arange(stop - start) + 0.5) / max(1, stop - start))
        return np.concatenate(rows)[np.argsort(np.concatenate(keys), kind="stable")]

    def _build_round(self, store: int, number: int) -> np.ndarray:
        indices = np.asarray(self._stores[store].indices, dtype=np.int64)
        if number == 0:
            return indices
        _, rank = np.unique(np.asarray(self._stores[store].packs), return_inverse=True)
        windows = rank // WINDOW_PACKS
        key = np.random.Philox(key=[self._seed % 2**64, (store << 40) + number])
        window_keys = key.random_raw(int(windows.max()) + 1)
        sample_keys = key.random_raw(len(indices))
        return indices[np.lexsort([sample_keys, window_keys[windows]])]
