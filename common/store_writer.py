"""The side of a store that writes: creation, resume, ownership, and the commit of a pack.

Everything that no pack changes is written first and closed by the manifest. A pack is its shards,
each create-only, and then its record, which alone makes it exist. Letters: K captured layers,
T tokens of a pack, H hidden.
"""

import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, LocalBlobs, LocalLock, blobs_at, is_temporary
from dflash_offline.common.cache import read_flat
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.errors import BadInput
from dflash_offline.common.identity import RESUME, Identity, compare
from dflash_offline.common.shards import ShardWriter
from dflash_offline.common.store import (
    COMMIT,
    FEATURES,
    FINAL,
    GROUP_KEY,
    LOGS,
    LOSS_MASK,
    MANIFEST_KEY,
    PLAN,
    TARGET,
    TOKENS,
    Plan,
    Schema,
    commit_key,
    estimate_bytes,
    group_json,
    pretty_json,
    read_header,
    read_plan,
    shard_key,
)

# Room that must stay free beside the estimate, for records, logs and other people's files.
_RESERVE_BYTES = 64 << 20


class Store:
    """The writing side, owned by one run.

    Use as a context manager, or call `close()`.
    """

    def __init__(self, blobs: Blobs, lock: LocalLock) -> None:
        self.blobs = blobs
        self._lock = lock
        self.schema: Schema
        self.plan: Plan
        self.committed: set[int] = set()
        self._packs: list[list[int]] = []
        self._token_files: dict[int, dict[str, Any]] = {}

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
    ) -> "Store":
        """Own the store at `url`: write its plan, tokens and target, or check that they agree.

        Args:
            tokens: int32 [length] for every sample of the plan.
            masks: uint8 [length] of `LossMask` bits for every sample.
            target_files: file name to content or local path, for `target/`.
            options: resolved options of the run, saved for the reader.

        Raises:
            BadInput: another live run owns it, it was made with other settings, the address holds
                something else, or there is too little room (before anything is written).
        """
        blobs = blobs_at(url)
        found = read_header(blobs, required=False)
        if found is None:
            _refuse_foreign_folder(blobs)
            _refuse_small_disk(blobs, estimate_bytes(schema, plan) + _size_of(target_files))
        elif _exists(blobs, MANIFEST_KEY):
            compare(found.identity, identity, kinds=RESUME, where=f"the store at {blobs.url}")
        lock = LocalLock(_local_root(blobs))
        lock.acquire(f"process {os.getpid()} on {platform.node()}, since {_now()}")
        store = cls(blobs, lock)
        try:
            if not _exists(blobs, MANIFEST_KEY):
                store._write_fixed_part(
                    schema, identity, plan, tokens, masks, target_files, options
                )
            store._load()
            store._drop_uncommitted()
        except BaseException:
            lock.release()
            raise
        return store

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up ownership."""
        self._lock.release()

    def pack_samples(self, pack: int) -> list[int]:
        """Return the sample indices of a pack, in order of their start."""
        return self._packs[pack]

    def pack_length(self, pack: int) -> int:
        """Return the tokens that a pack holds."""
        return sum(self.plan.samples[index].length for index in self._packs[pack])

    def read_tokens(self, pack: int) -> np.ndarray:
        """Return the pack's token ids, int32 [tokens of the pack], as planned."""
        record = self._token_files[pack][TOKENS]
        return read_flat(self.blobs, self.schema, TOKENS, pack, record)[: self.pack_length(pack)]

    def commit_pack(
        self,
        pack: int,
        features: np.ndarray,
        final: np.ndarray | None = None,
        *,
        quarantined: Mapping[int, str] | None = None,
        run_info: Mapping[str, Any] | None = None,
    ) -> int:
        """Write a pack's states and then the record that makes it exist.

        Args:
            features: uint16 [K, tokens, H], bfloat16 bit patterns in the order of the plan.
            final: uint16 [tokens, H], for stores with that teacher.
            quarantined: sample index to reason; its rows must be zero.
            run_info: software, device and whatever else explains the bytes.

        Returns:
            Bytes written.

        Raises:
            Stopped: the disk is full or read-only.
        """
        states = {FEATURES: features} | ({FINAL: final} if final is not None else {})
        assert set(states) == set(self.schema.state_arrays), f"states are {sorted(states)}"
        length = self.pack_length(pack)
        arrays = dict(self._token_files[pack])
        for name, values in states.items():
            assert values.shape[-2:] == (length, self.schema.hidden), f"{name} {values.shape}"
            arrays[name] = self._write_shard(name, pack, self._state_chunks(values))
        samples = [
            [i, self.plan.samples[i].start, self.plan.samples[i].length] for i in self._packs[pack]
        ]
        record = records.commit_record(
            pack=pack,
            num_tokens=length,
            arrays=arrays,
            samples=samples,
            quarantined=quarantined or {},
            run=dict(run_info or {}),
        )
        self.blobs.create(commit_key(pack), [record])
        self.committed.add(pack)
        return sum(arrays[name]["bytes"] for name in states)

    def _state_chunks(self, values: np.ndarray) -> Iterator[np.ndarray | None]:
        """Yield the inner chunks of [..., tokens, H] in C order; `None` past the pack's end."""
        size, hidden = self.schema.chunk_tokens, self.schema.hidden
        for layer in values.reshape(-1, *values.shape[-2:]):
            for first in range(0, self.schema.pack_tokens, size):
                rows = layer[first : first + size]
                if len(rows) == 0:
                    yield None
                elif len(rows) == size and rows.flags.c_contiguous:
                    yield rows
                else:
                    whole = np.zeros((size, hidden), values.dtype)
                    whole[: len(rows)] = rows
                    yield whole

    def _write_shard(
        self, name: str, pack: int, chunks: Iterable[np.ndarray | None]
    ) -> dict[str, Any]:
        codec = codec_named(self.schema.codec if name in self.schema.state_arrays else "raw")
        writer = ShardWriter(chunks, codec)
        num_bytes = self.blobs.create(shard_key(name, pack), writer.parts())
        return {"bytes": num_bytes, "crc32c": writer.crcs}

    def _write_fixed_part(
        self,
        schema: Schema,
        identity: Identity,
        plan: Plan,
        tokens: Sequence[np.ndarray],
        masks: Sequence[np.ndarray],
        target_files: Mapping[str, bytes | Path],
        options: Mapping[str, Any],
    ) -> None:
        """Write everything that no pack changes, the manifest last; starts over if interrupted."""
        self.schema, self.plan = schema, plan
        for key in self.blobs.list(""):
            if key != self._lock.path.name and not key.startswith(f"{LOGS}/"):
                self.blobs.delete(key)
        fixed = {GROUP_KEY: group_json(schema, identity, options)}
        for name in (*schema.state_arrays, TOKENS, LOSS_MASK):
            fixed[f"{name}/{GROUP_KEY}"] = pretty_json(schema.array_json(name, plan.num_packs))
        token_files = []
        for members in plan.pack_samples():
            pack = len(token_files)
            token_files.append(
                {
                    name: self._write_shard(name, pack, [_row(schema, plan, members, per_sample)])
                    for name, per_sample in ((TOKENS, tokens), (LOSS_MASK, masks))
                }
            )
        fixed |= {f"{PLAN}/0/{k}": v for k, v in records.plan_files(plan, token_files).items()}
        digests = {}
        for key, content in fixed.items():
            self.blobs.create(key, [content])
            digests[key] = records.sha256(content)
        for name, source in target_files.items():
            key = f"{TARGET}/{name}"
            digests[key] = records.copy_in(self.blobs, key, source)
        self.blobs.create(MANIFEST_KEY, [records.manifest(digests)])

    def _load(self) -> None:
        header = read_header(self.blobs)
        assert header is not None
        self.schema = header.schema
        self.plan, self._token_files = read_plan(self.blobs)
        self._packs = self.plan.pack_samples()
        self.committed = {
            records.parse_commit(self.blobs.read(key), key)["pack"]
            for key in self.blobs.list(COMMIT)
            if not is_temporary(key)
        }

    def _drop_uncommitted(self) -> None:
        """Delete what an interrupted run left: temporary files and shards without a record."""
        kept = {shard_key(n, p) for n in self.schema.state_arrays for p in self.committed}
        for name in (*self.schema.state_arrays, COMMIT):
            for key in self.blobs.list(f"{name}/c" if name != COMMIT else name):
                is_leftover = key not in kept if name != COMMIT else is_temporary(key)
                if is_leftover:
                    self.blobs.delete(key)


