"""dflash-cache as a user runs it: exit codes, what it prints, what it changes."""

import errno
import io
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.cache import open_cache
from dflash_offline.common.store import (
    FEATURES,
    LOSS_MASK,
    TOKENS,
    commit_key,
    index_key,
    shard_key,
)
from dflash_offline.common.store_writer import Store


def flip(path: Path, place: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def all_states(url: str, *, partial: bool = False) -> dict[str, np.ndarray]:
    cache = open_cache(url, partial=partial)
    return {document.id: document.features for document in cache.read_many(cache.samples)}


def test_info(run, small_store, capsys):
    url, corpus = small_store
    assert run("info", url) == 0
    text = capsys.readouterr().out
    assert "4 of 4 committed" in text
    assert "322 (" in text
    assert run("info", "--json", url) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["samples"] == 6
    assert summary["held_out_samples"] == 1
    assert summary["tokens"] == sum(map(len, corpus.tokens))
    assert sum(summary["lengths"]["counts"]) == 6
    assert summary["states_bytes_bf16"] == summary["tokens"] * 2 * 2 * 64
    assert summary["sources"][0]["supervised"] == "85.1%"


def test_verify_finds_every_kind_of_damage(run, small_store, capsys):
    url, _ = small_store
    root = Path(url)
    assert run("verify", url) == 0
    assert run("verify", "--deep", url) == 0
    capsys.readouterr()
    for key, place, says in (
        (shard_key(FEATURES, 0), 70, f"pack 0, array features ({shard_key(FEATURES, 0)})"),
        (shard_key(FEATURES, 1), 16384 + 1000, "lie in no chunk and are not zero"),
        (shard_key(TOKENS, 2), 9, "pack 2, array tokens"),
        (shard_key(LOSS_MASK, 2), 9, "pack 2, array loss_mask"),
        ("target/config.json", 30, "target/config.json: differs from the manifest"),
        ("features/zarr.json", 30, "features/zarr.json: differs from the manifest"),
    ):
        good = (root / key).read_bytes()
        flip(root / key, place)
        assert run("verify", "--deep", url) == 1, key
        assert says in capsys.readouterr().out, key
        (root / key).write_bytes(good)
    for key in (commit_key(3), "manifest.json", index_key(0), "plan/0/plan.json"):
        good = (root / key).read_bytes()
        flip(root / key, 20)
        assert run("verify", url) == 1, key
        streams = capsys.readouterr()
        assert key.rpartition("/")[2] in streams.out + streams.err, key
        (root / key).write_bytes(good)
    (root / shard_key(FEATURES, 3)).unlink()
    assert run("verify", url) == 1
    assert "array features (features/c/3/0/0/0): missing" in capsys.readouterr().out


def test_failing_disk_is_told_pack_by_pack_and_costs_none(run, small_store, capsys, monkeypatch):
    url, _ = small_store
    bad = [shard_key(FEATURES, 1), commit_key(2), shard_key(TOKENS, 3), "target/config.json"]

    def failing(name: str):
        real = getattr(LocalBlobs, name)

        def read(self, key: str, *given: int) -> bytes:
            if key in bad:
                raise OSError(errno.EIO, "Input/output error", key)
            return real(self, key, *given)

        return read

    with monkeypatch.context() as disk:
        for name in ("read", "read_range"):
            disk.setattr(LocalBlobs, name, failing(name))
        assert run("verify", "--deep", url) == 1
        streams = capsys.readouterr()
        lines = streams.out.strip().splitlines()
        assert [sum(key in line for line in lines) for key in bad] == [1] * 4
        assert all("cannot be read (Input/output error); the disk" in line for line in lines)
        assert "4 problems" in streams.err
        assert run("repair", url) == 3
    assert run("verify", "--deep", url) == 0


def test_verify_says_how_much_is_there(run, small_store, capsys):
    """As a copy by other means that was interrupted: records and indexes are missing alike."""
    url, _ = small_store
    for key in (commit_key(2), index_key(0)):
        (Path(url) / key).unlink()
    assert run("verify", url) == 0
    assert "3 of 4 packs, records and sizes checked, nothing wrong" in capsys.readouterr().out


def test_verify_refuses_states_that_are_not_finite(run, tmp_path, corpus_maker, capsys):
    corpus = corpus_maker()
    corpus.features[2][1, 3, 5] = 0x7FC0
    corpus.tokens[4][2] = 97
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store)
    assert run("verify", tmp_path / "s") == 0
    assert run("verify", "--deep", tmp_path / "s") == 1
    text = capsys.readouterr().out
    assert "holds 1 states that are not finite" in text
    assert "token ids outside 0 to 96" in text


