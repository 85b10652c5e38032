"""Files that are whole, and not what belongs where they lie; rows, layers and plans in order."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common import records
from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import (
    CopyConfig,
    RemoveConfig,
    RepairConfig,
    VerifyConfig,
)
from dflash_offline.common.cache_copy import copy
from dflash_offline.common.cache_edit import remove, repair
from dflash_offline.common.cache_verify import find_problems, verify
from dflash_offline.common.codecs import codec_named
from dflash_offline.common.errors import DamagedStore, Stopped
from dflash_offline.common.pack_arrays import bits_of
from dflash_offline.common.pack_index import read_pack_index, scan_records, write_pack_index
from dflash_offline.common.quantize import EncodedStates
from dflash_offline.common.shards import BadShard, ShardWriter, decode_chunk, index_bytes
from dflash_offline.common.store import (
    FEATURES,
    TOKENS,
    Schema,
    commit_key,
    exists,
    index_key,
    read_plan,
    shard_key,
)
from dflash_offline.common.store_writer import Store
from dflash_offline.common.topk import TopK


@pytest.mark.parametrize("array", [FEATURES, TOKENS])
def test_shard_of_another_store_is_not_read(small_store, tmp_path, corpus_maker, array):
    """Its checksums are right and its size is too: the record alone knows better."""
    url, _ = small_store
    corpus_maker(seed=1).write(tmp_path / "other")
    key = shard_key(array, 1)
    assert (tmp_path / "other" / key).stat().st_size == (Path(url) / key).stat().st_size
    shutil.copy(tmp_path / "other" / key, Path(url) / key)
    cache = open_cache(url)
    with pytest.raises(DamagedStore, match=f"pack 1, array {array} .* differs from the commit"):
        cache.read_many([i for i in cache.samples if cache.plan.samples[i].pack == 1])


def test_shard_that_was_cut_says_its_size(small_store):
    url, _ = small_store
    path = Path(url) / shard_key(FEATURES, 1)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedStore, match=f"{size - 1} bytes where {size} were written"):
        open_cache(url).read(2)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_chunk_that_is_absent_is_zeros(codec):
    writer = ShardWriter([None], codec_named(codec))
    assert len(b"".join(writer.parts())) == writer.num_bytes
    assert writer.crcs == [None]
    out = np.ones(5, np.uint16)
    decode_chunk(None, None, out, codec_named(codec))
    assert not out.any()
    for stored, recorded in ((None, 0), (memoryview(b"12345678"), None)):
        with pytest.raises(BadShard):
            decode_chunk(stored, recorded, out, codec_named(codec))


def test_record_of_another_pack_does_not_count(small_store):
    url, _ = small_store
    blobs = LocalBlobs(Path(url))
    blobs.delete(index_key(0))
    (Path(url) / commit_key(1)).rename(Path(url) / commit_key(2))
    with pytest.raises(DamagedStore, match="00000002.json is the record of pack 1"):
        open_cache(url, partial=True)
    assert sorted(scan_records(blobs)[0].packs) == [0, 3]


def test_records_that_were_given_up_one_after_another(small_store):
    """By runs that were killed before they deleted them."""
    url, _ = small_store
    blobs = LocalBlobs(Path(url))
    index = read_pack_index(blobs, 4)
    for pack, left in ((2, [0, 1, 3]), (1, [0, 3])):
        index = write_pack_index(blobs, index.without({pack}), 4)
        assert open_cache(url, partial=True).packs == left
        assert sorted(scan_records(blobs)[0].packs) == left
    written = [
        records.parse_index(blobs.read(index_key(number)), "")["complete"] for number in range(3)
    ]
    assert written == [True, False, False]


def test_plans_of_a_store_add_up(small_store, corpus_maker):
    url, corpus = small_store
    more = corpus_maker(seed=5, source="more", lengths=(50, 60, 31, 20))
    with more.open(url, append=True) as store:
        more.commit(store, first_pack=4)
    plan, _ = read_plan(LocalBlobs(Path(url)), batches=True)
    assert plan.num_held_out_packs == 2
    behind = [[[6 + index for index in batch] for batch in unit] for unit in more.plan.batches]
    assert plan.batches == [*corpus.plan.batches, *behind]


@pytest.mark.parametrize("layers", [(3, 1), (3,), (1, 3)])
def test_layers_come_in_the_order_asked_for(small_store, layers):
    url, corpus = small_store
    slots = [corpus.schema.layers.index(layer) for layer in layers]
    for document in open_cache(url).read_many([3, 1], layers):
        np.testing.assert_array_equal(document.features, corpus.features[document.index][slots])


def test_best_tokens_beside_codes_are_those_of_the_sample(tmp_path, corpus_maker):
    """Also of one that is read alone and does not begin its pack."""
    corpus, rng = corpus_maker(teacher="topk:3"), np.random.default_rng(0)
    best = [
        TopK(
            ids=rng.integers(0, 97, (len(tokens), 3), np.int32),
            logprobs=-rng.random((len(tokens), 3), np.float32),
        )
        for tokens in corpus.tokens
    ]
    with corpus.open(tmp_path / "raw") as store:
        for pack in range(corpus.plan.num_packs):
            members = store.pack_samples(pack)
            features = np.concatenate([corpus.features[i] for i in members], axis=1)
            store.commit_pack(pack, features, topk=TopK.joined([best[i] for i in members]))
    copy(CopyConfig(source=f"{tmp_path}/raw", destination=f"{tmp_path}/int8", codec="int8"))
    cache = open_cache(f"{tmp_path}/int8")
    assert any(sample.start for sample in cache.plan.samples)
    for index in cache.samples:
        (coded,), decoded = cache.read_codes([index]), cache.read(index)
        for document in (coded, decoded):
            np.testing.assert_array_equal(document.topk.ids, best[index].ids)
            np.testing.assert_array_equal(document.topk.logprobs, best[index].logprobs)


def test_index_has_what_joined_workers_committed(tmp_path, corpus_maker):
    corpus, url = corpus_maker(), str(tmp_path / "s")
    with corpus.open(url) as store:
        corpus.commit(Store.join(url, claim=store.claim))
        assert not store.committed
        store.refresh()
    index = records.parse_index((tmp_path / "s" / index_key(0)).read_bytes(), "")
    assert index["complete"]
    assert sorted(index["packs"]) == [0, 1, 2, 3]


def test_tokens_are_restored_from_the_rows_of_their_own_plan_alone(small_store, corpus_maker):
    url, corpus = small_store
    more = corpus_maker(seed=5, source="more")
    # It begins with a sample that the first plan has too.
    first = replace(more.plan.samples[0], content_hash=corpus.plan.samples[2].content_hash)
    more.plan = replace(more.plan, samples=[first, *more.plan.samples[1:]])
    with more.open(url, append=True) as store:
        more.commit(store, first_pack=4)
        store.drop_packs({0, 4})
    blobs = LocalBlobs(Path(url))
    for pack in (0, 4):
        blobs.delete(shard_key(TOKENS, pack))
    for given, pack, left in ((more, 4, {0}), (corpus, 0, set())):
        with given.open(url, append=True) as store:
            there = {p for p in (0, 4) if exists(blobs, shard_key(TOKENS, p))}
            assert {0, 4} - there == left
            expected = [given.tokens[i - (6 if pack else 0)] for i in store.pack_samples(pack)]
            np.testing.assert_array_equal(store.read_tokens(pack), np.concatenate(expected))


def test_pack_that_was_given_up_counts_again(small_store):
    """By the same bytes, and before an index has it: the run that makes it is killed."""
    url, corpus = small_store
    with corpus.open(url) as store:
        store.drop_packs({1})
    store = corpus.open(url)
    corpus.commit(store, [1])
    store.close()
    assert open_cache(url).is_complete


def test_run_that_fails_writes_no_index(tmp_path, corpus_maker):
    """Nor one that owns the store no more."""
    corpus = corpus_maker()

    def fail() -> None:
        with corpus.open(tmp_path / "s") as store:
            corpus.commit(store, [0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    store = corpus.open(tmp_path / "s")
    corpus.commit(store, [1])
    store.close()
    with pytest.raises(Stopped, match="has given the store .* back"):
        store.fold_index()
    assert not (tmp_path / "s" / index_key(0)).exists()
    assert open_cache(str(tmp_path / "s"), partial=True).packs == [0, 1]


def test_repair_keeps_metadata_that_another_version_wrote(tmp_path, corpus_maker, monkeypatch):
    url, array_json = str(tmp_path / "s"), Schema.array_json
    with monkeypatch.context() as older:
        spelled = {"dimension_names": None}
        older.setattr(Schema, "array_json", lambda *args: array_json(*args) | spelled)
        corpus_maker().write(url)
    repair(RepairConfig(url=url))
    verify(VerifyConfig(url=url, deep=True))


@pytest.mark.parametrize(
    ("array", "last", "first_wrong", "words"),
    [
        ("tokens", 96, 97, "token ids outside 0 to 96"),
        ("tokens", 0, -1, "token ids outside 0 to 96"),
        ("masks", 63, 64, "mask bits that mean nothing"),
    ],
)
def test_verify_knows_where_meaning_ends(tmp_path, corpus_maker, array, last, first_wrong, words):
    for value, problems in ((last, 0), (first_wrong, 1)):
        corpus = corpus_maker()
        getattr(corpus, array)[2][5] = value
        corpus.write(tmp_path / str(value))
        found = find_problems(open_cache(str(tmp_path / str(value))), deep=True)
        assert len(found) == problems
        assert all(words in line for line in found)


def test_verify_reads_the_gap_behind_the_last_chunk(small_store):
    url, corpus = small_store
    path = Path(url) / shard_key(FEATURES, 1)
    content = bytearray(path.read_bytes())
    content[-index_bytes(corpus.schema.arrays[FEATURES].num_chunks) - 1] = 1
    path.write_bytes(content)
    (problem,) = find_problems(open_cache(url), deep=True)
    assert "lie in no chunk and are not zero" in problem


@pytest.mark.parametrize("layers", [(3, 1), (1, 3)])
def test_rows_stored_exactly_ascend_in_the_order_asked_for(small_store, tmp_path, layers):
    url, _ = small_store
    copy(CopyConfig(source=url, destination=f"{tmp_path}/int8", codec="int8"))
    cache = open_cache(f"{tmp_path}/int8")
    for document in cache.read_codes(cache.samples, layers):
        assert document.states.exact_rows[:2].tolist() == [[0, 0], [1, 0]]
    pack = EncodedStates.joined([d.states for d in cache.read_codes([0, 1], layers)])
    assert pack.exact_rows.tolist() == [[0, 0], [0, 40], [1, 0], [1, 40]]
    exact = [cache.read(i, layers).features[slot, 0] for slot in (0, 1) for i in (0, 1)]
    np.testing.assert_array_equal(bits_of(pack.exact), exact)


def test_copy_of_a_part_says_what_it_is(small_store, tmp_path):
    """Its layers and its condition; who was held out stays so."""
    url, _ = small_store
    parts = {"layers": "3", "codec": "lossless", "where": "length > 30"}
    copy(CopyConfig(source=url, destination=f"{tmp_path}/part", **parts))
    source, part = open_cache(url), open_cache(f"{tmp_path}/part")
    assert part.schema.layers == (3,)
    assert part.identity.target == {**source.identity.target, "layers": "3"}
    assert part.identity.store["codec"] == "lossless"
    assert part.identity.plan["where"] == "length > 30"
    held_out = {part.plan.samples[i].id for i in part.held_out_samples}
    assert held_out == {source.plan.samples[i].id for i in source.held_out_samples} != set()
    assert part.plan.num_held_out_packs == 1
    assert len(part.samples) == 5
    copy(CopyConfig(source=url, destination=f"{tmp_path}/none", where="held_out == False"))
    assert open_cache(f"{tmp_path}/none").plan.num_held_out_packs == 0


def test_rm_leaves_the_reason_of_a_quarantined_neighbour(tmp_path, corpus_maker):
    corpus, url = corpus_maker(), str(tmp_path / "s")
    with corpus.open(url) as store:
        corpus.commit(store, [1, 2, 3])
        features = np.concatenate([corpus.features[i] for i in store.pack_samples(0)], axis=1)
        features[:, 40:] = 0
        store.commit_pack(0, features, quarantined={1: "not finite"})
    remove(RemoveConfig(url=url, where="id == 'test:0'", yes=True))
    assert open_cache(url).record(0)["quarantined"] == {0: records.REMOVED, 1: "not finite"}


@pytest.mark.parametrize("codec", ["int8", "int4", "int3"])
def test_rm_leaves_no_code_of_what_it_takes(small_store, tmp_path, codec):
    url, _ = small_store
    copied = f"{tmp_path}/{codec}"
    copy(CopyConfig(source=url, destination=copied, codec=codec))
    (before,) = open_cache(copied).read_codes([1])
    assert before.states.codes.any()
    assert len(before.states.exact_rows) == 2
    remove(RemoveConfig(url=copied, where="id == 'test:1'", yes=True))
    (after,) = open_cache(copied).read_codes([1])
    for part in (after.states.codes, after.states.scales):
        assert not part.any()
    assert len(after.states.exact_rows) == 0
    assert not after.tokens.any()
