"""`dflash-cache verify`: is every byte of a store what was written, and does it make sense?

The fast pass checks records, indexes, small files and sizes. The deep pass reads everything: the
checksum of every inner chunk, zeros in the gaps between them, finite states, token ids in range,
and the SHA-256 of every file in the manifests.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import click
import numpy as np
from rich.progress import track

from dflash_offline.common.blobs import Blobs
from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import VerifyConfig
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.errors import DamagedStore, FoundProblems
from dflash_offline.common.options import FAILING_DISK
from dflash_offline.common.pack_index import damaged_indexes
from dflash_offline.common.records import REMOVED
from dflash_offline.common.shards import BadShard, decode_chunk, index_bytes, parse_index
from dflash_offline.common.store import (
    LOSS_MASK,
    TARGET,
    TOKENS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    commit_key,
    count_plans,
    manifest_key,
    read_plan,
    shard_key,
)

# Exponent bits all ones: infinity or not a number.
_BFLOAT16_EXPONENT = 0x7F80
_HASH_BYTES = 16 << 20


def verify(config: VerifyConfig) -> None:
    """Check a store and print one line for each problem.

    Raises:
        FoundProblems: something is wrong.
    """
    cache = open_cache(config.url, partial=True, storage_options=config.storage_option)
    problems = find_problems(cache, deep=config.deep, threads=config.threads, progress=True)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise FoundProblems(
            f"{len(problems)} problems in {config.url}; dflash-cache repair gives up broken packs, "
            "but none for a disk that fails"
        )
    kind = "every byte" if config.deep else "records and sizes"
    packs = f"{len(cache.packs)} of {cache.plan.num_packs} packs"
    click.echo(f"{config.url}: {packs}, {kind} checked, nothing wrong")


def find_problems(
    cache: Cache, *, deep: bool, threads: int = 1, progress: bool = False
) -> list[str]:
    """Return one line for each problem: `pack P, array A (key): …` or `FILE: …`."""
    planned = _planned_tokens(cache)
    check = partial(_pack_problems, cache, planned, deep=deep, reports_failing=True)
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(check, cache.packs)
        if progress:
            results = track(results, "verify", total=len(cache.packs), transient=True)
        by_pack = [line for lines in results for line in lines]
    return [*find_file_problems(cache, deep=deep), *by_pack]


def broken_packs(cache: Cache) -> dict[int, str]:
    """Return the packs that are not what was written, with the first reason; reads every byte.

    Raises:
        OSError: the disk, or the way to it, fails; what lies there may be whole.
    """
    tokens = _planned_tokens(cache)
    found = ((pack, _pack_problems(cache, tokens, pack, deep=True)) for pack in cache.packs)
    return {pack: lines[0] for pack, lines in found if lines}


def find_file_problems(cache: Cache, *, deep: bool) -> Iterator[str]:
    """Yield one line for each file outside the packs that is missing or damaged."""
    try:
        stated = cache.fixed_files()
    except DamagedStore as problem:
        yield str(problem)
        return
    if cache.num_unplanned:
        key = manifest_key(count_plans(cache.blobs))
        yield f"{key}: missing, though {cache.num_unplanned} packs of its plan are there"
    for key in damaged_indexes(cache.blobs):
        yield f"{key}: does not match its own checksum"
    for key, digest in stated.items():
        # The target's tensors can be large; their bytes belong to the deep pass.
        if key.startswith(f"{TARGET}/") and not deep:
            try:
                cache.blobs.size(key)
            except FileNotFoundError:
                yield f"{key}: missing"
            continue
        try:
            if _sha256_of(cache.blobs, key) != digest:
                yield f"{key}: differs from the manifest"
        except FileNotFoundError:
            yield f"{key}: missing"
        except OSError as problem:
            yield f"{key}: {_unreadable(problem)}"


def _sha256_of(blobs: Blobs, key: str) -> str:
    digest, offset, size = hashlib.sha256(), 0, blobs.size(key)
    while offset < size:
        part = blobs.read_range(key, offset, min(_HASH_BYTES, size - offset))
        digest.update(part)
        offset += len(part)
    return digest.hexdigest()


def _planned_tokens(cache: Cache) -> list[dict[str, Any]]:
    """Return sizes and checksums of each pack's token arrays as planned."""
    return read_plan(cache.blobs, batches=False)[1]


def _unreadable(problem: OSError) -> str:
    """Return what a failing disk is told as; other problems are raised again."""
    if problem.errno not in FAILING_DISK:
        raise problem
    return f"cannot be read ({problem.strerror}); the disk, or the way to it, fails"