def test_repair_gives_up_what_is_broken_and_no_more(run, small_store, capsys):
    url, corpus = small_store
    before = all_states(url)
    flip(Path(url) / shard_key(FEATURES, 1))
    flip(Path(url) / commit_key(3), 30)
    (Path(url) / "features/c/2/0/0/.tmp-dead").write_bytes(b"x")
    assert run("repair", url) == 0
    text = capsys.readouterr().out
    assert "pack 1 given up" in text
    assert f"{commit_key(3)} given up" in text
    assert open_cache(url, partial=True).packs == [0, 2]
    assert not list(Path(url).rglob(".tmp-*"))
    # The next extraction redoes just that.
    with corpus.open(Path(url)) as store:
        assert store.committed == {0, 2}
        corpus.commit(store, [1, 3])
    for name, states in all_states(url).items():
        np.testing.assert_array_equal(states, before[name])
    assert run("verify", "--deep", url) == 0


def test_repair_restores_token_shards_from_the_corpus(run, small_store):
    url, corpus = small_store
    flip(Path(url) / shard_key(TOKENS, 1), 9)
    assert run("repair", url) == 0
    assert not (Path(url) / shard_key(TOKENS, 1)).exists()
    with corpus.open(Path(url)) as store:
        corpus.commit(store, [1])
    assert run("verify", "--deep", url) == 0


def test_repair_gives_up_tokens_of_packs_to_come(run, tmp_path, corpus_maker):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [0])
    flip(tmp_path / "s" / shard_key(TOKENS, 2), 9)
    assert run("repair", tmp_path / "s") == 0
    with corpus.open(tmp_path / "s") as store:
        store.read_tokens(2)
        corpus.commit(store, [1, 2, 3])
    assert run("verify", "--deep", tmp_path / "s") == 0


@pytest.mark.parametrize("plan", [0, 1])
def test_repair_restores_token_shards_of_every_plan(run, small_store, corpus_maker, plan):
    url, corpus = small_store
    more = corpus_maker(seed=5, source="more")
    with more.open(url, append=True) as store:
        more.commit(store, first_pack=4)
    flip(Path(url) / shard_key(TOKENS, 4 * plan), 9)
    assert run("repair", url) == 0
    with (corpus, more)[plan].open(url, append=plan == 1) as store:
        (corpus, more)[plan].commit(store, [0], first_pack=4 * plan)
    assert run("verify", "--deep", url) == 0
    assert open_cache(url).is_complete


def test_repair_says_what_it_cannot_mend(run, small_store, capsys):
    url, _ = small_store
    flip(Path(url) / "target/config.json", 30)
    assert run("repair", url) == 1
    assert "target/config.json: differs" in capsys.readouterr().err


def test_repair_retries_quarantined(run, tmp_path, corpus_maker):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [1, 2, 3])
        features = np.concatenate([corpus.features[i] for i in store.pack_samples(0)], axis=1)
        store.commit_pack(0, features, quarantined={1: "not finite"})
    assert run("repair", tmp_path / "s") == 0
    assert open_cache(str(tmp_path / "s")).num_quarantined == 1
    assert run("repair", "--retry-quarantined", tmp_path / "s") == 0
    assert open_cache(str(tmp_path / "s"), partial=True).packs == [1, 2, 3]