def _row(
    schema: Schema, plan: Plan, members: Sequence[int], per_sample: Sequence[np.ndarray]
) -> np.ndarray:
    """Lay samples out as one row of a pack, zeros behind them."""
    row = np.zeros(schema.pack_tokens, per_sample[members[0]].dtype)
    for index in members:
        sample = plan.samples[index]
        row[sample.start : sample.start + sample.length] = per_sample[index]
    return row


def _exists(blobs: Blobs, key: str) -> bool:
    try:
        blobs.size(key)
    except FileNotFoundError:
        return False
    return True


def _local_root(blobs: Blobs) -> Path:
    assert isinstance(blobs, LocalBlobs), "ownership is by flock, on local disks"
    return blobs.root


def _refuse_foreign_folder(blobs: Blobs) -> None:
    strangers = [k for k in blobs.list("") if not k.startswith(f"{LOGS}/") and k != ".owner"]
    if strangers:
        raise BadInput(
            f"--out {blobs.url} is not empty and holds no store (it has {strangers[0]}); "
            "give a new folder"
        )


def _refuse_small_disk(blobs: Blobs, needed: int) -> None:
    free = blobs.free_bytes()
    if free is not None and needed + _RESERVE_BYTES > free:
        raise BadInput(
            f"--out {blobs.url} has {free / 1e9:.2f} GB free and the store needs about "
            f"{(needed + _RESERVE_BYTES) / 1e9:.2f} GB; free space, use fewer samples or layers, "
            "or another --codec"
        )


def _size_of(files: Mapping[str, bytes | Path]) -> int:
    return sum(v.stat().st_size if isinstance(v, Path) else len(v) for v in files.values())


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
