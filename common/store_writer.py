"""The side of a store that writes: creation, resume, ownership, and the commit of a pack.

Everything that no pack changes is written first and closed by the manifest. A pack is its shards,
each create-only, and then its record, which alone makes it exist. Packs may be committed from
several threads, and from other processes that join. Letters: K captured layers, T tokens of a pack,
H hidden.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, blobs_at
from dflash_offline.common.calibration_file import calibration_files, read_calibration
from dflash_offline.common.identity import Identity
from dflash_offline.common.lease import Joined, Ownership, take_ownership
from dflash_offline.common.pack_arrays import inner_chunks, state_arrays
from dflash_offline.common.pack_index import (
    PackIndex,
    leftovers,
    read_pack_index,
    read_record,
    write_pack_index,
)
from dflash_offline.common.pack_reader import damaged_flat, read_flat
from dflash_offline.common.plan_writer import (
    NewPlan,
    append_plan,
    token_row,
    write_first_plan,
    write_shard,
)
from dflash_offline.common.store import (
    CALIBRATION,
    LOSS_MASK,
    MANIFEST_KEY,
    TOKENS,
    Header,
    Plan,
    Schema,
    commit_key,
    exists,
    read_header,
    read_plan,
    shard_key,
)
from dflash_offline.common.store_checks import has_plan, refuse_small_disk
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.topk import TopK

if TYPE_CHECKING:
    from dflash_offline.common.quantize import Calibration, EncodedStates

_COMMITS_PER_INDEX = 1000


class Store:
    """The writing side, owned by one run.

    Use as a context manager, or call `close()`.
    """

    def __init__(self, blobs: Blobs, lock: Ownership | Joined) -> None:
        self.blobs = blobs
        self._lock = lock
        self._index_guard = threading.Lock()
        self.schema: Schema
        self.plan: Plan
        self._packs: list[list[int]] = []
        self._starts: np.ndarray
        self._lengths: np.ndarray
        self._token_files: list[dict[str, Any]] = []
        self._index: PackIndex
        self.calibration: Calibration | None = None
        self._commits_since_index = 0

    @classmethod
    def create_or_resume(
        cls,
        url: str,
        *,
        schema: Schema,
        identity: Identity,
        plan: Plan,
        tokens: Sequence[np.ndarray],
        masks: Sequence[np.ndarray],
        target_files: Mapping[str, bytes | Path],
        options: Mapping[str, Any],
        append: bool = False,
        storage_options: Sequence[str] = (),
    ) -> "Store":
        """Own the store at `url`: write its plan, tokens and target, or check that they agree.

        Args:
            tokens: int32 [length] for every sample of the plan; a resume needs none.
            masks: uint8 [length] of `LossMask` bits for every sample; a resume needs none.
            target_files: file name to content or local path, for `target/`.
            options: resolved options of the run, saved for the reader.
            append: add the plan to a store that was made from other data; the same plan again
                resumes.
            storage_options: `KEY=VALUE` each, for object storage; see `blobs_at`.

        Raises:
            BadInput: another live run owns it, it was made with other settings, the address holds
                something else, or there is too little room (before anything is written).
        """
        blobs = blobs_at(url, storage_options)
        if not has_plan(blobs, identity, append=append):
            refuse_small_disk(blobs, estimate_bytes(schema, plan), target_files)
        lock = take_ownership(blobs)
        store = cls(blobs, lock)
        try:
            new = NewPlan(identity=identity, plan=plan, tokens=tokens, masks=masks)
            if not exists(blobs, MANIFEST_KEY):
                write_first_plan(blobs, schema, new, target_files=target_files, options=options)
            # Asked again: another run may have made the store in between.
            elif not has_plan(blobs, identity, append=append):
                append_plan(blobs, new)
            store._load()
            store._drop_uncommitted()
            store._restore_tokens(plan, tokens, masks)
        except BaseException:
            lock.release()
            raise
        return store

    @classmethod
    def open(cls, url: str, storage_options: Sequence[str] = ()) -> "Store":
        """Own a finished or interrupted store in order to change what it holds.

        Raises:
            MissingStore: there is none.
            BadInput: another live run owns it.
        """
        blobs = blobs_at(url, storage_options)
        read_header(blobs)
        store = cls(blobs, take_ownership(blobs))
        try:
            store._load()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def join(cls, url: str, storage_options: Sequence[str] = (), *, claim: str) -> "Store":
        """Open a store that another process of the same run owns, in order to commit packs.

        The owner has dropped what was uncommitted before this is called, gives every pack to one
        process alone, and calls `refresh` once all of them are done.

        Args:
            claim: the owner's; once another run owns the store, nothing more is committed here.
        """
        blobs = blobs_at(url, storage_options)
        store = cls(blobs, Joined(blobs, claim))
        store._load()
        return store

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, problem: type[BaseException] | None, *_details: object) -> None:
        try:
            if problem is None:
                self.fold_index()
        finally:
            self.close()

    def close(self) -> None:
        """Give up ownership."""
        self._lock.release()

    @property
    def claim(self) -> str:
        """What processes that join are told."""
        return self._lock.claim

    def fold_index(self) -> None:
        """Write an index of what is committed, so that opening the store needs few reads."""
        with self._index_guard:
            self._fold_index()

    def _fold_index(self) -> None:
        if self._commits_since_index and not isinstance(self._lock, Joined):
            self._lock.check()
            self._index = write_pack_index(self.blobs, self._index, self.plan.num_packs)
            self._commits_since_index = 0

    def refresh(self) -> None:
        """Take notice of the packs that other processes of the run committed."""
        with self._index_guard:
            known = len(self._index.packs)
            self._index = read_pack_index(self.blobs, self.plan.num_packs)
            self._commits_since_index += len(self._index.packs) - known

    @property
    def committed(self) -> set[int]:
        """Packs that exist."""
        return set(self._index.packs)

    @property
    def quarantined(self) -> dict[int, int]:
        """Samples of committed packs whose states are zeros, with their pack."""
        return {sample: pack for pack, (_, bad) in self._index.packs.items() for sample in bad}

    def why_quarantined(self) -> dict[int, str]:
        """Return the reasons that commit records give, by sample."""
        packs = sorted(set(self.quarantined.values()))
        found = (read_record(self.blobs, self._index, pack)["quarantined"] for pack in packs)
        return {sample: reason for each in found for sample, reason in each.items()}

    def pack_samples(self, pack: int) -> list[int]:
        """Return the sample indices of a pack, in order of their start."""
        return self._packs[pack]

    def pack_length(self, pack: int) -> int:
        """Return the tokens that a pack holds."""
        return int(self._lengths[self._packs[pack]].sum())

    def read_tokens(self, pack: int) -> np.ndarray:
        """Return the pack's token ids, int32 [tokens of the pack], as planned."""
        return self._read_flat(TOKENS, pack)

    def read_loss_mask(self, pack: int) -> np.ndarray:
        """Return the pack's loss mask, uint8 [tokens of the pack], as planned."""
        return self._read_flat(LOSS_MASK, pack)

    def _read_flat(self, name: str, pack: int) -> np.ndarray:
        record = self._token_files[pack][name]
        return read_flat(self.blobs, self.schema, name, pack, record)[: self.pack_length(pack)]

    @property
    def needs_calibration(self) -> bool:
        """Whether `write_calibration` must come before the first pack."""
        return self.schema.is_coded and self.calibration is None

    def write_calibration(
        self, calibration: "Calibration", report: Mapping[str, Any] | None = None
    ) -> None:
        """Write what an int store is decoded with, once; `calibration` is what was written.

        Args:
            report: error of the codec, plain data for `dflash-cache info`.
        """
        assert self.needs_calibration, "the codec needs none, or the store has it"
        for key in self.blobs.list(CALIBRATION):
            self.blobs.delete(key)
        for key, content in calibration_files(calibration.to("cpu"), report or {}).items():
            self.blobs.create(key, [content])
        self.calibration = read_calibration(self.blobs)

    def first_rows(self, pack: int) -> np.ndarray:
        """Return which tokens of a pack are position 0 of a sample, bool [tokens]."""
        is_first = np.zeros(self.pack_length(pack), bool)
        is_first[self._starts[self._packs[pack]]] = True
        return is_first

    def commit_pack(
        self,
        pack: int,
        features: "np.ndarray | EncodedStates",
        final: np.ndarray | None = None,
        *,
        topk: TopK | None = None,
        quarantined: Mapping[int, str] | None = None,
        run_info: Mapping[str, Any] | None = None,
    ) -> int:
        """Write a pack's states and then the record that makes it exist.

        Arrays must stay as they are until it returns.

        Args:
            features: uint16 [K, tokens, H], bfloat16 bit patterns in the order of the plan; or
                all states as codes on the CPU, when the store has an int codec.
            final: uint16 [tokens, H], for stores with that teacher.
            topk: of all tokens, for stores with that teacher.
            quarantined: sample index to reason; its rows must be zero.
            run_info: software, device and whatever else explains the bytes.

        Returns:
            Bytes written.

        Raises:
            Stopped: the disk is full or read-only, or another run owns the store.
        """
        self._lock.check()
        states = state_arrays(
            self.schema,
            features,
            final,
            is_first=self.first_rows(pack),
            calibration=self.calibration,
            topk=topk,
        )
        assert set(states) == set(self.schema.state_arrays), f"states are {sorted(states)}"
        arrays = dict(self._token_files[pack])
        for name, values in states.items():
            chunks = inner_chunks(self.schema.arrays[name], values)
            arrays[name] = write_shard(self.blobs, self.schema, name, pack, chunks)
        members = self._packs[pack]
        samples = np.stack([members, self._starts[members], self._lengths[members]], axis=1)
        record = records.commit_record(
            pack=pack,
            num_tokens=self.pack_length(pack),
            arrays=arrays,
            samples=samples.tolist(),
            quarantined=quarantined or {},
            run=dict(run_info or {}),
        )
        self._lock.check()  # again, since shards may take minutes
        self.blobs.create(commit_key(pack), [record])
        with self._index_guard:
            self._index = self._index.added(pack, record, sorted(quarantined or {}))
            self._commits_since_index += 1
            if self._commits_since_index >= _COMMITS_PER_INDEX:
                self._fold_index()
        return sum(arrays[name]["bytes"] for name in states)

    def _load(self) -> None:
        header = read_header(self.blobs)
        assert header is not None
        self.schema = header.schema
        self.plan, self._token_files = read_plan(self.blobs, batches=True)
        self._packs = self.plan.pack_samples()
        self._starts, self._lengths = self.plan.column("start"), self.plan.column("length")
        self._index = read_pack_index(self.blobs, self.plan.num_packs)
        self.calibration = read_calibration(self.blobs) if self.schema.is_coded else None

    def drop_packs(self, packs: set[int]) -> None:
        """Give packs up: the index first, then records and shards of states."""
        self._index = write_pack_index(self.blobs, self._index.without(packs), self.plan.num_packs)
        for pack in packs:
            self.blobs.delete(commit_key(pack))
            for name in self.schema.state_arrays:
                self.blobs.delete(shard_key(name, pack))

    def rewrite_tokens(
        self, pack: int, tokens: Mapping[int, np.ndarray], masks: Mapping[int, np.ndarray]
    ) -> None:
        """Write an uncommitted pack's token arrays again, zeros for samples that are not given."""
        for name, given in ((TOKENS, tokens), (LOSS_MASK, masks)):
            row = token_row(self.schema, self.plan, name, given)
            self.blobs.delete(shard_key(name, pack))
            self._token_files[pack][name] = write_shard(self.blobs, self.schema, name, pack, [row])

    def _restore_tokens(
        self, plan: Plan, tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray]
    ) -> None:
        """Write token shards that a repair gave up, where the corpus of their plan is at hand."""
        stored, given = self.plan.column("content_hash"), plan.column("content_hash")[: len(tokens)]
        # Of several plans the one whose samples these are.
        starts = np.flatnonzero(stored == given[0]) if len(tokens) else ()
        own = (at for at in starts if np.array_equal(stored[at:][: len(given)], given))
        first = next(own, len(stored))
        # One listing an array: asking for each shard costs a request a pack on object storage.
        present = {key for name in (TOKENS, LOSS_MASK) for key in self.blobs.list(f"{name}/c")}
        for pack in set(range(self.plan.num_packs)) - self.committed:
            for name, per_sample in ((TOKENS, tokens), (LOSS_MASK, masks)):
                members = self._packs[pack]
                is_given = first <= min(members) and max(members) < first + len(given)
                if shard_key(name, pack) in present or not is_given:
                    continue
                values = {index: per_sample[index - first] for index in members}
                row = token_row(self.schema, self.plan, name, values)
                write_shard(self.blobs, self.schema, name, pack, [row])

    def _drop_uncommitted(self) -> None:
        """Delete what an interrupted run left: temporary files, shards and uncounted records."""
        for key in leftovers(self.blobs, self.schema, self.committed):
            self.blobs.delete(key)
        # Where `dflash-cache rm` was interrupted, tokens may not be the plan's any more.
        for pack in self._index.given_up:
            for key in damaged_flat(self.blobs, self.schema, pack, self._token_files[pack]):
                self.blobs.delete(key)
        if self._index.dropped:
            self._index = write_pack_index(self.blobs, self._index.cleared(), self.plan.num_packs)


@contextmanager
def own(url: str, storage_options: Sequence[str] = ()) -> Iterator[tuple[Blobs, Header]]:
    """Own an existing store without reading more than its root.

    Raises:
        MissingStore: there is none.
        BadInput: another live run owns it.
    """
    blobs = blobs_at(url, storage_options)
    header = read_header(blobs)
    assert header is not None
    lock = take_ownership(blobs)
    try:
        yield blobs, header
    finally:
        lock.release()
