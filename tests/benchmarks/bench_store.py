"""Bytes of a store, against the bars of the project: reading, writing, a subset of layers.

Reads packs of 16,384 tokens x 5 layers x 5,120 channels from a memory file system into page-aligned
memory that is there already, as page-locked memory is, and compares with zarr-python on the same
shards. Writes the same bytes to a disk beside a plain O_DIRECT write and fsync of them. With --url
it also moves a pack to object storage and back by each client. Rates are by CPU second where they
say so: one core's worth, whatever else runs on the machine.

    python tests/benchmarks/bench_store.py --memory /dev/shm --disk /tmp
"""

import argparse
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.common.blobs import Blobs, LocalBlobs, blobs_at
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.direct_io import Seen, aligned_buffer
from dflash_offline.common.pack_arrays import inner_chunks
from dflash_offline.common.pack_reader import read_chunks
from dflash_offline.common.shards import ShardWriter
from dflash_offline.common.store import FEATURES, GROUP_KEY, Schema, shard_key

BLOCK_BYTES = 8 << 20
READS = 8  # the best counts: other work on the machine takes memory bandwidth
WRITES = 6


def schema_for(codec: str, tokens: int) -> Schema:
    return Schema(
        layers=(1, 9, 17, 25, 33), hidden=5120, vocab_size=1000, pack_tokens=tokens, codec=codec
    )


def random_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits in page-aligned memory."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = aligned_buffer(num_bytes)[:num_bytes]
    np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(0).integers(
        0, 1 << 63, num_bytes // 8, np.uint64
    )
    return np.frombuffer(memory, dtype).reshape(shape)


def write_pack(blobs: Blobs, schema: Schema, values: np.ndarray) -> dict[str, Any]:
    """Write one shard of features and return what a commit record says of it."""
    spec = schema.arrays[FEATURES]
    writer = ShardWriter(inner_chunks(spec, values), codec_named(spec.codec))
    num_bytes = blobs.create(shard_key(FEATURES, 0), writer.parts())
    return {"bytes": num_bytes, "crc32c": writer.crcs}


def read_pack(
    blobs: Blobs, schema: Schema, record: dict[str, Any], out: np.ndarray, layers: range
) -> None:
    """Read whole layers of a pack into `out` [layers, T, width]."""
    size, per_layer = schema.chunk_tokens, schema.pack_tokens // schema.chunk_tokens
    wanted = [
        (layer * per_layer + chunk, out[row, chunk * size :][:size])
        for row, layer in enumerate(layers)
        for chunk in range(per_layer)
    ]
    read_chunks(blobs, schema, FEATURES, 0, record, wanted)


def measured(work: Callable[[], object], num_bytes: int) -> dict[str, float]:
    """Best of a few runs: GB/s of wall time and of CPU time, and extra peak memory in bytes."""
    best = {"wall": 0.0, "cpu": 0.0, "extra": float("inf")}
    for _ in range(READS):
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_kb("VmRSS")
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        best["wall"] = max(best["wall"], num_bytes / wall / 1e9)
        best["cpu"] = max(best["cpu"], num_bytes / max(cpu, 1e-9) / 1e9)
        best["extra"] = min(best["extra"], 1024 * max(0, memory_kb("VmHWM") - before))
    return best


