"""The local folder of `--read-cache`: full, read-only, gone, shared, no folder at all."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.errors import BadInput
from dflash_offline.common.read_cache import ReadCache

CONTENT = bytes(range(256)) * 256


@pytest.fixture
def source(tmp_path) -> LocalBlobs:
    source = LocalBlobs(tmp_path / "source")
    source.create("k", [CONTENT])
    return source


def read(cache: ReadCache, offset: int) -> None:
    buffer = memoryview(bytearray(1024))
    assert cache.read_into("k", offset, buffer) == 1024
    assert buffer == CONTENT[offset : offset + 1024]


def test_disk_that_turns_read_only(source, small_disk):
    folder = small_disk(1)
    cache = ReadCache(source, folder, limit_bytes=2048)
    read(cache, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for offset in (0, 1024, 2048, 3072):
        read(cache, offset)
    cache.forget("k")
    read(cache, 0)
    with pytest.raises(BadInput, match="--read-cache .* cannot be used"):
        ReadCache(source, folder, limit_bytes=2048)


def test_folder_that_goes_away(source, tmp_path):
    cache = ReadCache(source, tmp_path / "cache", limit_bytes=1 << 20)
    read(cache, 0)
    shutil.rmtree(tmp_path / "cache")
    for offset in (0, 1024):
        read(cache, offset)


def test_file_is_no_folder(source, tmp_path):
    (tmp_path / "letter.txt").write_text("hello")
    for place in ("letter.txt", "letter.txt/cache"):
        with pytest.raises(BadInput, match="--read-cache .*letter.txt.* cannot be used"):
            ReadCache(source, tmp_path / place, limit_bytes=1 << 20)


def test_leftovers_of_killed_runs_go(source, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    old, young, strange = (folder / name for name in (f".{'a' * 32}", f".{'b' * 32}", ".keep"))
    for path in (old, young, strange):
        path.write_bytes(CONTENT)
    for path in (old, strange):
        os.utime(path, (time.time() - 7200,) * 2)
    ReadCache(source, folder, limit_bytes=1 << 20)
    assert not old.exists()
    assert young.exists(), "another run may be writing it"
    assert strange.exists()


def test_another_process_drops_what_is_being_counted(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    read(ReadCache(source, folder, limit_bytes=1 << 20), 0)
    scandir = os.scandir

    def late(path: Path) -> list[os.DirEntry[str]]:
        found = list(scandir(path))
        for entry in found:
            os.unlink(entry.path)
        return found

    monkeypatch.setattr(os, "scandir", late)
    read(ReadCache(source, folder, limit_bytes=1 << 20), 0)