def test_repair_does_not_retry_what_rm_took(run, small_store):
    url, _ = small_store
    assert run("rm", url, "--yes", "--where", 'id == "test:1"') == 0
    assert run("repair", "--retry-quarantined", url) == 0
    cache = open_cache(url)
    assert cache.num_quarantined == 1
    assert cache.is_complete


@pytest.mark.parametrize("damage", ["index", "record of a pack that the index holds"])
def test_repair_of_index_and_record(run, small_store, damage):
    url, _ = small_store
    flip(Path(url) / (index_key(0) if damage == "index" else commit_key(2)), 20)
    assert run("repair", url) == 0
    expected = [0, 1, 2, 3] if damage == "index" else [0, 1, 3]
    assert open_cache(url, partial=True).packs == expected


def test_copy_of_everything(run, small_store, tmp_path):
    url, _ = small_store
    assert run("copy", url, tmp_path / "copy") == 0
    for name, states in all_states(str(tmp_path / "copy")).items():
        np.testing.assert_array_equal(states, all_states(url)[name])
    # An interrupted copy goes on where it stopped.
    (tmp_path / "copy" / commit_key(2)).unlink()
    (tmp_path / "copy" / index_key(0)).unlink()
    untouched = (tmp_path / "copy" / shard_key(FEATURES, 0)).stat().st_mtime_ns
    assert run("copy", url, tmp_path / "copy") == 0
    assert (tmp_path / "copy" / shard_key(FEATURES, 0)).stat().st_mtime_ns == untouched
    assert run("verify", "--deep", tmp_path / "copy") == 0


def test_copy_follows_an_append(run, small_store, tmp_path, corpus_maker):
    url, _ = small_store
    assert run("copy", url, tmp_path / "copy") == 0
    more = corpus_maker(seed=5, source="more")
    with more.open(url, append=True) as store:
        more.commit(store, first_pack=4)
    assert run("copy", url, tmp_path / "copy") == 0
    assert run("verify", "--deep", tmp_path / "copy") == 0
    for name, states in all_states(url).items():
        np.testing.assert_array_equal(states, all_states(str(tmp_path / "copy"))[name])


def test_copy_of_a_part(run, tmp_path, corpus_maker):
    corpus = corpus_maker(teacher="final")
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store)
    where = "length > 30 and length != 70"
    args = ("--codec", "lossless", "--layers", "3", "--where", where)
    assert run("copy", tmp_path / "s", tmp_path / "part", *args) == 0
    cache = open_cache(str(tmp_path / "part"))
    assert cache.schema.codec == "lossless"
    documents = {d.id: d for d in cache.read_many(cache.samples)}
    assert sorted(documents) == ["test:0", "test:3", "test:4", "test:5"]
    for document in documents.values():
        index = int(document.id.partition(":")[2])
        np.testing.assert_array_equal(document.features, corpus.features[index][1:])
        np.testing.assert_array_equal(document.final, corpus.final[index])
        np.testing.assert_array_equal(document.tokens, corpus.tokens[index])
    assert run("verify", "--deep", tmp_path / "part") == 0


def test_copy_of_a_source_that_has_grown_is_refused(run, tmp_path, corpus_maker, capsys):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [0, 2])
    args = ("copy", tmp_path / "s", tmp_path / "c", "--codec", "lossless")
    assert run(*args) == 0
    assert run(*args) == 0
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store, [1, 3])
    assert run(*args) == 2
    assert "copied_samples is None but the store at" in capsys.readouterr().err
    assert run("verify", "--deep", tmp_path / "c") == 0


