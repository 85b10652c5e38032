"""The schema of store format 1: names, keys, shapes, mask bits, and what a plan is.

The only module that spells an array name, a key or an attribute of the store. The side that writes
is common/store_writer.py, the side that reads common/cache.py; common/records.py makes plan files
and records. Letters: K captured layers, T tokens of a pack, H hidden.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_offline.common import codecs, records
from dflash_offline.common.blobs import Blobs
from dflash_offline.common.errors import BadInput, DamagedStore, MissingStore
from dflash_offline.common.identity import Identity
from dflash_offline.common.shards import array_metadata

FORMAT, ATTRIBUTE = 1, "dflash_offline"
GROUP_KEY, MANIFEST_KEY = "zarr.json", "manifest.json"
FEATURES, FINAL, TOKENS, LOSS_MASK = "features", "final", "tokens", "loss_mask"
# Of the int codecs, whose `features` and `final` are codes.
SCALES, FINAL_SCALES, EXACT, EXACT_ROWS = "scales", "final_scales", "exact", "exact_rows"
TOPK_IDS, TOPK_LOGPROBS = "topk_ids", "topk_logprobs"
CALIBRATION = "calibration"
CALIBRATION_KEY, CODEC_REPORT_KEY = "calibration/c/0/0/0", "calibration/report.json"
CALIBRATION_MANIFEST_KEY = "calibration/manifest.json"
PLAN, TARGET, COMMIT, LOGS = "plan", "target", "commit", "logs"

_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_TOKENS = 64
_EXACT_CHUNK_ROWS = 256


class LossMask:
    """Bits of the `loss_mask` array, one byte a token."""

    ASSISTANT = 1  # content of an assistant turn
    END_OF_TURN = 2  # the token that ends an assistant turn
    LAST_TURN = 4  # belongs to the last assistant turn
    REASONING = 8  # inside a thinking span
    TEMPLATE = 16  # inside an assistant turn, but written by the chat template
    OTHER = 32  # supervised, role unknown: a completion, or a given mask
    SUPERVISED = ASSISTANT | END_OF_TURN | OTHER


SUPERVISION_RULES = ("all", "last", "no-reasoning")


def supervised(mask: np.ndarray, rule: str = "all") -> np.ndarray:
    """Return which tokens are trained on.

    Args:
        mask: uint8 [T] of `LossMask` bits.
        rule: `all` supervised tokens, those of the `last` turn, or `no-reasoning`.

    Returns:
        bool [T]. What the template supplies is never supervised: the target does not generate it.
    """
    if rule not in SUPERVISION_RULES:
        raise ValueError(f"rule is {rule!r}, not one of {', '.join(SUPERVISION_RULES)}")
    wanted = (mask & LossMask.SUPERVISED != 0) & (mask & LossMask.TEMPLATE == 0)
    if rule == "last":
        return wanted & (mask & (LossMask.LAST_TURN | LossMask.OTHER) != 0)
    if rule == "no-reasoning":
        return wanted & (mask & LossMask.REASONING == 0)
    return wanted


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One conversation of the plan; it lies whole in one pack."""

    id: str
    source: str
    licence: str
    content_hash: str
    length: int  # tokens
    supervised: int  # tokens with a SUPERVISED bit
    pack: int
    start: int  # first token inside the pack
    held_out: bool


