"""The files of a store that are not shards: plan, commit records, manifest. Pure but for `copy_in`.

Records are JSON with a SHA-256 of the rest of themselves; the plan is Parquet. The manifest holds
the SHA-256 of every file that no pack changes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.common.blobs import Blobs
from dflash_offline.common.errors import DamagedStore

if TYPE_CHECKING:
    from dflash_offline.common.store import Plan

# Why a sample that `dflash-cache rm` took is quarantined: nothing is wrong with its pack.
REMOVED = "removed"
PLAN_FILES = ("samples.parquet", "batches.parquet", "plan.json")
# What helps where a file is lost that no run writes again.
COPY_OR_ANEW = "take the file from a copy of the store, or extract anew"
_SEAL = b',"sha256":"%b"}\n'
_COPY_BYTES = 16 << 20


def sha256(content: bytes) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


def index_digest(indices: Sequence[int]) -> str:
    """Return what tells a choice of samples, by their index in the plan, from another one."""
    return sha256(np.asarray(indices, np.int64).tobytes())[:16]


def seal(data: Mapping[str, Any]) -> bytes:
    """Return a record as JSON whose last member is the SHA-256 of the record without it."""
    body = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + _SEAL % sha256(body).encode()


def unseal(content: bytes, where: str) -> dict[str, Any]:
    """Return a record's data.

    Raises:
        DamagedStore: not what `seal` wrote.
    """
    tail = len(_SEAL % bytes(64))
    body = content[:-tail] + b"}"
    if content[-tail:] != _SEAL % sha256(body).encode():
        raise DamagedStore(f"{where} does not match its own checksum")
    return json.loads(body)


def pretty_json(data: Mapping[str, Any]) -> bytes:
    """Return metadata as the bytes that are stored."""
    return json.dumps(data, indent=1).encode() + b"\n"


def commit_record(
    *,
    pack: int,
    num_tokens: int,
    arrays: Mapping[str, Mapping[str, Any]],
    samples: Sequence[Sequence[int]],
    quarantined: Mapping[int, str],
    run: Mapping[str, Any],
) -> bytes:
    """Return the record that makes a pack exist.

    Args:
        arrays: name to `bytes` (object size) and `crc32c` (each inner chunk, `None` if absent).
        samples: (sample index, start, length), in order.
        quarantined: sample index to the reason why its states are zeros.
        run: software and device that computed the states.
    """
    data = {
        "pack": pack,
        "num_tokens": num_tokens,
        "arrays": {name: dict(each) for name, each in arrays.items()},
        "samples": [list(each) for each in samples],
        "quarantined": {str(index): reason for index, reason in quarantined.items()},
        "run": dict(run),
    }
    return seal(data)


def parse_commit(content: bytes, where: str) -> dict[str, Any]:
    """Return a commit record with integer sample indices.

    Raises:
        DamagedStore: not what was written.
    """
    data = unseal(content, where)
    data["quarantined"] = {int(index): reason for index, reason in data["quarantined"].items()}
    return data


def manifest(digests: Mapping[str, str]) -> bytes:
    """Return the manifest of the files that no pack changes: key to SHA-256."""
    return seal({"files": dict(sorted(digests.items()))})


def parse_manifest(content: bytes, where: str) -> dict[str, str]:
    """Return what `manifest` wrote.

    Raises:
        DamagedStore: it is something else.
    """
    try:
        return unseal(content, where)["files"]
    except DamagedStore as problem:
        raise DamagedStore(f"{problem}; {COPY_OR_ANEW}") from None


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """What the files of one plan hold."""

    samples: pa.Table
    batches: list[list[list[int]]]  # empty when its file was not given
    fields: dict[str, Any]


def plan_files(
    plan: "Plan", token_files: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the files that hold a plan: file name to content.

    Args:
        token_files: for each pack, array name to size and checksums of its token shards.
        identity: plan fields of the identity, so that the same plan is not appended twice.
    """
    batches = [
        {"unit": unit, "samples": batch}
        for unit, members in enumerate(plan.batches)
        for batch in members
    ]
    batch_schema = pa.schema([("unit", pa.int64()), ("samples", pa.list_(pa.int64()))])
    rest = {
        "num_packs": plan.num_packs,
        "num_held_out_packs": plan.num_held_out_packs,
        "num_units": len(plan.batches),
        "unit_packs": plan.unit_packs,
        "report": plan.report,
        "identity": dict(identity),
        "token_files": [dict(each) for each in token_files],
    }
    contents = (
        _parquet(plan.sample_table()),
        _parquet(pa.Table.from_pylist(batches, schema=batch_schema)),
        seal(rest),
    )
    return dict(zip(PLAN_FILES, contents, strict=True))


def read_plan_files(files: Mapping[str, bytes]) -> PlanPart:
    """Read what `plan_files` made.

    Raises:
        DamagedStore: a file is not what was written.
    """
    samples, batch_rows, rest = (files.get(name) for name in PLAN_FILES)
    assert samples is not None, "a plan has samples"
    assert rest is not None, "a plan has fields"
    fields = unseal(rest, PLAN_FILES[2])
    batches: list[list[list[int]]] = [[] for _ in range(fields["num_units"] if batch_rows else 0)]
    for row in _table(batch_rows, PLAN_FILES[1]).to_pylist() if batch_rows else ():
        batches[row["unit"]].append(row["samples"])
    return PlanPart(samples=_table(samples, PLAN_FILES[0]), batches=batches, fields=fields)


def index_record(
    packs: Mapping[int, tuple[str, Sequence[int]]], *, complete: bool, dropped: Mapping[int, str]
) -> bytes:
    """Return an index of packs.

    Args:
        packs: pack to the SHA-256 of its record and its quarantined sample indices.
        complete: every planned pack is in it, so that no listing is needed.
        dropped: packs given up, with the SHA-256 of the record that no longer counts.
    """
    entries = [[pack, digest, list(bad)] for pack, (digest, bad) in sorted(packs.items())]
    gone = [[pack, digest] for pack, digest in sorted(dropped.items())]
    return seal({"packs": entries, "complete": complete, "dropped": gone})


def parse_index(content: bytes, where: str) -> dict[str, Any]:
    """Return an index with `packs` and `dropped` as mappings.

    Raises:
        DamagedStore: not what was written.
    """
    data = unseal(content, where)
    data["packs"] = {pack: (digest, bad) for pack, digest, bad in data["packs"]}
    data["dropped"] = dict(data["dropped"])
    return data


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _table(content: bytes, where: str) -> pa.Table:
    try:
        # Threads of Arrow that hold Python objects abort the process now and then when it ends.
        return pq.read_table(pa.BufferReader(content), use_threads=False, pre_buffer=False)
    except (pa.ArrowException, OSError) as problem:
        raise DamagedStore(f"{where} cannot be read: {problem}") from problem


def copy_in(blobs: Blobs, key: str, source: bytes | Path) -> str:
    """Write a file into the store and return its SHA-256."""
    digest = hashlib.sha256()

    def parts() -> Iterator[bytes]:
        if isinstance(source, bytes):
            digest.update(source)
            yield source
            return
        with source.open("rb") as file:
            while part := file.read(_COPY_BYTES):
                digest.update(part)
                yield part

    blobs.create(key, parts())
    return digest.hexdigest()
