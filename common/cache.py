"""The side of a store that reads: committed packs as documents, every byte checked.

Records alone say what exists. An inner chunk must match its own checksum and the record's, so a
reader returns what was written or raises. Letters: K captured layers, T tokens, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.common.blobs import Blobs, LocalBlobs, blobs_at
from dflash_offline.common.calibration_file import calibration_digests, read_calibration
from dflash_offline.common.errors import BadInput, DamagedStore, MissingStore
from dflash_offline.common.local_copy import check_file, local_copy
from dflash_offline.common.pack_arrays import (
    ReadChunks,
    as_bfloat16,
    bits_of,
    read_encoded,
    read_rows,
    read_topk,
)
from dflash_offline.common.pack_index import PackIndex, read_pack_index, read_record
from dflash_offline.common.pack_reader import read_chunks, read_flat
from dflash_offline.common.read_cache import ReadCache
from dflash_offline.common.store import (
    CALIBRATION_MANIFEST_KEY,
    COMMIT,
    FEATURES,
    FINAL,
    LOSS_MASK,
    MANIFEST_KEY,
    TARGET,
    TOKENS,
    Sample,
    Schema,
    exists,
    read_fixed,
    read_header,
    read_plan,
    stated_digests,
)
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.topk import TopK

if TYPE_CHECKING:
    import torch

    from dflash_offline.common.quantize import Calibration, EncodedStates


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What a sample has beside its states."""

    index: int
    id: str
    source: str
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], LossMask bits
    topk: TopK | None = None


@dataclass(frozen=True, kw_only=True)
class Document(_Text):
    """One sample with its states."""

    features: np.ndarray  # uint16 [K, T, H], bfloat16 bit patterns
    final: np.ndarray | None  # uint16 [T, H]

    def features_torch(self) -> "torch.Tensor":
        """Return the features as bfloat16 [K, T, H], sharing memory."""
        return as_bfloat16(self.features)

    def final_torch(self) -> "torch.Tensor":
        """Return the final state as bfloat16 [T, H], sharing memory."""
        assert self.final is not None, "the store holds no final state"
        return as_bfloat16(self.final)


@dataclass(frozen=True, kw_only=True)
class CodedDocument(_Text):
    """One sample of an int store, not decoded; `kernels` decode it on a GPU."""

    states: "EncodedStates"  # of T tokens
    slots: tuple[int, ...]  # row of the calibration of each layer in `states`


