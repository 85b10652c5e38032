"""The index of packs: folding, opening without a listing, appended plans, packs given up."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common import records
from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import RepairConfig
from dflash_offline.common.cache_edit import repair
from dflash_offline.common.cache_verify import find_problems
from dflash_offline.common.errors import BadInput, DamagedStore, FoundProblems
from dflash_offline.common.pack_index import PackIndex, read_pack_index, write_pack_index
from dflash_offline.common.store import commit_key, index_key


def test_complete_index_needs_no_listing(small_store, monkeypatch):
    url, _ = small_store
    assert (Path(url) / index_key(0)).exists()

    def refuse(*_arguments):
        raise AssertionError("a complete index makes a listing needless")

    monkeypatch.setattr(LocalBlobs, "list", refuse)
    assert open_cache(url).packs == [0, 1, 2, 3]


def test_index_and_newer_records_together(tmp_path, corpus_maker):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [0, 2])
    store = corpus.open(tmp_path / "s")
    corpus.commit(store, [1])
    store.close()  # as a killed run: nothing folded
    assert not (tmp_path / "s" / index_key(1)).exists()
    assert open_cache(str(tmp_path / "s"), partial=True).packs == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 13])
def test_newest_index_counts(tmp_path, count):
    blobs = LocalBlobs(tmp_path)
    index = PackIndex()
    for number in range(count):
        index = write_pack_index(blobs, index.added(number, b"record", []), num_packs=100)
    assert read_pack_index(blobs, 100) == index
    assert index.number == count
    assert sorted(index.packs) == list(range(count))


def test_dropped_record_does_not_count(small_store):
    url, _ = small_store
    blobs = LocalBlobs(Path(url))
    index = read_pack_index(blobs, 4)
    # A crash right after the new index: the record is still there.
    write_pack_index(blobs, index.without({2}), 4)
    assert open_cache(url, partial=True).packs == [0, 1, 3]


def test_record_must_be_the_one_of_the_index(small_store):
    url, _ = small_store
    (Path(url) / commit_key(0)).write_bytes((Path(url) / commit_key(1)).read_bytes())
    with pytest.raises(DamagedStore, match="pack 0.* is not the record that the index names"):
        open_cache(url).read(0)


def test_append(tmp_path, corpus_maker):
    first = corpus_maker(seed=0, source="one")
    second = corpus_maker(seed=1, source="two", lengths=(50, 60, 31, 20))
    second.target_files = first.target_files
    url = tmp_path / "s"
    first.write(url)
    with pytest.raises(BadInput, match="seed is 1 but the store at .* has 0.*--append"):
        second.open(url)
    store = second.open(url, append=True)
    assert store.plan.num_packs == 7
    assert store.committed == {0, 1, 2, 3}
    second.commit(store, [0], first_pack=4)
    store.close()
    # The same command again resumes; the first plan's does too.
    with second.open(url, append=True) as store:
        assert store.committed == {0, 1, 2, 3, 4}
        second.commit(store, [1, 2], first_pack=4)
    with first.open(url) as store:
        assert len(store.committed) == 7
    cache = open_cache(str(url))
    assert find_problems(cache, deep=True) == []
    features = [*first.features, *second.features]
    for document in cache.read_many(cache.samples):
        np.testing.assert_array_equal(document.features, features[document.index])
    assert cache.held_out_samples == [5, 9]
    meta = json.loads((url / "features" / "zarr.json").read_text())
    assert meta["shape"][0] == 7


def test_interrupted_append_starts_over(tmp_path, corpus_maker):
    first, second = corpus_maker(seed=0), corpus_maker(seed=1)
    second.target_files = first.target_files
    first.write(tmp_path / "s")
    second.open(tmp_path / "s", append=True).close()
    (tmp_path / "s" / "plan" / "1" / "manifest.json").unlink()
    assert open_cache(str(tmp_path / "s")).plan.num_packs == 4, "not closed, so it does not count"
    with second.open(tmp_path / "s", append=True) as store:
        assert store.plan.num_packs == 8
        second.commit(store, first_pack=4)
    cache = open_cache(str(tmp_path / "s"))
    np.testing.assert_array_equal(cache.read(6).features, second.features[0])


def test_append_killed_in_the_middle_leaves_a_sound_store(tmp_path, corpus_maker, monkeypatch):
    first, second = corpus_maker(seed=0), corpus_maker(seed=1)
    first.write(tmp_path / "s")
    with monkeypatch.context() as killed:
        killed.setattr(records, "plan_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.open(tmp_path / "s", append=True)
    assert find_problems(open_cache(str(tmp_path / "s")), deep=True) == []
    with monkeypatch.context() as killed:
        killed.setattr(records, "manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.open(tmp_path / "s", append=True)
    assert len(find_problems(open_cache(str(tmp_path / "s")), deep=False)) == 3, "of zarr.json"
    (tmp_path / "s" / "tokens" / "zarr.json").unlink()
    repair(RepairConfig(url=str(tmp_path / "s")))
    assert find_problems(open_cache(str(tmp_path / "s")), deep=True) == []
    meta = json.loads((tmp_path / "s" / "features" / "zarr.json").read_text())
    assert meta["shape"][0] == 4


def test_packs_of_a_plan_that_is_not_there(tmp_path, corpus_maker):
    """As a store that is copied file by file while it grows, or one that lost a manifest."""
    first, second = corpus_maker(seed=0), corpus_maker(seed=1)
    second.target_files = first.target_files
    first.write(tmp_path / "s")
    with second.open(tmp_path / "s", append=True) as store:
        second.commit(store, [0, 1, 3], first_pack=4)
        members = store.pack_samples(6)
        states = np.zeros((2, store.pack_length(6), 64), np.uint16)
        store.commit_pack(6, states, quarantined=dict.fromkeys(members, "not finite"))
    manifest = tmp_path / "s" / "plan" / "1" / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    cache = open_cache(str(tmp_path / "s"))
    assert cache.packs == [0, 1, 2, 3]
    assert "plan/1/manifest.json: missing, though 4 packs" in find_problems(cache, deep=False)[0]
    words = "plan/1/manifest.json of .* is missing, .* take the file from a copy of the store"
    with pytest.raises(DamagedStore, match=words):
        corpus_maker(seed=2).open(tmp_path / "s", append=True)
    with pytest.raises(FoundProblems):
        repair(RepairConfig(url=str(tmp_path / "s")))
    manifest.write_bytes(content[:-9])
    words = "plan/1/manifest.json does not match its own checksum; take the file from a copy"
    with pytest.raises(DamagedStore, match=words):
        corpus_maker(seed=2).open(tmp_path / "s", append=True)
    manifest.write_bytes(content)
    with second.open(tmp_path / "s", append=True) as store:
        assert len(store.committed) == 8, "nothing was given up"
    assert find_problems(open_cache(str(tmp_path / "s")), deep=True) == []


def test_append_leaves_nothing_of_one_that_was_killed(tmp_path, corpus_maker):
    """Which stood between a file's bytes and its name, or had named it a moment ago."""
    first, second = corpus_maker(seed=0), corpus_maker(seed=1)
    second.target_files = first.target_files
    first.write(tmp_path / "s")
    begun = [tmp_path / "s" / folder for folder in ("tokens/c/4", "features", "plan/1")]
    for folder in begun:
        folder.mkdir(exist_ok=True)
        (folder / ".tmp-dead").write_bytes(b"half a file")
    with second.open(tmp_path / "s", append=True) as store:
        second.commit(store, first_pack=4)
    assert not list((tmp_path / "s").rglob(".tmp-*"))


def test_append_to_another_target_is_refused(tmp_path, corpus_maker):
    first, second = corpus_maker(seed=0), corpus_maker(seed=1, layers=(1, 2))
    first.write(tmp_path / "s")
    with pytest.raises(BadInput, match="layers is '1,2' but the store at .* has '1,3'"):
        second.open(tmp_path / "s", append=True)