def _pack_problems(
    cache: Cache,
    planned: Sequence[Mapping[str, Any]],
    pack: int,
    *,
    deep: bool,
    reports_failing: bool = False,
) -> list[str]:
    try:
        record = cache.record(pack)
    except DamagedStore as problem:
        return [str(problem)]
    except OSError as problem:
        if not reports_failing:
            raise
        return [f"pack {pack}: {commit_key(pack)} {_unreadable(problem)}"]
    arrays, problems = record["arrays"], []
    # Where samples were removed, the tokens are not those of the plan.
    if REMOVED not in record["quarantined"].values() and any(
        arrays[name] != planned[pack][name] for name in (TOKENS, LOSS_MASK)
    ):
        problems.append(f"pack {pack}: {commit_key(pack)} is the record of another plan")
    for name, stated in arrays.items():
        key = shard_key(name, pack)
        try:
            if deep:
                read_checked(cache, name, pack, stated)
            elif (size := cache.blobs.size(key)) != stated["bytes"]:
                raise DamagedStore(
                    f"pack {pack}, array {name} ({key}): {size} bytes where {stated['bytes']} "
                    "were written"
                )
        except FileNotFoundError:
            problems.append(f"pack {pack}, array {name} ({key}): missing")
        except DamagedStore as problem:
            problems.append(str(problem))
        except OSError as problem:
            if not reports_failing:
                raise
            problems.append(f"pack {pack}, array {name} ({key}): {_unreadable(problem)}")
    return problems


def read_checked(cache: Cache, name: str, pack: int, stated: Mapping[str, Any]) -> bytes:
    """Return one shard, every byte of which was checked; asked for again where a network is.

    Args:
        stated: `bytes` and `crc32c` of the array, from the record or the plan.

    Raises:
        DamagedStore: names pack, array and what is wrong.
        FileNotFoundError: there is none.
    """
    for _ in range(cache.blobs.rereads):
        with suppress(DamagedStore):
            return _read_once(cache, name, pack, stated)
    return _read_once(cache, name, pack, stated)


def _read_once(cache: Cache, name: str, pack: int, stated: Mapping[str, Any]) -> bytes:
    content = cache.blobs.read(shard_key(name, pack))
    _check_shard(cache, name, pack, content, stated)
    return content


def _check_shard(
    cache: Cache, name: str, pack: int, content: bytes, stated: Mapping[str, Any]
) -> None:
    try:
        if len(content) != stated["bytes"]:
            raise BadShard(f"{len(content)} bytes where {stated['bytes']} were written")
        _check_content(cache, name, content, stated["crc32c"])
    except BadShard as problem:
        raise DamagedStore(f"pack {pack}, array {name} ({shard_key(name, pack)}): {problem}") from (
            problem
        )


def _check_content(cache: Cache, name: str, content: bytes, crcs: list[int | None]) -> None:
    spec = cache.schema.arrays[name]
    tail = index_bytes(spec.num_chunks)
    index = parse_index(content[-tail:], spec.num_chunks)
    _check_gaps(content, index, len(content) - tail)
    out = np.empty(spec.chunk, spec.dtype)
    codec = codec_named(spec.codec)
    view = memoryview(content)
    for number, entry in enumerate(index):
        stored = None if entry is None else view[entry[0] : sum(entry)]
        decode_chunk(stored, crcs[number], out, codec)
        if entry is not None:
            _check_values(name, number, out, cache.schema.vocab_size)


def _check_gaps(content: bytes, index: list[tuple[int, int] | None], end: int) -> None:
    position = 0
    for offset, length in sorted(entry for entry in index if entry is not None):
        if content[position:offset].strip(b"\0"):
            raise BadShard(f"bytes {position} to {offset} lie in no chunk and are not zero")
        position = offset + length
    if content[position:end].strip(b"\0"):
        raise BadShard(f"bytes {position} to {end} lie in no chunk and are not zero")


def _check_values(name: str, number: int, values: np.ndarray, vocab_size: int) -> None:
    if name == TOKENS:
        if values.min() < 0 or values.max() >= vocab_size:
            raise BadShard(f"token ids outside 0 to {vocab_size - 1}")
    elif name == LOSS_MASK:
        if values.max() >= 64:
            raise BadShard("mask bits that mean nothing")
    elif name == TOPK_IDS:
        if values.min() < 0 or values.max() >= vocab_size:
            raise BadShard(f"best tokens outside 0 to {vocab_size - 1}")
    elif name == TOPK_LOGPROBS:
        if not (values <= 0).all() or np.isinf(values).any():
            raise BadShard(f"inner chunk {number} holds log-probabilities that are none")
    elif values.dtype == np.uint16:
        bad = np.flatnonzero((values & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT)
        if len(bad):
            raise BadShard(f"inner chunk {number} holds {len(bad)} states that are not finite")