class Cache:
    """An open store. Get one from `open_cache`.

    Attributes:
        plan: all samples, also those not committed yet.
        packs: committed pack numbers, ascending.
        num_unplanned: packs that are there beyond the plan.
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
        # There are more where the manifest of their plan was lost, or written a moment ago.
        self.packs = sorted(p for p in self._index.packs if p < self.plan.num_packs)
        self.num_unplanned = len(self._index.packs) - len(self.packs)
        bad = [index for pack in self.packs for index in self._index.packs[pack][1]]
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
        parts = {
            pack: self._read_pack(pack, tokens, slots) for pack, tokens in self._spans(indices)
        }
        return [self._document(index, parts[self.plan.samples[index].pack]) for index in indices]

    def read_codes(
        self, indices: Sequence[int], layers: Sequence[int] | None = None
    ) -> list[CodedDocument]:
        """Read samples of an int store without decoding them, each pack's bytes once.

        Their layers decode with rows `slots` of `calibration`, the final state with its last row.
        """
        assert self.schema.is_coded, f"codec {self.schema.codec} holds no codes"
        slots = self._slots(layers)
        parts = {}
        for pack, tokens in self._spans(indices):
            arrays = self.record(pack)["arrays"]
            read = self._reader(pack, arrays)
            codes = read_encoded(read, self.schema, slots=slots, tokens=tokens)
            best = read_topk(read, self.schema, tokens=tokens)
            parts[pack] = tokens.start, self._read_tokens(pack, arrays), codes, best
        documents = []
        for index in indices:
            sample = self.plan.samples[index]
            first, (ids, mask), codes, best = parts[sample.pack]
            stop = sample.start + sample.length
            documents.append(
                CodedDocument(
                    index=index,
                    id=sample.id,
                    source=sample.source,
                    tokens=ids[sample.start : stop],
                    loss_mask=mask[sample.start : stop],
                    states=codes.rows(sample.start - first, stop - first),
                    slots=tuple(slots),
                    topk=None if best is None else best[sample.start - first : stop - first],
                )
            )
        return documents

    @cached_property
    def calibration(self) -> "Calibration":
        """What the codes of an int store are decoded with, on the CPU.

        Raises:
            DamagedStore: it is missing or not what was written.
        """
        calibration = read_calibration(self.blobs)
        if calibration is None:
            raise DamagedStore(f"{CALIBRATION_MANIFEST_KEY} is missing")
        return calibration

    @cached_property
    def target_path(self) -> Path:
        """The local folder with the target's config, tokenizer and tensors, checked.

        Raises:
            DamagedStore: a file is missing or not what was written.
        """
        stated = self.fixed_files()
        if not isinstance(self.blobs, LocalBlobs):
            return local_copy(self.blobs, stated, TARGET)
        for key, sha in stated.items():
            if key.startswith(f"{TARGET}/"):
                check_file(self.blobs, key, sha)
        return self.blobs.root / TARGET

    @property
    def target_config(self) -> dict[str, Any]:
        """Return the target's Hugging Face config."""
        import json

        return json.loads(read_fixed(self.blobs, f"{TARGET}/config.json", self.fixed_files()))

    def target_tensor(self, name: str) -> "torch.Tensor":
        """Return `embed_tokens` [V, H], `lm_head` [V, H] (the embedding if tied) or `norm` [H]."""
        from safetensors import safe_open

        with safe_open(self.target_path / "tensors.safetensors", framework="pt") as file:
            names = set(file.keys())
            if name == "lm_head" and "lm_head.weight" not in names:
                name = "embed_tokens"
            return file.get_tensor(f"{name}.weight")

    def fixed_files(self) -> dict[str, str]:
        """Return the files that no pack changes, with the SHA-256 that the manifests state.

        Raises:
            DamagedStore: a manifest is missing or not what was written.
        """
        stated = stated_digests(self.blobs, required=True)
        digests = calibration_digests(self.blobs)
        if self.schema.is_coded and not digests:
            raise DamagedStore(f"{CALIBRATION_MANIFEST_KEY} is missing")
        return stated | digests

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

    def _spans(self, indices: Sequence[int]) -> list[tuple[int, range]]:
        """Return each pack that holds some of the samples, with the tokens from first to last."""
        by_pack: dict[int, list[Sample]] = {}
        for index in indices:
            sample = self.plan.samples[index]
            by_pack.setdefault(sample.pack, []).append(sample)
        return [
            (pack, range(min(s.start for s in some), max(s.start + s.length for s in some)))
            for pack, some in by_pack.items()
        ]

    def _reader(self, pack: int, arrays: Mapping[str, Any]) -> ReadChunks:
        def read(name: str, wanted: Sequence[tuple[int, np.ndarray]]) -> None:
            read_chunks(self.blobs, self.schema, name, pack, arrays[name], wanted)

        return read

    def _read_tokens(self, pack: int, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 token ids and uint8 loss mask, [pack_tokens]."""
        return (
            read_flat(self.blobs, self.schema, TOKENS, pack, arrays[TOKENS]),
            read_flat(self.blobs, self.schema, LOSS_MASK, pack, arrays[LOSS_MASK]),
        )

    def _read_pack(self, pack: int, tokens: range, slots: Sequence[int]) -> "_PackPart":
        """Read the inner chunks that cover some tokens of a pack."""
        stated = self.record(pack)["arrays"]
        read = self._reader(pack, stated)
        if self.schema.is_coded:
            features, final = self._decoded(
                read_encoded(read, self.schema, slots=slots, tokens=tokens), slots
            )
        else:
            arrays = self.schema.arrays
            features = read_rows(read, arrays[FEATURES], FEATURES, slots=slots, tokens=tokens)
            final = None
            if FINAL in arrays:
                final = read_rows(read, arrays[FINAL], FINAL, slots=[0], tokens=tokens)[0]
        ids, mask = self._read_tokens(pack, stated)
        return _PackPart(
            first_token=tokens.start,
            tokens=ids,
            loss_mask=mask,
            features=features,
            final=final,
            topk=read_topk(read, self.schema, tokens=tokens),
        )

    def _decoded(
        self, codes: "EncodedStates", slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        from dflash_offline.common.quantize import decode_states

        features, final = decode_states(codes, self.calibration, slots)
        return bits_of(features), None if final is None else bits_of(final)

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
            topk=None if part.topk is None else part.topk[rows],
        )


@dataclass(frozen=True, kw_only=True)
class _PackPart:
    first_token: int
    tokens: np.ndarray  # int32 [pack_tokens]
    loss_mask: np.ndarray  # uint8 [pack_tokens]
    features: np.ndarray  # uint16 [K, part, H]
    final: np.ndarray | None  # uint16 [part, H]
    topk: TopK | None


def open_cache(
    url: str,
    *,
    partial: bool = False,
    storage_options: Sequence[str] = (),
    read_cache: Path | None = None,
    read_cache_gb: float = 100.0,
) -> Cache:
    """Open a store for reading.

    Args:
        url: a local folder or any fsspec address.
        partial: accept a store whose extraction has not finished.
        storage_options: `KEY=VALUE` each, for object storage; see `blobs_at`.
        read_cache: local folder that keeps what was read from object storage.
        read_cache_gb: size that it may reach, in GB.

    Raises:
        MissingStore: there is no store, or nothing is committed.
        BadInput: a newer format, or an unfinished store without `partial`.
        DamagedStore: the plan or a record is not what was written.
    """
    blobs = blobs_at(url, storage_options)
    if read_cache is not None and not isinstance(blobs, LocalBlobs):
        blobs = ReadCache(blobs, read_cache, limit_bytes=int(read_cache_gb * 1e9))
    # The manifest closes a store's creation; without it, only records make it a damaged one.
    if read_header(blobs) and not exists(blobs, MANIFEST_KEY) and not blobs.list(COMMIT):
        raise MissingStore(f"{url} was not created to the end; run dflash-extract again")
    cache = Cache(blobs)
    if not cache.packs:
        raise MissingStore(f"{url} has no committed pack yet; finish dflash-extract first")
    if not (partial or cache.is_complete):
        raise BadInput(
            f"{url} is unfinished ({len(cache.packs)} of {cache.plan.num_packs} packs); run the "
            "same dflash-extract again to finish it, or add --partial to use what is there"
        )
    blobs.expect(estimate_bytes(cache.schema, cache.plan))
    return cache