class SampleTable(Sequence[Sample]):
    """The samples of a plan as Arrow columns; a `Sample` is made when it is asked for.

    Millions of samples open in a fraction of a second this way.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [Sample(**row) for row in self.table.take(range(len(self))[index]).to_pylist()]
        (row,) = self.table.slice(range(len(self))[index], 1).to_pylist()
        return Sample(**row)

    def column(self, name: str) -> np.ndarray:
        """Return one field of every sample."""
        return self.table[name].to_numpy()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which samples stand where, and which forward batches compute them.

    `samples` is the training order. Unit u covers packs [u * unit_packs, (u + 1) * unit_packs);
    `batches[u]` lists its batches as sample indices.
    """

    samples: Sequence[Sample]
    batches: list[list[list[int]]]
    num_packs: int
    num_held_out_packs: int
    unit_packs: int
    report: dict[str, Any] = field(default_factory=dict)

    def pack_samples(self) -> list[list[int]]:
        """Return the sample indices of every pack, in order of their start."""
        pack, start = self.column("pack"), self.column("start")
        order = np.lexsort((start, pack))
        ends = np.searchsorted(pack[order], np.arange(self.num_packs), side="right")
        return [part.tolist() for part in np.split(order, ends[:-1])]

    def sample_table(self) -> pa.Table:
        """Return the samples as Arrow columns."""
        if isinstance(self.samples, SampleTable):
            return self.samples.table
        return pa.Table.from_pylist([asdict(sample) for sample in self.samples])

    def column(self, name: str) -> np.ndarray:
        """Return one field of every sample."""
        if isinstance(self.samples, SampleTable):
            return self.samples.column(name)
        return np.array([getattr(sample, name) for sample in self.samples])


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store: the shape that a pack has in it, its inner chunks, and their bytes."""

    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    codec: str

    @property
    def num_chunks(self) -> int:
        """Inner chunks of one shard."""
        return math.prod(self.shard) // math.prod(self.chunk)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Shapes and codecs of a store's arrays.

    `pack_tokens` is rounded up to whole inner chunks, so ask the schema, not the option.
    """

    layers: tuple[int, ...]
    hidden: int
    vocab_size: int
    pack_tokens: int
    codec: str = "lossless"
    teacher: str = "none"  # or "final": what lm_head consumes; "topk:K": its K best tokens

    def __post_init__(self) -> None:
        codecs.check_codec(self.codec, self.hidden)
        rounded = -(-self.pack_tokens // self.chunk_tokens) * self.chunk_tokens
        object.__setattr__(self, "pack_tokens", rounded)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of an inner chunk: the power of two nearest 8 MiB, from 64 to a pack."""
        row_bytes = codecs.code_bytes(self.codec, self.hidden) if self.is_coded else 2 * self.hidden
        exponent = round(np.log2(_CHUNK_BYTES / row_bytes))
        largest = 1 << (self.pack_tokens.bit_length() - 1)
        return max(_MIN_CHUNK_TOKENS, min(1 << exponent, largest))

    @property
    def is_coded(self) -> bool:
        """Whether states are codes, which need a calibration."""
        return self.codec in codecs.INT_CODECS

    @property
    def num_slots(self) -> int:
        """States of a token: the captured layers, then the final state where there is one."""
        return len(self.layers) + (self.teacher == "final")

    @property
    def num_topk(self) -> int:
        """Tokens that the teacher keeps of each prediction; 0 without such a teacher."""
        return int(self.teacher.removeprefix("topk:")) if ":" in self.teacher else 0

    @property
    def state_arrays(self) -> tuple[str, ...]:
        """Names of the arrays that a pack's commit writes."""
        states = (FEATURES, FINAL) if self.teacher == "final" else (FEATURES,)
        best = (TOPK_IDS, TOPK_LOGPROBS) if self.num_topk else ()
        if not self.is_coded:
            return (*states, *best)
        scales = (SCALES, FINAL_SCALES) if self.teacher == "final" else (SCALES,)
        return (*states, *scales, EXACT_ROWS, EXACT, *best)

    @property
    def arrays(self) -> dict[str, "ArraySpec"]:
        """Every array of the store."""
        t, c, n = self.pack_tokens, self.chunk_tokens, self.num_topk
        k, h = len(self.layers), self.hidden
        specs = {
            TOKENS: ArraySpec((t,), (t,), "int32", "raw"),
            LOSS_MASK: ArraySpec((t,), (t,), "uint8", "raw"),
            TOPK_IDS: ArraySpec((t, n), (c, n), "int32", "lossless"),
            TOPK_LOGPROBS: ArraySpec((t, n), (c, n), "float32", "lossless"),
        }
        if self.is_coded:
            w, g = codecs.code_bytes(self.codec, h), codecs.num_scales(self.codec, h)
            rows = self.num_slots * t
            specs |= {
                FEATURES: ArraySpec((k, t, w), (1, c, w), "int8" if w == h else "uint8", "raw"),
                FINAL: ArraySpec((t, h), (c, h), "int8", "raw"),
                SCALES: ArraySpec((k, t, g), (1, t, g), "uint16", "raw"),
                FINAL_SCALES: ArraySpec((t, 1), (t, 1), "uint16", "raw"),
                # Their unused ends are zeros, which `lossless` makes small.
                EXACT_ROWS: ArraySpec((rows,), (rows,), "int32", "lossless"),
                EXACT: ArraySpec((rows, h), (min(_EXACT_CHUNK_ROWS, c), h), "uint16", "lossless"),
            }
        else:
            specs |= {
                FEATURES: ArraySpec((k, t, h), (1, c, h), "uint16", self.codec),
                FINAL: ArraySpec((t, h), (c, h), "uint16", self.codec),
            }
        return {name: specs[name] for name in (*self.state_arrays, TOKENS, LOSS_MASK)}

    def array_json(self, name: str, num_packs: int) -> dict[str, Any]:
        """Return the zarr.json of one array."""
        spec = self.arrays[name]
        shape, shard, inner = (num_packs, *spec.shard), (1, *spec.shard), (1, *spec.chunk)
        return array_metadata(shape, shard, inner, spec.dtype, codecs.codec_named(spec.codec))

    def bytes_per_token(self) -> int:
        """Return the raw size of one token's states, in bytes."""
        return 2 * self.hidden * self.num_slots

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Schema":
        """Read what `as_dict` wrote."""
        return cls(**{**data, "layers": tuple(data["layers"])})


def shard_key(array: str, pack: int) -> str:
    """Return the object that holds one pack of one array."""
    two = (FINAL, FINAL_SCALES, EXACT, TOPK_IDS, TOPK_LOGPROBS)
    inner_axes = 3 if array in (FEATURES, SCALES) else 2 if array in two else 1
    return f"{array}/c/{pack}" + "/0" * inner_axes


def index_key(number: int) -> str:
    """Return the n-th index; numbers run from 0 without gaps."""
    return f"index-{number}"


def commit_key(pack: int) -> str:
    """Return the record that makes a pack exist."""
    return f"{COMMIT}/{pack:08d}.json"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the group's zarr.json says."""

    schema: Schema
    identity: Identity
    options: dict[str, Any]


def read_header(blobs: Blobs, *, required: bool = True) -> Header | None:
    """Read the root of a store.

    Raises:
        MissingStore: there is none (only when `required`).
        DamagedStore: it is not what the manifest states.
        BadInput: a newer format.
    """
    content, data = b"", {}
    try:
        content = blobs.read(GROUP_KEY)
        data = dict(json.loads(content)["attributes"][ATTRIBUTE])
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError) as problem:
        if not required and isinstance(problem, FileNotFoundError):
            return None
    if data.get("format", FORMAT) != FORMAT:
        raise BadInput(
            f"{blobs.url} has store format {data['format']}, this version reads {FORMAT}; "
            "install the version of dflash-offline that wrote it"
        )
    # Without a manifest the creation of the store or a copy was interrupted.
    stated = stated_digests(blobs) if content else {}
    if stated and records.sha256(content) != stated[GROUP_KEY]:
        raise DamagedStore(f"{GROUP_KEY} differs from the manifest")
    if not {"schema", "identity", "options"} <= data.keys():
        raise MissingStore(
            f"{blobs.url} holds no dflash-offline store (no readable {GROUP_KEY}); "
            "give the --out of a dflash-extract run"
        )
    return Header(
        schema=Schema.from_dict(data["schema"]),
        identity=Identity.from_dict(data["identity"]),
        options=data["options"],
    )


