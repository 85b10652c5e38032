"""Stores that are copied after something happened to one of the two."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_copy import _smaller_plan
from dflash_offline.common.store import (
    FEATURES,
    LOSS_MASK,
    TOKENS,
    commit_key,
    index_key,
    shard_key,
)


@pytest.mark.parametrize("mend", ["copy", "by hand"])
def test_pack_that_repair_gave_up_is_taken_from_a_copy(run, small_store, tmp_path, mend):
    url, _ = small_store
    damaged = tmp_path / "copy"
    assert run("copy", url, damaged) == 0
    path = damaged / shard_key(FEATURES, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert run("repair", damaged) == 0
    assert open_cache(str(damaged), partial=True).packs == [0, 2, 3]
    if mend == "copy":
        assert run("copy", url, damaged) == 0
    else:
        for key in (shard_key(FEATURES, 1), commit_key(1)):
            shutil.copy(Path(url) / key, damaged / key)
    assert open_cache(str(damaged)).packs == [0, 1, 2, 3]
    assert run("verify", "--deep", damaged) == 0


def test_records_that_do_not_count_are_copied_again(run, small_store, tmp_path):
    url, _ = small_store
    assert run("copy", url, tmp_path / "copy") == 0
    record = tmp_path / "copy" / commit_key(2)
    content = record.read_bytes()
    (tmp_path / "copy" / shard_key(FEATURES, 2)).write_bytes(b"")
    assert run("repair", tmp_path / "copy") == 0
    # As a repair leaves it that is killed before it deletes.
    record.write_bytes(content)
    (tmp_path / "copy" / "index-2").unlink()
    assert open_cache(str(tmp_path / "copy"), partial=True).packs == [0, 1, 3]
    assert run("copy", url, tmp_path / "copy") == 0
    assert open_cache(str(tmp_path / "copy")).packs == [0, 1, 2, 3]


def test_copy_that_differs_by_now_is_refused(run, small_store, tmp_path, capsys):
    url, _ = small_store
    assert run("copy", url, tmp_path / "copy") == 0
    assert run("rm", url, "--yes", "--where", "id == 'test:0'") == 0
    assert run("copy", url, tmp_path / "copy") == 2
    assert "pack 0 of DST" in capsys.readouterr().err


def test_what_lies_beside_a_store_is_no_stranger(run, small_store, tmp_path):
    url, _ = small_store
    # What a copy leaves that is killed while it writes the root, and what a run reported.
    for name in (".tmp-1234", ".owner", "logs/run.jsonl"):
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    assert run("copy", url, tmp_path / "copy") == 0
    assert run("verify", "--deep", tmp_path / "copy") == 0


@pytest.mark.parametrize("place", ["letter.txt", "letter.txt/copy"])
def test_copy_to_a_file_is_refused(run, small_store, tmp_path, capsys, place):
    (tmp_path / "letter.txt").write_text("hello")
    assert run("copy", small_store[0], tmp_path / place) == 2
    assert "letter.txt is a file; give another folder" in capsys.readouterr().err


def test_copy_in_another_codec_reads_states_once(run, small_store, tmp_path, monkeypatch):
    """Tokens alone come first: states of all samples do not fit into memory."""
    url, _ = small_store
    read = []
    read_many = Cache.read_many

    def counted(self, indices, layers=None):
        read.extend(indices)
        return read_many(self, indices, layers)

    monkeypatch.setattr(Cache, "read_many", counted)
    assert run("copy", url, tmp_path / "copy", "--codec", "lossless") == 0
    assert sorted(read) == list(range(6))
    assert run("verify", "--deep", tmp_path / "copy") == 0


def test_chosen_samples_are_gone_through_once(corpus_maker):
    """A search of them for each sample would take hours where there are millions."""
    plan = corpus_maker(lengths=(5,) * 200).plan
    chosen = Counted(range(0, len(plan.samples), 2))
    _, groups = _smaller_plan(plan, chosen)
    assert [index for group in groups for index in group] == list(chosen.data)
    assert chosen.times < 3


class Counted(Sequence[int]):
    """Numbers that count how often they are gone through."""

    def __init__(self, data: Sequence[int]) -> None:
        self.data, self.times = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(self.data)


@pytest.mark.parametrize("command", ["verify --deep", "repair", "copy"])
def test_bytes_that_a_network_garbles_are_asked_for_again(
    run, small_store, tmp_path, monkeypatch, command
):
    url, _ = small_store
    garbled: set[str] = set()
    read = LocalBlobs.read

    def garble_once(self, key: str) -> bytes:
        content = read(self, key)
        if key in garbled or "/c/" not in key:
            return content
        garbled.add(key)
        return content[:-1] + bytes([content[-1] ^ 1])

    monkeypatch.setattr(LocalBlobs, "rereads", 2)
    monkeypatch.setattr(LocalBlobs, "read", garble_once)
    target = [tmp_path / "copy"] if command == "copy" else []
    assert run(*command.split(), url, *target) == 0
    assert len(garbled) >= 12
    assert open_cache(url).packs == [0, 1, 2, 3]


def test_pack_of_another_store_is_found(run, small_store, tmp_path, corpus_maker, capsys):
    """As copying files by hand from the wrong folder leaves it; each of them is whole."""
    url, _ = small_store
    corpus_maker(seed=1).write(tmp_path / "other")
    assert run("verify", url) == 0
    (Path(url) / index_key(0)).unlink()
    for key in (commit_key(1), *(shard_key(name, 1) for name in (FEATURES, TOKENS, LOSS_MASK))):
        shutil.copy(tmp_path / "other" / key, Path(url) / key)
    assert run("verify", url) == 1
    assert "pack 1: commit/00000001.json is the record of another plan" in capsys.readouterr().out
