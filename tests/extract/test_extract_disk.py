"""`dflash-extract` on a disk that fills up, and on one that may only be read."""

import os
import re
import subprocess
import threading
from pathlib import Path

from dflash_offline.common import store_writer
from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.store import FEATURES
from dflash_offline.extract.cli import main as extract_command

SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4")
# The command asks for 64 MiB beside the store before it starts.
DISK_MIB = 80


def shards(store: Path) -> dict[str, bytes]:
    files = sorted(path for path in (store / FEATURES).rglob("*") if path.is_file())
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def only_error(capsys) -> str:
    (line,) = re.findall(r"^error: .*$", capsys.readouterr().err, re.MULTILINE)
    return line


def test_disk_that_fills_up(
    make_target, write_corpus, run, small_disk, tmp_path, monkeypatch, capsys
):
    """Sealed packs are safe, exit 3 in one line; the same command finishes once there is room."""
    disk = small_disk(DISK_MIB)
    store, ballast = disk / "store", disk / "ballast"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(40), *SMALL)
    assert run(extract_command, *args, "--out", tmp_path / "whole") == 0
    commit, seen, turn = store_writer.Store.commit_pack, [], threading.Lock()

    def commit_pack(self, pack, *given, **more):
        # One at a time: several threads commit, and three packs are to be sealed by then.
        with turn:
            if len(seen) == 3:
                free = os.statvfs(disk)
                with ballast.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, (free.f_bavail - 2) * free.f_frsize)
            seen.append(pack)
            return commit(self, pack, *given, **more)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(store_writer.Store, "commit_pack", commit_pack)
        assert run(extract_command, *args, "--out", store) == 3
    error = only_error(capsys)
    assert "No space left on device" in error
    assert "free space and run the same command again" in error
    partial = open_cache(str(store), partial=True)
    assert set(seen[:3]) <= set(partial.packs) < set(range(partial.plan.num_packs))
    assert run(cache_command, "verify", "--deep", store) == 0
    assert run(extract_command, *args, "--out", store) == 3, "still full"
    ballast.unlink()
    assert run(extract_command, *args, "--out", store) == 0
    assert shards(store) == shards(tmp_path / "whole")
    assert not [path for path in store.rglob("*") if path.name.startswith(".tmp-")]


def test_folder_of_others(tiny_target, write_corpus, run, tmp_path, capsys, monkeypatch):
    """Found out before the corpus is read."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    args = ("--target", tiny_target, "--data", write_corpus(5), "--out", folder / "store")
    monkeypatch.setattr("dflash_offline.extract.corpus.read_rows", None)
    # Tests may run as the administrator, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path != folder)
    assert run(extract_command, *args) == 2
    assert f"since {folder} belongs to others" in only_error(capsys)


def test_disk_that_may_only_be_read(
    make_target, write_corpus, run, small_disk, capsys, monkeypatch
):
    """A finished store opens and is verified there; a run that has to write ends in one line."""
    disk = small_disk(DISK_MIB)
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), *SMALL)
    assert run(extract_command, *args, "--out", disk / "store") == 0
    assert run(extract_command, *args, "--out", disk / "begun", "--plan-only") == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    cache = open_cache(str(disk / "store"))
    assert len(cache.read_many(cache.samples)) == len(cache.samples)
    for command in (("verify", "--deep"), ("info",), ("preview",)):
        assert run(cache_command, *command, disk / "store") == 0
    # Found out before the target is loaded.
    monkeypatch.setattr("dflash_offline.extract.run.load_target", None)
    for store in ("begun", "new"):
        capsys.readouterr()
        assert run(extract_command, *args, "--out", disk / store) == 3
        assert "Read-only file system" in only_error(capsys)
