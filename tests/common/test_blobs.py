"""The local folder, direct I/O, the read-through cache and the local copy of fixed files."""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common import direct_io
from dflash_offline.common.blobs import LocalBlobs, blobs_at, in_parallel, parse_storage_options
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import BadInput, DamagedStore, Stopped
from dflash_offline.common.local_copy import local_copy
from dflash_offline.common.read_cache import ReadCache
from dflash_offline.common.store import FEATURES, shard_key


@pytest.fixture
def blobs(tmp_path) -> LocalBlobs:
    return blobs_at(str(tmp_path / "root"))


def test_link_to_nothing_is_bad_input(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    with pytest.raises(BadInput, match="is a link to nothing .*not mounted"):
        blobs_at(str(tmp_path / "link"))


def test_local_objects(blobs):
    blobs.create("a/b", [b"hello ", memoryview(b"world")])
    assert blobs.read("a/b") == b"hello world"
    assert blobs.read_range("a/b", -5, 5) == b"world"
    assert blobs.read_range("a/b", 100, 5) == b""
    with pytest.raises(FileExistsError):
        blobs.create("a/b", [b"other"])
    blobs.replace("a/b", b"new", expected=b"hello world")
    with pytest.raises(FileExistsError):
        blobs.replace("a/b", b"newer", expected=b"hello world")
    assert blobs.read("a/b") == b"new"
    assert blobs.list("") == ["a/b"], "no temporary file is left"
    assert blobs.probe() is None
    assert blobs.drop_stale_uploads() == []


def test_new_folders_are_as_durable_as_what_lies_in_them(blobs, monkeypatch):
    synced = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    blobs.create("a/b/c", [b"content"])
    root = blobs.root
    folders = [str(folder) for folder in (root / "a" / "b", root / "a", root, root.parent)]
    assert set(folders) <= set(synced)
    synced.clear()
    blobs.create("a/b/d", [b"content"])
    assert synced[1:] == folders[:1]


def test_owner_clears_what_killed_runs_left(blobs):
    blobs.create("a/b", [b"content"])
    (blobs.root / ".tmp-dead").write_bytes(b"half an index")
    (blobs.root / "a/.tmp-dead").write_bytes(b"half a shard")
    assert blobs.probe() is None
    assert blobs.list("") == ["a/b"]


def test_folder_without_hard_links_is_found(blobs, monkeypatch):
    def refuse(*_arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert "without hard links" in blobs.probe()
    blobs.create("k", [b"one"])
    with pytest.raises(FileExistsError):
        blobs.create("k", [b"two"])
    assert blobs.read("k") == b"one"


def test_one_of_many_creators_wins(blobs):
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            blobs.create("k", [bytes([number]) * 100_000])
        except FileExistsError:
            return False
        return True

    blobs.parallel = 8
    won = in_parallel(blobs, create, range(8))
    assert sum(won) == 1
    assert blobs.read("k") == bytes([won.index(True)]) * 100_000


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path) -> Path:
    """A disk takes direct I/O, a memory file system may not."""
    if request.param == "memory":
        shm = Path("/dev/shm")
        if not shm.is_dir():
            pytest.skip("needs /dev/shm")
        return shm
    return tmp_path


def test_direct_io_writes_and_reads_every_byte(folder, monkeypatch):
    """Parts of every size and alignment, through jobs small enough to be many."""
    monkeypatch.setattr(direct_io, "_JOB_BYTES", 64 << 10)
    monkeypatch.setattr(direct_io, "_SMALL_BYTES", 1000)
    rng = random.Random(0)
    path = folder / f"direct-io-{os.getpid()}"
    for _ in range(40):
        parts = []
        for _ in range(rng.randint(0, 12)):
            size = rng.choice([0, 3, 4, 4092, 4096, 40960, 65536, 131072, rng.randint(1, 200_000)])
            memory = direct_io.aligned_buffer(size + 64)
            memory[:] = rng.randbytes(len(memory))
            start = rng.choice([0, 0, 16])
            parts.append(memory[start : start + size])
        expected = b"".join(parts)
        try:
            assert direct_io.write_durably(path, iter(parts)) == len(expected)
            assert path.read_bytes() == expected
            for is_direct in (True, False):
                offset = rng.choice([0, 4096, rng.randint(0, len(expected) + 1)])
                memory = direct_io.aligned_buffer(300_000)
                start, length = rng.choice([0, 7]), rng.choice([4096, 65536, 250_001])
                buffers = [memory[start : start + length], memoryview(bytearray(4))]
                pieces: list[bytes] = []
                count = direct_io.read_into(
                    path,
                    offset,
                    buffers,
                    direct=is_direct,
                    seen=lambda piece, pieces=pieces: pieces.append(bytes(piece)),
                )
                assert b"".join(pieces) == expected[offset : offset + length]
                wanted = expected[offset : offset + length + 4]
                assert count == len(wanted)
                assert b"".join(buffers)[:count] == wanted
        finally:
            path.unlink()


def test_failed_direct_write_leaves_nothing(blobs):
    def parts():
        yield bytes(3 << 20)
        raise DamagedStore("the source went bad")

    with pytest.raises(DamagedStore):
        blobs.create("k", parts())
    assert blobs.list("") == []


def test_write_to_read_only_folder_stops(blobs, monkeypatch):
    def refuse(*_arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("dflash_offline.common.blobs.write_durably", refuse)
    with pytest.raises(Stopped, match="Read-only file system"):
        blobs.create("k", [b"content"])


def test_large_stores_are_read_past_the_page_cache(blobs):
    blobs.expect(1 << 20)
    assert not blobs.reads_direct
    blobs.expect(1 << 60)
    assert blobs.reads_direct


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_store_read_past_the_page_cache(tmp_path, corpus_maker, monkeypatch, codec):
    monkeypatch.setattr(direct_io, "_SMALL_BYTES", 4096)
    monkeypatch.setattr(LocalBlobs, "expect", lambda self, _size: setattr(self, "reads_direct", 1))
    attempts = []
    whole = direct_io._read_direct
    monkeypatch.setattr(
        direct_io, "_read_direct", lambda *given: attempts.append(whole(*given)) or attempts[-1]
    )
    corpus = corpus_maker(codec=codec)
    corpus.write(tmp_path / "s")
    cache = open_cache(str(tmp_path / "s"))
    for document in cache.read_many(cache.samples):
        np.testing.assert_array_equal(document.features, corpus.features[document.index])
    assert len(attempts) >= 8, "every chunk was tried"


def test_storage_options():
    pairs = ("endpoint_url=http://h:1/?a=b", "anon=true", 'client_kwargs={"x": 1}', "key=123")
    assert parse_storage_options(pairs) == {
        "endpoint_url": "http://h:1/?a=b",
        "anon": True,
        "client_kwargs": {"x": 1},
        "key": "123",  # an id of digits stays text
    }
    with pytest.raises(BadInput, match="KEY=VALUE") as caught:
        parse_storage_options(["hunter2"])
    assert "hunter2" not in str(caught.value)


class CountingBlobs(LocalBlobs):
    """Counts the bytes that readers fetch."""

    num_bytes = 0

    def read_into(self, key, offset, *buffers, seen=None):
        self.num_bytes += sum(map(len, buffers))
        return super().read_into(key, offset, *buffers, seen=seen)


def test_read_cache(tmp_path):
    source = CountingBlobs(tmp_path / "source")
    content = np.random.default_rng(0).bytes(4000)
    source.create("k", [content])
    cache = ReadCache(source, tmp_path / "cache", limit_bytes=2500)

    def read(offset: int) -> None:
        buffer = memoryview(bytearray(1000))
        assert cache.read_into("k", offset, buffer[:900], buffer[900:]) == 1000
        assert buffer == content[offset : offset + 1000]

    def kept() -> int:
        return sum(p.stat().st_size for p in (tmp_path / "cache").iterdir())

    for offset, fetched in [(0, 1000), (0, 1000), (1000, 2000), (0, 2000), (2000, 3000), (0, 3000)]:
        read(offset)
        assert source.num_bytes == fetched, f"at {offset}"
        assert kept() <= 2500
    read(1000)
    assert source.num_bytes == 4000, "it was used longest ago and had to leave"
    again = ReadCache(source, tmp_path / "cache", limit_bytes=2500)
    assert again.read_range("k", 1000, 1000) == content[1000:2000]
    assert source.num_bytes == 4000, "a new process finds what the last one kept"
    assert cache.read_range("k", -100, 100) == content[-100:]
    assert cache.read("k") == content
    cache.forget("k")
    assert kept() == 0


def test_read_cache_survives_a_bad_local_disk(tmp_path, small_store):
    url, _corpus = small_store
    cache = open_cache(url)
    clean = cache.read(0).features.copy()
    cache.blobs = ReadCache(cache.blobs, tmp_path / "cache", limit_bytes=1 << 30)
    for _ in range(2):
        np.testing.assert_array_equal(cache.read(0).features, clean)
    kept = list((tmp_path / "cache").iterdir())
    assert kept
    for path in kept:
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
    np.testing.assert_array_equal(cache.read(0).features, clean)
    bad = Path(url) / shard_key(FEATURES, 0)
    damaged = bytearray(bad.read_bytes())
    damaged[5] ^= 1
    bad.write_bytes(damaged)
    cache.blobs.forget(shard_key(FEATURES, 0))
    with pytest.raises(DamagedStore, match="pack 0, array features"):
        cache.read(0)


def test_local_copy_is_checked(tmp_path, small_store, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    url, corpus = small_store
    cache = open_cache(url)
    digests = cache.fixed_files()
    folder = local_copy(cache.blobs, digests, "target")
    assert {p.name for p in folder.iterdir()} == set(corpus.target_files)
    kept = folder / "tensors.safetensors"
    for damaged in (b"", b"x" * kept.stat().st_size):
        kept.write_bytes(damaged)
        assert local_copy(cache.blobs, digests, "target") == folder
        assert kept.read_bytes() == corpus.target_files["tensors.safetensors"]
    (Path(url) / "target" / "config.json").write_text("{}")
    assert (folder / "config.json").read_bytes() == corpus.target_files["config.json"]
    (folder / "config.json").unlink()
    with pytest.raises(DamagedStore, match="target/config.json differs from the manifest"):
        local_copy(cache.blobs, digests, "target")
    assert not (folder / "config.json").exists()