def read_plan(blobs: Blobs, *, batches: bool) -> tuple[Plan, list[dict[str, Any]]]:
    """Return all plans as one, and for each pack the sizes and checksums of its token arrays.

    Args:
        batches: read the forward batches too; only extraction needs them.

    Raises:
        DamagedStore: a file is missing or not what was written.
    """
    names = records.PLAN_FILES if batches else (records.PLAN_FILES[0], records.PLAN_FILES[2])
    stated = stated_digests(blobs, required=True)
    plans = range(count_plans(blobs))
    keys = [{name: f"{PLAN}/{n}/{name}" for name in names} for n in plans]
    files = [{n: read_fixed(blobs, key, stated) for n, key in each.items()} for each in keys]
    parts = list(map(records.read_plan_files, files))
    plan = Plan(
        samples=SampleTable(pa.concat_tables([part.samples for part in parts])),
        batches=[batch for part in parts for batch in part.batches],
        num_packs=sum(part.fields["num_packs"] for part in parts),
        num_held_out_packs=sum(part.fields["num_held_out_packs"] for part in parts),
        unit_packs=parts[-1].fields["unit_packs"],
        report=parts[-1].fields["report"],
    )
    return plan, [files for part in parts for files in part.fields["token_files"]]


def count_plans(blobs: Blobs) -> int:
    """Return the number of plans whose manifest is written; others do not count yet."""
    number = 0
    while exists(blobs, manifest_key(number)):
        number += 1
    return number


def manifest_key(plan: int) -> str:
    """Return the manifest that closes a plan; the first is the store's."""
    return MANIFEST_KEY if plan == 0 else f"{PLAN}/{plan}/{MANIFEST_KEY}"


def stated_digests(blobs: Blobs, *, required: bool = False) -> dict[str, str]:
    """Return the SHA-256 of the files in the manifests of all plans; empty before the first.

    Raises:
        DamagedStore: a manifest is not what was written, or there is none though `required`.
    """
    stated: dict[str, str] = {}  # a later plan's has the newer digest of what an append replaced
    for key in map(manifest_key, range(count_plans(blobs))):
        stated |= records.parse_manifest(blobs.read(key), key)
    if required and not stated:
        raise DamagedStore(f"{MANIFEST_KEY} is missing")
    return stated


def read_fixed(blobs: Blobs, key: str, stated: Mapping[str, str]) -> bytes:
    """Return a file that no pack changes.

    Raises:
        DamagedStore: it is missing or not what its manifest states.
    """
    try:
        content = blobs.read(key)
    except FileNotFoundError:
        raise DamagedStore(f"{key} is missing") from None
    if records.sha256(content) != stated.get(key):
        raise DamagedStore(f"{key} differs from the manifest")
    return content


def exists(blobs: Blobs, key: str) -> bool:
    """Return whether an object exists."""
    try:
        blobs.size(key)
    except FileNotFoundError:
        return False
    return True