def memory_kb(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def plain_read(path: Path, out: memoryview) -> None:
    """Read the beginning of a file without looking at it: what copying alone takes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for first in range(0, len(out), BLOCK_BYTES):
            os.preadv(descriptor, [out[first : first + BLOCK_BYTES]], first)
    finally:
        os.close(descriptor)


def bench_reading(folder: Path, codec: str, tokens: int, num_threads: int) -> None:
    import zarr

    schema = schema_for(codec, tokens)
    spec = schema.arrays[FEATURES]
    blobs = LocalBlobs(folder)
    blobs.parallel = num_threads
    values = random_array(spec.shard, spec.dtype)
    record = write_pack(blobs, schema, values)
    blobs.create(f"{FEATURES}/{GROUP_KEY}", [json.dumps(schema.array_json(FEATURES, 1)).encode()])
    out = random_array(spec.shard, spec.dtype)
    out[...] = 0
    layers = range(len(schema.layers))
    ours = measured(lambda: read_pack(blobs, schema, record, out, layers), record["bytes"])
    assert np.array_equal(out, values), "wrong bytes"

    whole = memoryview(out).cast("B")
    copied = measured(lambda: plain_read(folder / shard_key(FEATURES, 0), whole), len(whole))
    array = zarr.open_array(str(folder / FEATURES), mode="r")
    theirs_out: list[np.ndarray] = []

    def by_zarr() -> None:
        theirs_out[:] = [array[0]]

    theirs = measured(by_zarr, record["bytes"])
    assert np.array_equal(theirs_out[0], values), "wrong bytes"
    print(
        f"read {codec:5}  {ours['cpu']:.2f} GB/s a core ({ours['wall']:.2f} wall, "
        f"{num_threads} threads; copying alone {copied['cpu']:.2f} a core), extra memory "
        f"{100 * ours['extra'] / record['bytes']:.1f} % of {record['bytes'] / 1e6:.0f} MB; "
        f"zarr-python {theirs['cpu']:.2f} a core ({theirs['wall']:.2f} wall), extra "
        f"{100 * theirs['extra'] / record['bytes']:.0f} %; ratio "
        f"{ours['cpu'] / theirs['cpu']:.1f} by CPU, {ours['wall'] / theirs['wall']:.1f} wall"
    )


def bench_subset(folder: Path, tokens: int) -> None:
    """Bytes that reading one of five layers moves."""
    moved = 0

    class Counting(LocalBlobs):
        def read_into(
            self, key: str, offset: int, *buffers: memoryview, seen: Seen | None = None
        ) -> int:
            nonlocal moved
            moved += sum(map(len, buffers))
            return super().read_into(key, offset, *buffers, seen=seen)

        def read_range(self, key: str, offset: int, length: int) -> bytes:
            nonlocal moved
            moved += length
            return super().read_range(key, offset, length)

    schema = schema_for("raw", tokens)
    blobs = Counting(folder)
    values = random_array(schema.arrays[FEATURES].shard, "uint16")
    record = write_pack(blobs, schema, values)
    out = np.empty((1, *values.shape[1:]), np.uint16)
    read_pack(blobs, schema, record, out, range(2, 3))
    assert np.array_equal(out[0], values[2]), "wrong bytes"
    print(
        f"subset      one of five layers moves {moved / 1e6:.1f} MB of {record['bytes'] / 1e6:.1f} "
        f"({100 * moved / record['bytes']:.2f} %)"
    )


def plain_write(path: Path, values: np.ndarray) -> None:
    """Write with O_DIRECT in blocks of 8 MiB, and fsync."""
    view = memoryview(values).cast("B")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        for first in range(0, len(view), BLOCK_BYTES):
            part = view[first : first + BLOCK_BYTES]
            assert os.pwrite(descriptor, part, first) == len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bench_writing(folder: Path, tokens: int) -> None:
    schema = schema_for("raw", tokens)
    values = random_array(schema.arrays[FEATURES].shard, "uint16")
    ratios, ours_s, plain_s = [], [], []
    for _ in range(WRITES):
        began = time.perf_counter()
        plain_write(folder / "plain", values)
        plain_s.append(time.perf_counter() - began)
        (folder / "plain").unlink()
        blobs, cpu = LocalBlobs(folder / uuid.uuid4().hex), time.process_time()
        began = time.perf_counter()
        write_pack(blobs, schema, values)
        ours_s.append(time.perf_counter() - began)
        cpu = time.process_time() - cpu
        shutil.rmtree(blobs.root)
        ratios.append(plain_s[-1] / ours_s[-1])
    gigabytes = values.nbytes / 1e9
    print(
        f"write raw   {gigabytes / min(ours_s):.2f} GB/s ({gigabytes / cpu:.1f} a CPU second); "
        f"plain O_DIRECT + fsync {gigabytes / min(plain_s):.2f} GB/s; ratio "
        f"{min(plain_s) / min(ours_s):.2f} of the best, {np.median(ratios):.2f} median of "
        f"{len(ratios)} pairs"
    )


def bench_remote(url: str, options: list[str], tokens: int) -> None:
    """One pack to object storage and back."""
    schema = schema_for("raw", tokens)
    values = random_array(schema.arrays[FEATURES].shard, "uint16")
    out = np.zeros_like(values)
    for client in ("s3fs", "obstore"):
        blobs = blobs_at(f"{url}/{uuid.uuid4().hex}", [*options, f"client={client}"])
        rates = []
        record: dict[str, Any] = {}

        def write(blobs: Blobs = blobs, record: dict[str, Any] = record) -> None:
            record |= write_pack(blobs, schema, values)

        def read(blobs: Blobs = blobs, record: dict[str, Any] = record) -> None:
            read_pack(blobs, schema, record, out, range(len(schema.layers)))

        for work in (write, read):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rates.append(f"{values.nbytes / cpu / 1e9:.2f} ({values.nbytes / wall / 1e9:.2f} wall)")
        assert np.array_equal(out, values), "wrong bytes"
        blobs.delete(shard_key(FEATURES, 0))
        print(f"{client:11} GB a client CPU second: write {rates[0]}, read {rates[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="memory file system")
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="folder on a disk")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a pack")
    parser.add_argument("--threads", type=int, default=1, help="chunks read at the same time")
    parser.add_argument("--url", help="object storage to try too")
    parser.add_argument("--storage-option", action="append", default=[], help="KEY=VALUE")
    given = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, NumPy {np.__version__}"
    )
    name = f"bench-store-{uuid.uuid4().hex}"
    for codec in ("raw", "int8", "int4"):
        try:
            bench_reading(given.memory / name, codec, given.tokens, given.threads)
        finally:
            shutil.rmtree(given.memory / name, ignore_errors=True)
    try:
        bench_subset(given.memory / name, given.tokens)
    finally:
        shutil.rmtree(given.memory / name, ignore_errors=True)
    (given.disk / name).mkdir()
    try:
        bench_writing(given.disk / name, given.tokens)
    finally:
        shutil.rmtree(given.disk / name)
    if given.url:
        bench_remote(given.url, given.storage_option, given.tokens)


if __name__ == "__main__":
    main()
