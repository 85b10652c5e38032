"""Bytes of a zarr v3 shard: one pack of one array, written and read without zarr's copies.

A shard is the inner chunks in C order, each closed by its CRC-32C and padded to 4 KiB so that
direct I/O can land in the final buffer, then the index (offset and length of each chunk, all ones
where a chunk is absent) closed by a CRC-32C. zarr-python and tensorstore read the same bytes.
See "Store, format 1" in docs/store-format.md.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from crc32c import crc32c

from dflash_offline.common.codecs import Codec, Raw
from dflash_offline.common.direct_io import ALIGN_BYTES, scratch_buffer

CRC_BYTES = 4
# No codec makes a chunk this much longer than its content.
_LONGEST_FACTOR = 2
_ABSENT = 0xFFFFFFFFFFFFFFFF
_CRC_CODEC = {"name": "crc32c"}


class BadShard(ValueError):
    """A shard's bytes are not what was written; the caller knows and adds its address."""


def checksum(data: Any) -> int:
    """Return the CRC-32C of any buffer; releases the GIL."""
    return crc32c(data, gil_release_mode=1)


class RunningChecksum:
    """The CRC-32C of pieces that come one after another."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, piece: memoryview) -> None:
        self.value = crc32c(piece, self.value, gil_release_mode=1)


def array_metadata(
    shape: tuple[int, ...], shard: tuple[int, ...], inner: tuple[int, ...], dtype: str, codec: Codec
) -> dict[str, Any]:
    """Return the zarr.json of an array of shards.

    Args:
        shape: of the whole array; the first axis counts packs.
        shard: shape of one object.
        inner: shape of one inner chunk, the smallest part that can be read.
        dtype: zarr data type; bfloat16 goes as `uint16` with attribute `true_dtype`.
        codec: gives the codec chain in front of the checksum.
    """
    attributes = {"true_dtype": "bfloat16"} if dtype == "uint16" else {}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, _CRC_CODEC]
    sharding = {
        "chunk_shape": list(inner),
        "codecs": [*_codecs_for(codec, dtype), _CRC_CODEC],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes,
    }


def _codecs_for(codec: Codec, dtype: str) -> list[dict[str, Any]]:
    # The endianness of single bytes has no meaning, and strict readers refuse it.
    if dtype in ("uint8", "int8"):
        return [{"name": "bytes"}, *codec.zarr_codecs[1:]]
    return codec.zarr_codecs


@dataclass
class ShardWriter:
    """Turn inner chunks into the parts of a shard; sizes and checksums are known afterwards.

    `parts()` may be iterated once. Chunks that are `None` are absent.
    """

    chunks: Iterable[np.ndarray | None]
    codec: Codec
    crcs: list[int | None] = field(default_factory=list)
    num_bytes: int = 0

    def parts(self) -> Iterator[memoryview | bytes]:
        """Yield the shard's bytes in order, the index last."""
        index: list[tuple[int, int]] = []
        for chunk in self.chunks:
            if chunk is None:
                index.append((_ABSENT, _ABSENT))
                self.crcs.append(None)
                continue
            payload = self.codec.encode(chunk)
            crc = checksum(payload)
            length = len(payload) + CRC_BYTES
            index.append((self.num_bytes, length))
            self.crcs.append(crc)
            padding = -length % ALIGN_BYTES
            self.num_bytes += length + padding
            yield payload
            yield struct.pack("<I", crc) + bytes(padding)
        table = np.array(index, dtype="<u8").reshape(-1, 2).tobytes()
        self.num_bytes += len(table) + CRC_BYTES
        yield table + struct.pack("<I", checksum(table))


def index_bytes(num_chunks: int) -> int:
    """Return the size of the index that ends a shard, in bytes."""
    return 16 * num_chunks + CRC_BYTES


def parse_index(tail: bytes, num_chunks: int) -> list[tuple[int, int] | None]:
    """Return (offset, length) of each inner chunk, `None` where it is absent.

    Raises:
        BadShard: wrong size or checksum.
    """
    if len(tail) != index_bytes(num_chunks):
        raise BadShard(f"index of {len(tail)} bytes where {index_bytes(num_chunks)} are expected")
    table, (crc,) = tail[:-CRC_BYTES], struct.unpack("<I", tail[-CRC_BYTES:])
    if checksum(table) != crc:
        raise BadShard("index checksum")
    entries = np.frombuffer(table, dtype="<u8").reshape(-1, 2)
    return [None if int(o) == _ABSENT else (int(o), int(n)) for o, n in entries]


def read_chunk(
    read_into: Callable[..., int],
    entry: tuple[int, int] | None,
    recorded_crc: int | None,
    out: np.ndarray,
    codec: Codec,
) -> None:
    """Read one inner chunk into `out`, checked against its own and the recorded checksum.

    Args:
        read_into: fills buffers with the object's bytes, `read_into(offset, *buffers, seen=…)`,
            and returns how many it read; calls `seen` with the pieces of the first buffer.
        entry: where the chunk lies, from `parse_index`.
        recorded_crc: what the commit record says.
        out: C-contiguous array of the inner chunk's shape; `raw` bytes are read straight into it.

    Raises:
        BadShard: absent where the record has one, short, or of another checksum.
    """
    if entry is None:
        decode_chunk(None, recorded_crc, out, codec)
        return
    offset, length = entry
    if isinstance(codec, Raw) and length == out.nbytes + CRC_BYTES:
        payload, tail = memoryview(out).cast("B"), memoryview(bytearray(CRC_BYTES))
        running = RunningChecksum()
        _check_length(read_into(offset, payload, tail, seen=running.add), length)
        _check_crc(running.value, tail, recorded_crc)
        return
    if length > _LONGEST_FACTOR * out.nbytes + ALIGN_BYTES:
        raise BadShard(f"chunk of {length} bytes for {out.nbytes} of content")
    stored = scratch_buffer(length)
    _check_length(read_into(offset, stored), length)
    decode_chunk(stored, recorded_crc, out, codec)


def decode_chunk(
    stored: memoryview | None, recorded_crc: int | None, out: np.ndarray, codec: Codec
) -> None:
    """Decode the stored bytes of one inner chunk, `None` where it is absent, into `out`.

    Raises:
        BadShard: absent where the record has one, short, or of another checksum.
    """
    if (stored is None) != (recorded_crc is None):
        raise BadShard("chunk presence differs from the commit record")
    if stored is None:
        out[...] = 0
        return
    if len(stored) <= CRC_BYTES:
        raise BadShard(f"chunk of {len(stored)} bytes")
    payload = stored[:-CRC_BYTES]
    _check_crc(checksum(payload), stored[-CRC_BYTES:], recorded_crc)
    try:
        codec.decode(payload, out)
    except ValueError as problem:
        raise BadShard(f"chunk does not decode: {problem}") from problem


def _check_length(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise BadShard(f"{num_bytes} bytes where {expected} are expected")


def _check_crc(computed: int, tail: memoryview, recorded_crc: int | None) -> None:
    (crc,) = struct.unpack("<I", tail)
    if crc != recorded_crc:
        raise BadShard("chunk checksum differs from the commit record")
    if computed != crc:
        raise BadShard("chunk checksum")
