"""Samples of a store in host memory: read a pack at a time, ready to be cut into passes.

Letters: T context tokens, A anchors, K captured layers, H hidden.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dflash_offline.common.cache import Cache, CodedDocument, Document
from dflash_offline.common.quantize import decode_final
from dflash_offline.common.store import FEATURES, SCALES, supervised
from dflash_offline.kernels.coded_states import CodedStates, coded_states
from dflash_offline.train.anchors import AnchoredDocument, BlockLayout


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What of a sample is trained on, and how much at a time."""

    layout: BlockLayout
    layers: tuple[int, ...]
    num_anchors: int
    rows_per_pass: int
    seed: int
    supervise: str = "all"
    skip_damaged: bool = False  # leave samples of packs that cannot be read out
    with_final: bool = False  # also gather the final state at every labelled row
    num_topk: int = 0  # the teacher's best tokens to gather there
    dtype: torch.dtype = torch.bfloat16  # of the final states handed over
    pinned: bool = False
    # What `block_attention.table_sizes` says for the drafter, where kernels will read the tables.
    table_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadedDocument:
    """A sample in host memory, ready to be cut into passes."""

    anchored: AnchoredDocument
    features: CodedStates  # [K, T, H]
    final: torch.Tensor | None = None  # bfloat16 [T, H]


class PackReader:
    """Documents of one store by pack."""

    def __init__(self, cache: Cache, options: StreamOptions, wanted: Sequence[int]) -> None:
        self._cache = cache
        self._options = options
        self._members: dict[int, list[int]] = {}
        for index in wanted:
            self._members.setdefault(cache.plan.samples[index].pack, []).append(index)
        self._held: dict[int, Future[dict[int, LoadedDocument]]] = {}
        self._lock = threading.Lock()  # of what several packs' readers change
        self._decoding: dict[str, torch.Tensor | None] = {}
        self.bytes_read = 0.0  # of packs as they are stored, about

    def pack_of(self, index: int) -> int:
        """Return the pack that a sample is in."""
        return self._cache.plan.samples[index].pack

    def holds(self, pack: int) -> bool:
        """Say whether a pack is in memory or being read."""
        return pack in self._held

    def hold(self, packs: Sequence[int], pool: ThreadPoolExecutor) -> None:
        """Have these packs read, in this order, and drop all others."""
        for pack in set(self._held) - set(packs):
            self._held.pop(pack).cancel()
        for pack in packs:
            if pack not in self._held:
                self._held[pack] = pool.submit(self._read, self._members[pack])

    def document(self, index: int) -> LoadedDocument:
        """Return a sample without anchors, of a pack that is held; waits for it."""
        return self._held[self.pack_of(index)].result()[index]

    def _read(self, members: list[int]) -> dict[int, LoadedDocument]:
        cache, layers = self._cache, self._options.layers
        share = len(layers) / len(cache.schema.layers)
        arrays = cache.record(self.pack_of(members[0]))["arrays"]
        with self._lock:
            for name, stated in arrays.items():
                self.bytes_read += stated["bytes"] * (share if name in (FEATURES, SCALES) else 1)
        if cache.schema.is_coded:
            return {coded.index: self._coded(coded) for coded in cache.read_codes(members, layers)}
        return {
            document.index: LoadedDocument(
                anchored=self._without_anchors(document),
                features=CodedStates(codec="raw", values=document.features_torch()),
                final=document.final_torch() if self._options.with_final else None,
            )
            for document in cache.read_many(members, layers)
        }

    def _coded(self, document: CodedDocument) -> LoadedDocument:
        calibration, states = self._cache.calibration, document.states
        coded = coded_states(states, calibration, document.slots)
        with self._lock:
            if not self._decoding:
                shared = {name: vars(coded)[name] for name in ("mean", "gain", "codebook")}
                self._decoding = {name: self._placed(each) for name, each in shared.items()}
        return LoadedDocument(
            anchored=self._without_anchors(document),
            # The same tensors for all documents show that they can be decoded together.
            features=replace(coded, **self._decoding),
            final=decode_final(states, calibration) if self._options.with_final else None,
        )

    def _placed(self, shared: torch.Tensor | None) -> torch.Tensor | None:
        return shared.pin_memory() if shared is not None and self._options.pinned else shared

    def _without_anchors(self, document: Document | CodedDocument) -> AnchoredDocument:
        return AnchoredDocument(
            tokens=document.tokens,
            supervised=supervised(document.loss_mask, self._options.supervise),
            anchors=np.empty(0, np.int64),
            topk=document.topk if self._options.num_topk else None,
        )
