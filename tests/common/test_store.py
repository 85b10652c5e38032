"""The store as one piece: what is written is what is read, also by zarr-python and tensorstore."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_verify import find_problems
from dflash_offline.common.errors import BadInput, DamagedStore, MissingStore, Stopped
from dflash_offline.common.identity import Identity
from dflash_offline.common.lease import take_ownership
from dflash_offline.common.shards import index_bytes, parse_index
from dflash_offline.common.store import (
    FEATURES,
    LossMask,
    Schema,
    commit_key,
    shard_key,
    supervised,
)
from dflash_offline.common.store_writer import Store


def assert_equal_content(url: str, corpus) -> None:
    cache = open_cache(url)
    documents = cache.read_many(cache.samples)
    assert [d.index for d in documents] == list(range(len(corpus.tokens)))
    for document in documents:
        i = document.index
        np.testing.assert_array_equal(document.tokens, corpus.tokens[i])
        np.testing.assert_array_equal(document.loss_mask, corpus.masks[i])
        np.testing.assert_array_equal(document.features, corpus.features[i])
        if corpus.schema.teacher == "final":
            np.testing.assert_array_equal(document.final, corpus.final[i])


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("teacher", ["none", "final"])
def test_round_trip(tmp_path, corpus_maker, codec, teacher):
    corpus = corpus_maker(codec=codec, teacher=teacher)
    corpus.write(tmp_path / "s")
    assert_equal_content(str(tmp_path / "s"), corpus)
    assert find_problems(open_cache(str(tmp_path / "s")), deep=True) == []


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.filterwarnings("ignore")  # zarr-python warns about its own future defaults
def test_other_readers_agree(tmp_path, corpus_maker, codec):
    zarr = pytest.importorskip("zarr")
    tensorstore = pytest.importorskip("tensorstore")
    corpus = corpus_maker(codec=codec, teacher="final", lengths=(100, 300, 280), pack_tokens=512)
    corpus.write(tmp_path / "s")
    group = zarr.open_group(tmp_path / "s", mode="r")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/s/features/"}}
    by_tensorstore = tensorstore.open(spec, read=True).result()
    for index, sample in enumerate(corpus.plan.samples):
        rows = slice(sample.start, sample.start + sample.length)
        np.testing.assert_array_equal(
            group["features"][sample.pack, :, rows], corpus.features[index]
        )
        np.testing.assert_array_equal(group["final"][sample.pack, rows], corpus.final[index])
        np.testing.assert_array_equal(group["tokens"][sample.pack, rows], corpus.tokens[index])
        np.testing.assert_array_equal(group["loss_mask"][sample.pack, rows], corpus.masks[index])
        theirs = by_tensorstore[sample.pack, :, rows].read().result()
        np.testing.assert_array_equal(theirs, corpus.features[index])


def test_layer_subset_reads_only_its_chunks(small_store, monkeypatch):
    url, corpus = small_store
    cache = open_cache(url)
    read = []
    whole = type(cache.blobs).read_into

    def counting(self, key, offset, *buffers, seen=None):
        if key.startswith(FEATURES):
            read.append(sum(map(len, buffers)))
        return whole(self, key, offset, *buffers, seen=seen)

    monkeypatch.setattr(type(cache.blobs), "read_into", counting)
    document = cache.read(0, layers=(3,))
    np.testing.assert_array_equal(document.features, corpus.features[0][1:])
    chunk = corpus.schema.chunk_tokens * corpus.schema.hidden * 2 + 4
    assert read == [chunk], "one layer of one pack is one chunk here"
    with pytest.raises(BadInput, match="asks for layer 2, but the store holds 1, 3"):
        cache.read(0, layers=(2,))


def test_interrupted_run_resumes(tmp_path, corpus_maker):
    corpus = corpus_maker()
    url = tmp_path / "s"
    with corpus.open(url) as store:
        corpus.commit(store, [0])
    # A shard without a record and a half-written file, as a killed run leaves them.
    leftover = url / shard_key(FEATURES, 1)
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    (leftover.parent / ".tmp-dead").write_bytes(b"half")
    with pytest.raises(BadInput, match="is unfinished .1 of 4 packs.*--partial"):
        open_cache(str(url))
    cache = open_cache(str(url), partial=True)
    assert [document.index for document in cache.read_many(cache.samples)] == [0, 1]
    with corpus.open(url) as store:
        assert store.committed == {0}
        assert not leftover.exists()
        np.testing.assert_array_equal(
            store.read_tokens(1), np.concatenate([corpus.tokens[i] for i in store.pack_samples(1)])
        )
        corpus.commit(store, [1, 2, 3])
    assert_equal_content(str(url), corpus)


def test_interrupted_creation_starts_over(tmp_path, corpus_maker):
    corpus = corpus_maker()
    corpus.open(tmp_path / "s").close()
    (tmp_path / "s" / "manifest.json").unlink()
    # What another codec and a killed write leave, and what somebody keeps beside it since.
    mine, leftovers = tmp_path / "s" / "notes.txt", ("scales/zarr.json", "plan/0/.tmp-0", ".tmp-1")
    for path in (mine, *(tmp_path / "s" / name for name in leftovers)):
        path.parent.mkdir(exist_ok=True)
        path.write_text("hello")
    corpus.write(tmp_path / "s")
    assert_equal_content(str(tmp_path / "s"), corpus)
    assert mine.read_text() == "hello"
    assert not any((tmp_path / "s" / name).exists() for name in leftovers)


def test_store_that_lost_its_manifest_is_not_started_over(small_store):
    """No pack is written before the manifest, so packs without one are damage."""
    url, corpus = small_store
    (Path(url) / "manifest.json").unlink()
    before = sorted(Path(url).rglob("*"))
    for use in (lambda: corpus.open(Path(url)), lambda: open_cache(url)):
        with pytest.raises(DamagedStore, match="manifest.json.* is missing"):
            use()
    assert before == sorted(Path(url).rglob("*"))


@pytest.mark.parametrize("kind", ["target", "store", "plan"])
def test_resume_with_other_settings_is_refused(tmp_path, corpus_maker, kind):
    corpus = corpus_maker()
    corpus.open(tmp_path / "s").close()
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "s").rglob("*"))
    changed = corpus.identity.as_dict()
    changed[kind]["seed"] = 99
    corpus.identity = Identity.from_dict(changed)
    with pytest.raises(BadInput, match="seed is 99 but the store at .* has (0|None)"):
        corpus.open(tmp_path / "s")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "s").rglob("*"))


def test_second_live_run_is_refused(tmp_path, corpus_maker):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s"), pytest.raises(BadInput, match=f"process {os.getpid()} on"):
        corpus.open(tmp_path / "s")
    corpus.open(tmp_path / "s").close()


def test_address_that_is_no_store(tmp_path, corpus_maker):
    with pytest.raises(MissingStore, match="holds no dflash-offline store"):
        open_cache(str(tmp_path / "nowhere"))
    (tmp_path / "letter.txt").write_text("hello")
    with pytest.raises(BadInput, match="is not empty and holds no store .it has letter.txt"):
        corpus_maker().open(tmp_path)
    assert os.listdir(tmp_path) == ["letter.txt"]
    corpus = corpus_maker()
    corpus.open(tmp_path / "s").close()
    with pytest.raises(MissingStore, match="no committed pack yet"):
        open_cache(str(tmp_path / "s"))


@pytest.mark.parametrize("content", ['"x"', "{}", '{"format": 1}', "[1]", "null"])
def test_group_of_another_program_is_no_store(tmp_path, content):
    text = f'{{"zarr_format": 3, "attributes": {{"dflash_offline": {content}}}}}'
    (tmp_path / "zarr.json").write_text(text)
    with pytest.raises(MissingStore, match="holds no dflash-offline store"):
        open_cache(str(tmp_path))


def test_newer_format_is_refused(small_store):
    url, corpus = small_store
    path = Path(url) / "zarr.json"
    group = json.loads(path.read_text())
    group["attributes"]["dflash_offline"]["format"] = 2
    path.write_text(json.dumps(group))
    with pytest.raises(BadInput, match="store format 2, this version reads 1"):
        open_cache(url)
    with pytest.raises(BadInput, match="store format 2, this version reads 1"):
        corpus.open(Path(url))


def test_small_disk_is_refused_before_writing(tmp_path, corpus_maker, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("U", (), {"free": 1 << 20}))
    with pytest.raises(BadInput, match="0.00 GB free and the store needs about"):
        corpus_maker().open(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_quarantined_sample_is_left_out(tmp_path, corpus_maker):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [1, 2, 3])
        corpus.features[1][:] = 0
        corpus.commit(store, [0], quarantined={1: "layer 3, position 7: not finite"})
    cache = open_cache(str(tmp_path / "s"))
    assert 1 not in cache.samples
    assert 0 in cache.samples
    assert cache.record(0)["quarantined"] == {1: "layer 3, position 7: not finite"}


def is_padding(place: int, shard: bytes, key: str) -> bool:
    """Whether a byte lies between inner chunks, where readers do not look (`verify` does)."""
    if key.startswith("commit/"):
        return False
    num_chunks = {"features": 2}.get(key.split("/")[0], 1)
    index = parse_index(shard[-index_bytes(num_chunks) :], num_chunks)
    in_chunk = any(offset <= place < offset + length for offset, length in filter(None, index))
    return not in_chunk and place < len(shard) - index_bytes(num_chunks)


def test_every_flipped_bit_is_found(tmp_path, corpus_maker):
    """One flipped bit in a shard, an index or a record: reading raises and names the place."""
    corpus = corpus_maker(lengths=(40, 30), num_held_out=0, teacher="final")
    url = tmp_path / "s"
    corpus.write(url)
    clean = open_cache(str(url)).read_many([0, 1])
    rng = np.random.default_rng(0)
    for key in (
        *(shard_key(n, 0) for n in ("features", "final", "tokens", "loss_mask")),
        commit_key(0),
    ):
        path = url / key
        good = path.read_bytes()
        for place in rng.integers(0, len(good), 12):
            bad = bytearray(good)
            bad[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            if good[place] == 0 and is_padding(place, good, key):
                got = open_cache(str(url)).read_many([0, 1])
                for a, b in zip(clean, got, strict=True):
                    np.testing.assert_array_equal(a.features, b.features)
            else:
                with pytest.raises(DamagedStore, match=f"{key}|pack 0"):
                    open_cache(str(url)).read_many([0, 1])
        path.write_bytes(good)
    (url / shard_key("final", 0)).unlink()
    with pytest.raises(DamagedStore, match="pack 0, array final.* is missing"):
        open_cache(str(url)).read(0)


def test_full_disk_stops_and_resumes(tmp_path, corpus_maker):
    """A write that meets ENOSPC leaves committed packs, no half file, and says how to go on."""
    corpus = corpus_maker()
    store = corpus.open(tmp_path / "s")
    corpus.commit(store, [0])
    script = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[2]);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from dflash_offline.common.blobs import LocalBlobs; from pathlib import Path;"
        "LocalBlobs(Path(sys.argv[1])).create('big', [bytes(10000)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "t"), ""], capture_output=True, check=False
    )
    assert b"File too large" in done.stderr
    assert os.listdir(tmp_path / "t") == [], "no half-written object"

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_offline.common.blobs.write_durably", full)
        with pytest.raises(Stopped, match="No space left on device.*run the same command again"):
            corpus.commit(store, [1])
    store.close()
    with corpus.open(tmp_path / "s") as store:
        assert store.committed == {0}
        corpus.commit(store, [1, 2, 3])
    assert_equal_content(str(tmp_path / "s"), corpus)


def test_commit_twice_is_refused(small_store):
    url, corpus = small_store
    with corpus.open(Path(url)) as store, pytest.raises(FileExistsError):
        corpus.commit(store, [0])


def test_target_tensors(small_store):
    url, _ = small_store
    cache = open_cache(url)
    assert cache.target_tensor("embed_tokens").shape == (97, 64)
    assert cache.target_tensor("lm_head").equal(cache.target_tensor("embed_tokens"))
    assert cache.target_config["num_hidden_layers"] == 6
    assert cache["test:2"].index == 2
    assert cache.held_out_samples == [5]
    assert cache.training_samples == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("hidden", "pack_tokens", "chunk", "rounded"),
    [
        (576, 16384, 8192, 16384),  # 8192 rows of 1152 B are 9.4 MB, 4096 only 4.7 MB
        (5120, 16384, 1024, 16384),
        (4096, 10000, 1024, 10240),  # rounded up to whole chunks
        (64, 128, 128, 128),  # never larger than a pack
        (64, 100, 128, 128),  # a pack is whole chunks of at least 64
        (1 << 20, 128, 64, 128),
    ],
)
def test_chunk_tokens(hidden, pack_tokens, chunk, rounded):
    schema = Schema(layers=(1,), hidden=hidden, vocab_size=10, pack_tokens=pack_tokens, codec="raw")
    assert (schema.chunk_tokens, schema.pack_tokens) == (chunk, rounded)


def test_supervised():
    a, e, last = LossMask.ASSISTANT, LossMask.END_OF_TURN, LossMask.LAST_TURN
    bits = [0, a, e, a | last, e | last, a | last | LossMask.REASONING]
    bits += [a | LossMask.TEMPLATE, LossMask.OTHER, LossMask.REASONING, last]
    mask = np.array(bits, np.uint8)
    for rule, expected in (
        ("all", [0, 1, 1, 1, 1, 1, 0, 1, 0, 0]),
        ("last", [0, 0, 0, 1, 1, 1, 0, 1, 0, 0]),
        ("no-reasoning", [0, 1, 1, 1, 1, 0, 0, 1, 0, 0]),
    ):
        assert supervised(mask, rule).astype(int).tolist() == expected
    with pytest.raises(ValueError, match="rule is 'first'"):
        supervised(mask, "first")


def test_store_is_used_from_one_place(small_store):
    url, corpus = small_store
    store = Store.create_or_resume(
        url,
        schema=corpus.schema,
        identity=corpus.identity,
        plan=corpus.plan,
        tokens=[],
        masks=[],
        target_files={},
        options={},
    )
    assert store.committed == {0, 1, 2, 3}, "a resume needs no tokens: the store has them"
    store.close()


def test_store_that_another_run_makes_meanwhile_is_resumed(tmp_path, corpus_maker, monkeypatch):
    corpus = corpus_maker()

    def late(blobs):
        monkeypatch.undo()
        corpus.write(tmp_path / "s")
        return take_ownership(blobs)

    monkeypatch.setattr("dflash_offline.common.store_writer.take_ownership", late)
    with corpus.open(tmp_path / "s") as store:
        assert store.plan.num_packs == corpus.plan.num_packs
        assert len(store.committed) == corpus.plan.num_packs