def test_copy_refuses_damage_and_strangers(run, small_store, tmp_path, corpus_maker, capsys):
    url, _ = small_store
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "letter.txt").write_text("hello")
    assert run("copy", url, tmp_path / "strange") == 2
    with corpus_maker(seed=5).open(tmp_path / "other"):
        pass
    assert run("copy", url, tmp_path / "other") == 2
    assert "holds another store" in capsys.readouterr().err
    assert run("copy", url, tmp_path / "c", "--layers", "2") == 2
    assert run("copy", url, tmp_path / "c", "--where", "length > 1000") == 2
    assert run("copy", url, tmp_path / "c", "--layers", "3,3") == 2
    assert "--layers 3,3 repeats an id" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    flip(Path(url) / shard_key(FEATURES, 1))
    assert run("copy", url, tmp_path / "c") == 1
    assert "pack 1, array features" in capsys.readouterr().err


def test_rm_of_samples(run, small_store):
    url, corpus = small_store
    assert run("rm", url, "--yes", "--where", 'id in ["test:1", "test:2"]') == 0
    cache = open_cache(url)
    assert [cache.plan.samples[i].id for i in cache.samples] == [
        "test:0",
        "test:3",
        "test:4",
        "test:5",
    ]
    np.testing.assert_array_equal(cache["test:0"].features, corpus.features[0])
    raw = b"".join(p.read_bytes() for p in Path(url).rglob("c/*/*") if p.is_file())
    raw += b"".join(p.read_bytes() for p in Path(url).glob("*/c/*/0/0/0"))
    for index in (1, 2):
        assert corpus.features[index][0, 3].tobytes() not in raw
        assert corpus.tokens[index].tobytes() not in raw
    assert corpus.tokens[3].tobytes() in raw
    assert run("verify", "--deep", url) == 0


def test_rm_says_what_it_cannot_take(run, small_store, capsys, monkeypatch):
    url, corpus = small_store
    with monkeypatch.context() as killed:
        killed.setattr(Store, "rewrite_tokens", lambda *_: 1 / 0)
        assert run("rm", url, "--yes", "--where", "id == 'test:1'") == 70
    assert run("rm", url, "--yes", "--where", "id == 'test:1'") == 0
    assert "1 more samples lie in packs that are not computed" in capsys.readouterr().err
    with corpus.open(url) as store:
        corpus.commit(store, sorted(set(range(4)) - store.committed))
    assert run("rm", url, "--yes", "--where", "id == 'test:1'") == 0
    assert not capsys.readouterr().err
    assert len(open_cache(url).samples) == 5
    assert run("verify", "--deep", url) == 0


def test_rm_that_is_stopped_loses_no_pack(run, small_store, monkeypatch):
    url, corpus = small_store
    rewrite = Store.rewrite_tokens

    def stopped(*args) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        rewrite(*args)

    monkeypatch.setattr(Store, "rewrite_tokens", stopped)
    assert run("rm", url, "--yes", "--where", "id in ['test:1', 'test:4']") == 3
    cache = open_cache(url)
    assert [cache.plan.samples[i].id for i in cache.samples] == [
        f"test:{i}" for i in (0, 2, 3, 4, 5)
    ]
    np.testing.assert_array_equal(cache["test:0"].features, corpus.features[0])


def while_any(left: Iterator[int], change: Callable) -> Callable:
    """Return what makes a change as long as some are left; from then on all of them fail."""

    def call(*args, **options):
        assert next(left) > 0, "killed"
        return change(*args, **options)

    return call


