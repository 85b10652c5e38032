"""Which packs exist: the newest index, and the commit records that it does not hold yet.

Indexes are numbered from 0 without gaps, each written once. The highest counts. It lists packs with
the digest of their record; a pack given up stays listed with the digest of the record that no
longer counts, so that a crash between the new index and the deletion changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, in_parallel
from dflash_offline.common.errors import DamagedStore
from dflash_offline.common.store import COMMIT, Schema, commit_key, exists, index_key, shard_key


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Committed packs of a store."""

    number: int = 0  # indexes written; the next is `index-<number>`
    packs: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)

    @property
    def given_up(self) -> set[int]:
        """Packs that were dropped and do not exist again."""
        return self.dropped.keys() - self.packs.keys()

    def added(self, pack: int, record: bytes, quarantined: list[int]) -> "PackIndex":
        """Return the index with one more pack."""
        entry = (records.sha256(record), quarantined)
        return replace(self, packs={**self.packs, pack: entry})

    def without(self, packs: set[int]) -> "PackIndex":
        """Return the index with packs given up."""
        gone = {pack: self.packs[pack][0] for pack in packs}
        kept = {pack: entry for pack, entry in self.packs.items() if pack not in packs}
        return replace(self, packs=kept, dropped={**self.dropped, **gone})

    def cleared(self) -> "PackIndex":
        """Return the index once the records of packs given up are gone.

        The same bytes are likely to be committed again, and count then.
        """
        return replace(self, dropped={})


def read_pack_index(blobs: Blobs, num_packs: int) -> PackIndex:
    """Return the packs that exist.

    Args:
        num_packs: packs of the plan; an index that holds them all needs no listing.

    Raises:
        DamagedStore: an index or a record is not what was written.
    """
    number = _count_indexes(blobs)
    index = PackIndex(number=number)
    if number:
        key = index_key(number - 1)
        data = records.parse_index(blobs.read(key), key)
        index = PackIndex(number=number, packs=data["packs"], dropped=data["dropped"])
    if all(pack in index.packs for pack in range(num_packs)):
        return index
    found = dict(index.packs)
    wanted = {key: pack_of(key) for key in blobs.list(COMMIT)}
    keys = [key for key, pack in wanted.items() if pack is not None and pack not in found]
    for key, content in zip(keys, in_parallel(blobs, blobs.read, keys), strict=True):
        pack = wanted[key]
        assert pack is not None, "chosen above"
        record = records.parse_commit(content, key)
        if record["pack"] != pack:
            raise DamagedStore(f"{key} is the record of pack {record['pack']}")
        digest = records.sha256(content)
        if index.dropped.get(pack) != digest:
            found[pack] = (digest, sorted(record["quarantined"]))
    return replace(index, packs=found)


def damaged_indexes(blobs: Blobs) -> list[str]:
    """Return the keys of all indexes, current or not, that are not what was written."""
    damaged = []
    for number in range(_count_indexes(blobs)):
        try:
            records.parse_index(blobs.read(index_key(number)), index_key(number))
        except DamagedStore:
            damaged.append(index_key(number))
    return damaged


def write_pack_index(blobs: Blobs, index: PackIndex, num_packs: int) -> PackIndex:
    """Write the next index and return it with its number."""
    complete = len(index.packs) == num_packs
    content = records.index_record(index.packs, complete=complete, dropped=index.dropped)
    blobs.create(index_key(index.number), [content])
    return replace(index, number=index.number + 1)


def scan_records(blobs: Blobs) -> tuple[PackIndex, list[str]]:
    """Return the packs that exist by their records alone, and the keys of unreadable records.

    Also works where an index is damaged.
    """
    number = _count_indexes(blobs)
    dropped: dict[int, str] = {}
    if number:
        key = index_key(number - 1)
        try:
            dropped = records.parse_index(blobs.read(key), key)["dropped"]
        except DamagedStore:
            dropped = {}
    packs, unreadable = {}, []
    for key in blobs.list(COMMIT):
        content = blobs.read(key)
        try:
            record = records.parse_commit(content, key)
        except DamagedStore:
            unreadable.append(key)
            continue
        digest = records.sha256(content)
        if pack_of(key) == record["pack"] and dropped.get(record["pack"]) != digest:
            packs[record["pack"]] = (digest, sorted(record["quarantined"]))
    return PackIndex(number=number, packs=packs, dropped=dropped), unreadable


def leftovers(blobs: Blobs, schema: Schema, packs: Collection[int]) -> list[str]:
    """Return temporary files, and shards of states and records of packs that do not exist.

    Args:
        packs: that exist.
    """
    kept = {shard_key(name, pack) for name in schema.state_arrays for pack in packs}
    kept |= {commit_key(pack) for pack in packs}
    folders = (*(f"{name}/c" for name in schema.state_arrays), COMMIT)
    return [key for folder in folders for key in blobs.list(folder) if key not in kept]


def read_record(blobs: Blobs, index: PackIndex, pack: int) -> dict:
    """Read the commit record of a pack in the index.

    Raises:
        DamagedStore: missing, or not the one that the index means.
    """
    key = commit_key(pack)
    try:
        content = blobs.read(key)
    except FileNotFoundError:
        raise DamagedStore(f"pack {pack}: {key} is missing") from None
    record = records.parse_commit(content, key)
    if records.sha256(content) != index.packs[pack][0]:
        raise DamagedStore(f"pack {pack}: {key} is not the record that the index names")
    return record


def pack_of(key: str) -> int | None:
    """Return the pack of a record's key, `None` for anything else that lies there."""
    name = key.rpartition("/")[2].removesuffix(".json")
    return int(name) if name.isdecimal() else None


def _count_indexes(blobs: Blobs) -> int:
    """Find the end of the gapless numbers by doubling and halving: few look-ups, no listing."""
    if not exists(blobs, index_key(0)):
        return 0
    low, high = 0, 1
    while exists(blobs, index_key(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(blobs, index_key(middle)) else (low, middle)
    return high
