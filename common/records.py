"""The files of a store that are not shards: plan, commit records, manifest. Pure but for `copy_in`.

Records are JSON with a SHA-256 of the rest of themselves; the plan is Parquet. The manifest holds
the SHA-256 of every file that no pack changes.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.common.blobs import Blobs
from dflash_offline.common.errors import DamagedStore

if TYPE_CHECKING:
    from dflash_offline.common.store import Plan

_CHECKSUM = "sha256"
_COPY_BYTES = 16 << 20


def sha256(content: bytes) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


def seal(data: Mapping[str, Any]) -> bytes:
    """Return a record as JSON that carries its own checksum."""
    body = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return json.dumps({**data, _CHECKSUM: sha256(body.encode())}, sort_keys=True).encode() + b"\n"


def unseal(content: bytes, where: str) -> dict[str, Any]:
    """Return a record's data.

    Raises:
        DamagedStore: not what `seal` wrote.
    """
    try:
        data = json.loads(content)
        stated = data.pop(_CHECKSUM)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedStore(f"{where} is not a record of this store") from None
    # Compared as bytes, so that a change that JSON does not see is found too.
    if seal(data) != content or stated != json.loads(seal(data))[_CHECKSUM]:
        raise DamagedStore(f"{where} does not match its own checksum")
    return data


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


def plan_files(plan: "Plan", token_files: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the files that hold a plan: file name to content.

    Args:
        token_files: for each pack, array name to size and checksums of its token shards.
    """
    rows = [asdict(sample) for sample in plan.samples]
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
        "token_files": [dict(each) for each in token_files],
    }
    return {
        "samples.parquet": _parquet(pa.Table.from_pylist(rows)),
        "batches.parquet": _parquet(pa.Table.from_pylist(batches, schema=batch_schema)),
        "plan.json": seal(rest),
    }


def read_plan_files(files: Mapping[str, bytes]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the fields of a plan, its samples as plain rows, and the token files of each pack.

    Raises:
        DamagedStore: a file is missing or not what was written.
    """
    for name in ("samples.parquet", "batches.parquet", "plan.json"):
        if name not in files:
            raise DamagedStore(f"plan/0/{name} is missing")
    rest = unseal(files["plan.json"], "plan/0/plan.json")
    batches: list[list[list[int]]] = [[] for _ in range(rest.pop("num_units"))]
    for row in _rows(files["batches.parquet"], "plan/0/batches.parquet"):
        batches[row["unit"]].append(row["samples"])
    token_files = rest.pop("token_files")
    samples = _rows(files["samples.parquet"], "plan/0/samples.parquet")
    return {**rest, "samples": samples, "batches": batches}, token_files


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _rows(content: bytes, where: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(io.BytesIO(content)).to_pylist()
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