def test_rm_that_is_killed_is_made_good_by_a_rerun(run, small_store, tmp_path, monkeypatch):
    """Before any of its changes: no wrong byte is read, and the plan's tokens come back."""
    url, corpus = small_store
    code, num_lost = None, 0
    for changes in itertools.count():
        root = Path(shutil.copytree(url, tmp_path / f"after-{changes}"))
        with monkeypatch.context() as killed:
            left = itertools.count(changes, -1)
            for name in ("create", "delete", "replace"):
                killed.setattr(LocalBlobs, name, while_any(left, getattr(LocalBlobs, name)))
            code = run("rm", root, "--yes", "--where", "id == 'test:1'")
        for name, states in all_states(str(root), partial=True).items():
            np.testing.assert_array_equal(states, corpus.features[int(name[-1])])
        with corpus.open(root) as store:
            for pack in set(range(4)) - store.committed:
                num_lost += 1
                members = store.pack_samples(pack)
                for read, planned in (
                    (store.read_tokens, corpus.tokens),
                    (store.read_loss_mask, corpus.masks),
                ):
                    expected = np.concatenate([planned[index] for index in members])
                    np.testing.assert_array_equal(read(pack), expected)
                corpus.commit(store, [pack])
        assert run("verify", "--deep", root) == 0
        assert open_cache(str(root)).is_complete
        if code == 0:
            break
        shutil.rmtree(root)
    assert num_lost


def test_store_without_samples(run, small_store, tmp_path, capsys):
    url, _ = small_store
    assert run("rm", url, "--yes", "--where", "length > 0") == 0
    assert run("info", url) == 0
    assert run("verify", "--deep", url) == 0
    for command in (("preview", url), ("copy", url, tmp_path / "c", "--layers", "3")):
        assert run(*command) == 2
        assert "has no sample left" in capsys.readouterr().err


def test_rm_of_a_store(run, small_store, monkeypatch, capsys):
    url, _ = small_store
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run("rm", url) == 2
    assert "add --yes" in capsys.readouterr().err
    deleted = []
    delete = LocalBlobs.delete
    monkeypatch.setattr(LocalBlobs, "delete", lambda b, key: (deleted.append(key), delete(b, key)))
    assert run("rm", url, "--yes") == 0
    first = [".tmp-probe", *map(commit_key, range(4)), index_key(0)]
    assert deleted[:6] == first, "from then on nothing exists for a reader"
    assert deleted[-2:] == ["zarr.json", ".owner"], "until then it is this run's, and a store"
    assert not Path(url).exists()
    assert run("info", url) == 2


def test_preview_of_any_id(run, tmp_path, tiny_target, corpus_maker, capsys):
    """Long ones take no minutes; half a second is theirs here, and a picture's name is left."""
    corpus = corpus_maker(lengths=(40,), num_held_out=0, source=":100:" + "1a" * 100_000)
    files = ("config.json", "tokenizer.json", "tokenizer_config.json")
    corpus.target_files |= {name: (tiny_target / name).read_bytes() for name in files}
    corpus.tokens[0] %= 90
    with corpus.open(tmp_path / "s") as store:
        corpus.commit(store)
    begin = time.monotonic()
    assert run("preview", tmp_path / "s") == 0
    assert time.monotonic() - begin < 10
    assert capsys.readouterr().out.startswith(":100:1a1a1a")


def test_rm_says_what_lies_behind_links(run, small_store, tmp_path, capsys):
    root, other = Path(small_store[0]), tmp_path / "other disk"
    other.mkdir()
    for name in (FEATURES, "target/config.json"):
        (root / name).rename(other / Path(name).name)
        (root / name).symlink_to(other / Path(name).name)
    assert run("verify", root) == 0
    assert run("rm", root, "--yes") == 1
    streams = capsys.readouterr()
    assert "removed" not in streams.out
    assert f"features -> {other}/features" in streams.err
    assert f"target/config.json -> {other}/config.json" in streams.err
    assert (other / "config.json").exists()
    assert run("info", root) == 2


@pytest.mark.parametrize(
    ("args", "words"), [((), "no command is given"), (("inof", "x"), "inof is no command")]
)
def test_no_or_unknown_command(run, capsys, args, words):
    assert run(*args) == 2
    expected = f"error: {words}; give one of copy, info, preview, repair, rm, verify\n"
    assert capsys.readouterr().err == expected


def test_damaged_or_missing_address(run, tmp_path, capsys):
    for command in ("info", "verify", "repair", "rm"):
        assert run(command, tmp_path / "none") == 2
        assert capsys.readouterr().err.count("\n") == 1
