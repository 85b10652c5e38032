"""What no pack changes: the root, the arrays' metadata, a plan with its tokens, the target's files.

Everything is create-only and the manifest comes last, so that an interrupted creation or append
does not count and starts over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, in_parallel, is_temporary
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.errors import DamagedStore
from dflash_offline.common.identity import Identity
from dflash_offline.common.pack_index import pack_of
from dflash_offline.common.shards import ShardWriter
from dflash_offline.common.store import (
    ATTRIBUTE,
    CALIBRATION,
    COMMIT,
    EXACT,
    EXACT_ROWS,
    FEATURES,
    FINAL,
    FINAL_SCALES,
    FORMAT,
    GROUP_KEY,
    LOSS_MASK,
    PLAN,
    SCALES,
    TARGET,
    TOKENS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    Plan,
    Schema,
    count_plans,
    exists,
    manifest_key,
    read_header,
    read_plan,
    shard_key,
    stated_digests,
)

# What stands first in the keys that a creation may leave, whatever its schema was.
_CREATED = (GROUP_KEY, PLAN, TARGET, FEATURES, FINAL, TOKENS, LOSS_MASK, SCALES, FINAL_SCALES)
_CREATED += (EXACT, EXACT_ROWS, TOPK_IDS, TOPK_LOGPROBS, CALIBRATION)


@dataclass(frozen=True, kw_only=True)
class NewPlan:
    """A plan with what it was made from.

    Attributes:
        tokens: int32 [length] for every sample.
        masks: uint8 [length] of `LossMask` bits for every sample.
    """

    identity: Identity
    plan: Plan
    tokens: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]


def write_first_plan(
    blobs: Blobs,
    schema: Schema,
    new: NewPlan,
    *,
    target_files: Mapping[str, bytes | Path],
    options: Mapping[str, Any],
) -> None:
    """Write a new store up to its manifest, over whatever an interrupted creation left."""
    for key in blobs.list(""):
        # Anything else is somebody's who put it there since.
        if key.partition("/")[0] in _CREATED or is_temporary(key):
            blobs.delete(key)
    fixed = {GROUP_KEY: _group_json(schema, new.identity, options)}
    for name in schema.arrays:
        fixed[f"{name}/{GROUP_KEY}"] = records.pretty_json(
            schema.array_json(name, new.plan.num_packs)
        )
    digests = {key: records.copy_in(blobs, key, content) for key, content in fixed.items()}
    for name, source in target_files.items():
        key = f"{TARGET}/{name}"
        digests[key] = records.copy_in(blobs, key, source)
    _write_plan(blobs, schema, new, number=0, first_pack=0, digests=digests)


def append_plan(blobs: Blobs, new: NewPlan) -> None:
    """Add a plan to a store: its packs follow those planned before, its manifest makes it count.

    Raises:
        DamagedStore: packs are there of a plan that is not.
    """
    header = read_header(blobs)
    assert header is not None
    schema = header.schema
    planned, _ = read_plan(blobs, batches=False)
    first_pack, first_sample = planned.num_packs, len(planned.samples)
    if any((pack_of(key) or 0) >= first_pack for key in blobs.list(COMMIT)):
        raise DamagedStore(
            f"{manifest_key(count_plans(blobs))} of {blobs.url} is missing, though packs of its "
            f"plan are there; {records.COPY_OR_ANEW}"
        )
    total = first_pack + new.plan.num_packs
    number = count_plans(blobs)
    leftovers = [
        shard_key(name, pack) for name in (TOKENS, LOSS_MASK) for pack in range(first_pack, total)
    ]
    for key in (*leftovers, *blobs.list(f"{PLAN}/{number}")):
        if exists(blobs, key):
            blobs.delete(key)
    # The first axis of each array counts the planned packs.
    grown = {
        f"{name}/{GROUP_KEY}": records.pretty_json(schema.array_json(name, total))
        for name in schema.arrays
    }
    moved = replace(
        new.plan,
        samples=[replace(s, pack=s.pack + first_pack) for s in new.plan.samples],
        batches=[[[i + first_sample for i in b] for b in unit] for unit in new.plan.batches],
    )
    moved_plan = replace(new, plan=moved)
    _write_plan(blobs, schema, moved_plan, number=number, first_pack=first_pack, grown=grown)


def restore_metadata(blobs: Blobs, schema: Schema, num_packs: int) -> None:
    """Write the arrays' metadata again where it is not as stated, as an interrupted append does."""
    stated = stated_digests(blobs)
    for name in schema.arrays:
        key = f"{name}/{GROUP_KEY}"
        content = records.pretty_json(schema.array_json(name, num_packs))
        is_stated = records.sha256(content) == stated.get(key)
        if is_stated and not (exists(blobs, key) and blobs.read(key) == content):
            blobs.replace(key, content)


def write_shard(
    blobs: Blobs, schema: Schema, name: str, pack: int, chunks: Iterable[np.ndarray | None]
) -> dict[str, Any]:
    """Write one pack of one array; returns what its record says of it."""
    writer = ShardWriter(chunks, codec_named(schema.arrays[name].codec))
    num_bytes = blobs.create(shard_key(name, pack), writer.parts())
    return {"bytes": num_bytes, "crc32c": writer.crcs}


def _write_plan(
    blobs: Blobs,
    schema: Schema,
    new: NewPlan,
    *,
    number: int,
    first_pack: int,
    digests: Mapping[str, str] | None = None,
    grown: Mapping[str, bytes] | None = None,
) -> None:
    """Write token shards, plan files and the manifest that closes them.

    Args:
        digests: of what was written before.
        grown: new content of what is there.
    """
    digests = dict(digests or {})
    plan = new.plan
    members: list[list[int]] = [[] for _ in range(plan.num_packs)]
    for index, sample in enumerate(plan.samples):
        members[sample.pack - first_pack].append(index)

    def write_tokens(at: int) -> dict[str, Any]:
        return {
            name: write_shard(
                blobs,
                schema,
                name,
                first_pack + at,
                [token_row(schema, plan, name, {i: per_sample[i] for i in members[at]})],
            )
            for name, per_sample in ((TOKENS, new.tokens), (LOSS_MASK, new.masks))
        }

    token_files = in_parallel(blobs, write_tokens, range(plan.num_packs))
    for name, content in records.plan_files(plan, token_files, new.identity.plan).items():
        key = f"{PLAN}/{number}/{name}"
        digests[key] = records.copy_in(blobs, key, content)
    # The only objects that are ever replaced; last, for until the manifest they are not as stated.
    for key, content in (grown or {}).items():
        blobs.replace(key, content, expected=blobs.read(key))
        digests[key] = records.sha256(content)
    blobs.create(manifest_key(number), [records.manifest(digests)])


def token_row(
    schema: Schema, plan: Plan, name: str, by_sample: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Lay tokens or masks out as one row of a pack, [pack_tokens]; zeros where none is given."""
    row = np.zeros(schema.pack_tokens, schema.arrays[name].dtype)
    for index, values in by_sample.items():
        sample = plan.samples[index]
        row[sample.start : sample.start + sample.length] = values
    return row


def _group_json(schema: Schema, identity: Identity, options: Mapping[str, Any]) -> bytes:
    """Return the root zarr.json."""
    attributes = {
        ATTRIBUTE: {
            "format": FORMAT,
            "schema": schema.as_dict(),
            "identity": identity.as_dict(),
            "options": dict(options),
        }
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return records.pretty_json(group)
