"""The side of a store that reads: committed packs as documents, every byte checked.

Records alone say what exists. An inner chunk must match its own checksum and the record's, so a
reader returns what was written or raises. Letters: K captured layers, T tokens, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, LocalBlobs, blobs_at
from dflash_offline.common.errors import BadInput, MissingStore
from dflash_offline.common.pack_index import PackIndex, read_pack_index, read_record
from dflash_offline.common.pack_reader import read_chunks, read_flat
from dflash_offline.common.store import (
    FEATURES,
    FINAL,
    LOSS_MASK,
    TARGET,
    TOKENS,
    Sample,
    Schema,
    count_plans,
    manifest_key,
    read_header,
    read_plan,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Document:
    """One sample with its states."""

    index: int
    id: str
    source: str
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], LossMask bits
    features: np.ndarray  # uint16 [K, T, H], bfloat16 bit patterns
    final: np.ndarray | None  # uint16 [T, H]

    def features_torch(self) -> "torch.Tensor":
        """Return the features as bfloat16 [K, T, H], sharing memory."""
        return as_bfloat16(self.features)

    def final_torch(self) -> "torch.Tensor":
        """Return the final state as bfloat16 [T, H], sharing memory."""
        assert self.final is not None, "the store holds no final state"
        return as_bfloat16(self.final)


def as_bfloat16(bits: np.ndarray) -> "torch.Tensor":
    """View uint16 bit patterns as a bfloat16 tensor of the same shape."""
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class Cache:
    """An open store. Get one from `open_cache`.

    Attributes:
        plan: all samples, also those not committed yet.
        packs: committed pack numbers, ascending.
        num_quarantined: samples that failed in extraction; they are in none of the lists below.
        samples: indices into `plan.samples` that can be read, in plan order.
        training_samples, held_out_samples: the same, divided.
    """

    def __init__(self, blobs: Blobs, *, index: PackIndex | None = None) -> None:
        self.blobs = blobs
        header = read_header(blobs)
        assert header is not None
        self.schema: Schema = header.schema
        self.identity = header.identity
        self.options = header.options
        self.plan, _ = read_plan(blobs, batches=False)
        self._index = index or read_pack_index(blobs, self.plan.num_packs)
        self.packs = sorted(self._index.packs)
        bad = [index for _, members in self._index.packs.values() for index in members]
        usable = np.isin(self.plan.column("pack"), self.packs)
        usable[bad] = False
        self.num_quarantined = len(bad)
        held_out = self.plan.column("held_out")
        self.samples: list[int] = np.flatnonzero(usable).tolist()
        self.held_out_samples: list[int] = np.flatnonzero(usable & held_out).tolist()
        self.training_samples: list[int] = np.flatnonzero(usable & ~held_out).tolist()

    @property
    def is_complete(self) -> bool:
        """Whether every planned pack is committed."""
        return len(self.packs) == self.plan.num_packs

    def __getitem__(self, sample_id: str) -> Document:
        found = np.flatnonzero(self.plan.column("id") == sample_id)
        if len(found) == 0 or int(found[0]) not in self.samples:
            raise KeyError(sample_id)
        return self.read(int(found[0]))

    def record(self, pack: int) -> dict[str, Any]:
        """Return the commit record of a pack."""
        return read_record(self.blobs, self._index, pack)

    def read(self, index: int, layers: Sequence[int] | None = None) -> Document:
        """Read one sample; `layers` are layer ids, all of the store's when `None`.

        Raises:
            DamagedStore: a byte is not what was written; names pack and array.
        """
        return self.read_many([index], layers)[0]

    def read_many(
        self, indices: Sequence[int], layers: Sequence[int] | None = None
    ) -> list[Document]:
        """Read samples in the given order, each pack's bytes once.

        Documents of one pack share a buffer, so holding one holds them all.
        """
        slots = self._slots(layers)
        by_pack: dict[int, list[Sample]] = {}
        for index in indices:
            sample = self.plan.samples[index]
            by_pack.setdefault(sample.pack, []).append(sample)
        parts = {pack: self._read_pack(pack, members, slots) for pack, members in by_pack.items()}
        return [self._document(index, parts[self.plan.samples[index].pack]) for index in indices]

    def target_path(self) -> Path:
        """Return the local folder with the target's config, tokenizer and tensors."""
        assert isinstance(self.blobs, LocalBlobs), "target files are read from local disks"
        return self.blobs.root / TARGET

    @property
    def target_config(self) -> dict[str, Any]:
        """Return the target's Hugging Face config."""
        import json

        return json.loads(self.blobs.read(f"{TARGET}/config.json"))

    def target_tensor(self, name: str) -> "torch.Tensor":
        """Return `embed_tokens` [V, H], `lm_head` [V, H] (the embedding if tied) or `norm` [H]."""
        from safetensors import safe_open

        with safe_open(self.target_path() / "tensors.safetensors", framework="pt") as file:
            names = set(file.keys())
            if name == "lm_head" and "lm_head.weight" not in names:
                name = "embed_tokens"
            return file.get_tensor(f"{name}.weight")

    def fixed_files(self) -> dict[str, str]:
        """Return the files that no pack changes, with the SHA-256 that the manifests state.

        Raises:
            DamagedStore: a manifest is not what was written.
        """
        stated: dict[str, str] = {}
        for number in range(count_plans(self.blobs)):
            # A later plan's manifest holds the newer digest of what an append replaced.
            key = manifest_key(number)
            stated |= records.unseal(self.blobs.read(key), key)["files"]
        return stated

    def _slots(self, layers: Sequence[int] | None) -> list[int]:
        stored = self.schema.layers
        if layers is None:
            return list(range(len(stored)))
        missing = [layer for layer in layers if layer not in stored]
        if missing:
            raise BadInput(
                f"--layers {','.join(map(str, layers))} asks for layer {missing[0]}, but the store "
                f"holds {', '.join(map(str, stored))}; choose among those"
            )
        return [stored.index(layer) for layer in layers]

    def _read_pack(self, pack: int, members: Sequence[Sample], slots: Sequence[int]) -> "_PackPart":
        """Read the inner chunks that cover some samples of a pack."""
        size = self.schema.chunk_tokens
        first = min(s.start for s in members) // size
        last = -(-max(s.start + s.length for s in members) // size)
        record = self.record(pack)["arrays"]
        per_layer = self.schema.pack_tokens // size

        def state(name: str, layer_slots: Sequence[int]) -> np.ndarray:
            out = np.empty((len(layer_slots), (last - first) * size, self.schema.hidden), np.uint16)
            wanted = [
                (slot * per_layer + chunk, out[row, (chunk - first) * size :][:size])
                for row, slot in enumerate(layer_slots)
                for chunk in range(first, last)
            ]
            read_chunks(self.blobs, self.schema, name, pack, record[name], wanted)
            return out

        return _PackPart(
            first_token=first * size,
            tokens=read_flat(self.blobs, self.schema, TOKENS, pack, record[TOKENS]),
            loss_mask=read_flat(self.blobs, self.schema, LOSS_MASK, pack, record[LOSS_MASK]),
            features=state(FEATURES, slots),
            final=state(FINAL, [0])[0] if FINAL in self.schema.state_arrays else None,
        )

    def _document(self, index: int, part: "_PackPart") -> Document:
        sample = self.plan.samples[index]
        whole = slice(sample.start, sample.start + sample.length)
        rows = slice(whole.start - part.first_token, whole.stop - part.first_token)
        return Document(
            index=index,
            id=sample.id,
            source=sample.source,
            tokens=part.tokens[whole],
            loss_mask=part.loss_mask[whole],
            features=part.features[:, rows],
            final=None if part.final is None else part.final[rows],
        )


@dataclass(frozen=True, kw_only=True)
class _PackPart:
    first_token: int
    tokens: np.ndarray  # int32 [pack_tokens]
    loss_mask: np.ndarray  # uint8 [pack_tokens]
    features: np.ndarray  # uint16 [K, part, H]
    final: np.ndarray | None  # uint16 [part, H]


def open_cache(url: str, *, partial: bool = False) -> Cache:
    """Open a store for reading.

    Args:
        url: a local folder.
        partial: accept a store whose extraction has not finished.

    Raises:
        MissingStore: there is no store, or nothing is committed.
        BadInput: a newer format, or an unfinished store without `partial`.
        DamagedStore: the plan or a record is not what was written.
    """
    cache = Cache(blobs_at(url))
    if not cache.packs:
        raise MissingStore(f"{url} has no committed pack yet; finish dflash-extract first")
    if not (partial or cache.is_complete):
        raise BadInput(
            f"{url} is unfinished ({len(cache.packs)} of {cache.plan.num_packs} packs); run the "
            "same dflash-extract again to finish it, or add --partial to use what is there"
        )
    return cache
