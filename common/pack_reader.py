"""Reading inner chunks of a shard into the caller's arrays, several at a time, every byte checked.

`raw` chunks, codes among them, land where the caller wants them, in page-locked memory for one,
without another copy on local disks and with one on object storage. Neighbouring chunks are not
read as one: at 8 MiB each a request is long enough.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from dflash_offline.common.blobs import Blobs
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.direct_io import copy_into
from dflash_offline.common.errors import DamagedStore
from dflash_offline.common.shards import BadShard, index_bytes, parse_index, read_chunk
from dflash_offline.common.store import Schema, exists, shard_key


def read_chunks(
    blobs: Blobs,
    schema: Schema,
    name: str,
    pack: int,
    record: dict[str, Any],
    wanted: Sequence[tuple[int, np.ndarray]],
) -> None:
    """Read inner chunks of one shard into caller-owned arrays.

    Args:
        record: size and checksums of the shard, from the commit record.
        wanted: (inner chunk number, C-contiguous array to fill).

    Raises:
        DamagedStore: names the pack, the array and what is wrong.
    """
    key = shard_key(name, pack)
    attempts = blobs.rereads + 1
    for attempt in range(attempts):
        try:
            _read_once(blobs, schema, name, key, record, wanted)
            return
        except BadShard as problem:
            if attempt + 1 == attempts:
                raise DamagedStore(f"pack {pack}, array {name} ({key}): {problem}") from problem
            blobs.forget(key)
        except FileNotFoundError:
            raise DamagedStore(f"pack {pack}, array {name}: {key} is missing") from None


def read_flat(
    blobs: Blobs, schema: Schema, name: str, pack: int, record: dict[str, Any]
) -> np.ndarray:
    """Read a whole one-chunk shard: `tokens` int32 or `loss_mask` uint8, [pack_tokens]."""
    out = np.empty(schema.pack_tokens, schema.arrays[name].dtype)
    read_chunks(blobs, schema, name, pack, record, [(0, out)])
    return out


def damaged_flat(
    blobs: Blobs, schema: Schema, pack: int, records: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Return the keys of a pack's one-chunk shards that are there and not what was written.

    Args:
        records: array to size and checksums.
    """
    damaged = []
    for name, record in records.items():
        try:
            read_flat(blobs, schema, name, pack, record)
        except DamagedStore:
            damaged.append(shard_key(name, pack))
    return [key for key in damaged if exists(blobs, key)]


def _read_once(
    blobs: Blobs,
    schema: Schema,
    name: str,
    key: str,
    record: dict[str, Any],
    wanted: Sequence[tuple[int, np.ndarray]],
) -> None:
    spec = schema.arrays[name]
    codec = codec_named(spec.codec)
    tail = index_bytes(spec.num_chunks)
    if spec.num_chunks == 1:
        # One request instead of two.
        content = memoryview(blobs.read(key))
        _check_size(len(content), record["bytes"])
        ending = bytes(content[-tail:])
        read_into = partial(copy_into, content)
    else:
        if blobs.rereads == 0:
            # Where it costs nothing; a request more elsewhere, and the index would not match.
            _check_size(blobs.size(key), record["bytes"])
        ending = blobs.read_range(key, -tail, tail)
        read_into = partial(blobs.read_into, key)
    index = parse_index(ending, spec.num_chunks)

    def fill(number: int, out: np.ndarray) -> None:
        read_chunk(read_into, index[number], record["crc32c"][number], out, codec)

    num_threads = min(blobs.parallel, len(wanted))
    if num_threads <= 1:
        for number, out in wanted:
            fill(number, out)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-chunk") as pool:
        for done in [pool.submit(fill, number, out) for number, out in wanted]:
            done.result()


def _check_size(num_bytes: int, recorded: int) -> None:
    if num_bytes != recorded:
        raise BadShard(f"{num_bytes} bytes where {recorded} were written")
