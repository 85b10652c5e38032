"""Storage that fails: transient faults are ridden out, permanent ones end in one line in time."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dflash_offline.common import object_blobs
from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import DamagedStore, Stopped
from dflash_offline.common.lease import Lease
from dflash_offline.common.object_blobs import ObjectBlobs
from dflash_offline.common.s3_blobs import S3Blobs
from dflash_offline.common.shards import checksum
from dflash_offline.common.store import COMMIT, FEATURES

CLIENTS = ["s3fs", "obstore"]


@pytest.fixture(params=CLIENTS)
def client(request) -> str:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    return f"client={request.param}"


@pytest.fixture
def short_timeouts(monkeypatch):
    """A request that hangs is given up after a second instead of six."""
    monkeypatch.setattr("dflash_offline.common.s3_blobs.TIMEOUT_S", 1.0)


@pytest.fixture
def blobs(fault_proxy, s3_url, client, short_timeouts) -> S3Blobs:
    return blobs_at(s3_url, (*fault_proxy.options, client))


def assert_equal_content(url: str, corpus, options: tuple[str, ...]) -> None:
    cache = open_cache(url, storage_options=options)
    documents = cache.read_many(cache.samples)
    assert [d.index for d in documents] == list(range(len(corpus.tokens)))
    for document in documents:
        i = document.index
        np.testing.assert_array_equal(document.tokens, corpus.tokens[i])
        np.testing.assert_array_equal(document.features, corpus.features[i])


@pytest.mark.parametrize("kind", ["500", "503", "cut", "hang"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_transient_faults(blobs, fault_proxy, kind, method):
    fault_proxy.fail(kind, method, times=2)
    blobs.create("k", [b"content" * 1000])
    assert blobs.size("k") == 7000
    assert blobs.read("k") == b"content" * 1000
    assert blobs.read_range("k", -7, 7) == b"content"
    assert fault_proxy.counts[f"{method} {kind}"] == 2


def test_lost_answer_is_not_taken_for_a_rival(blobs, fault_proxy):
    fault_proxy.fail("lost", "PUT")
    blobs.create("k", [b"content"])
    assert blobs.read("k") == b"content"
    fault_proxy.fail("lost", "PUT")
    blobs.replace("k", b"newer", expected=b"content")
    assert blobs.read("k") == b"newer"
    # A rival's object is one, also where both end in their own checksum, as inner chunks do: the
    # CRC-32C of the whole is then the same.
    ours, theirs = (body + checksum(body).to_bytes(4, "little") for body in (b"ours..", b"theirs"))
    assert checksum(ours) == checksum(theirs)
    blobs.create("rival", [theirs])
    fault_proxy.fail("500", "PUT")
    with pytest.raises(FileExistsError):
        blobs.create("rival", [ours])
    assert blobs.read("rival") == theirs


def test_lost_answers_in_a_multipart_upload(blobs, fault_proxy):
    blobs.single_put_bytes, blobs.part_bytes = 1 << 20, 5 << 20
    content = os.urandom(6 << 20)
    for kind, method in [("500", "PUT"), ("lost", "PUT"), ("503", "POST")]:
        fault_proxy.fail(kind, method, match="uploadId")
    fault_proxy.fail("lost", "POST", match="uploadId")
    blobs.create("big", [content])
    assert blobs.read("big") == content
    assert fault_proxy.counts["POST lost"] == 1
    assert blobs.drop_stale_uploads(0) == []


def test_wrong_bytes_are_asked_for_again(fault_proxy, s3_url, client, corpus_maker):
    options = (*fault_proxy.options, client)
    corpus = corpus_maker(teacher="final", codec="lossless")
    fault_proxy.fail("garble", "PUT", times=3, match="features")
    corpus.write(s3_url, storage_options=options)
    for match in (FEATURES, "tokens", "manifest", "index-0", "zarr.json", "samples"):
        fault_proxy.fail("garble", "GET", match=match)
    assert_equal_content(s3_url, corpus, options)
    assert fault_proxy.counts["GET garble"] >= 5
    fault_proxy.fail("garble", "GET", times=np.inf, match=FEATURES)
    cache = open_cache(s3_url, storage_options=options)
    with pytest.raises(DamagedStore, match="pack 0, array features .*checksum"):
        cache.read(0)


@pytest.mark.parametrize("kind", ["503", "hang"])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_permanent_faults_end_in_one_line(blobs, fault_proxy, kind, method, monkeypatch):
    monkeypatch.setattr(object_blobs, "PATIENCE_S", 1.0)
    fault_proxy.fail(kind, method, times=np.inf)
    with pytest.raises(Stopped, match="storage unreachable: (writ|read)ing k under") as caught:
        blobs.create("k", [b"content"]) if method == "PUT" else blobs.read("k")
    assert "\n" not in str(caught.value)
    assert "run the same command again" in str(caught.value)


@pytest.mark.slow
def test_permanent_faults_end_in_time(fault_proxy, s3_url):
    """With the time limits as they are: no library below retries behind our back."""
    cases = list(itertools.product(CLIENTS, ("500", "503", "hang", "cut"), ("PUT", "GET")))
    stores = {case: blobs_at(s3_url, (*fault_proxy.options, f"client={case[0]}")) for case in cases}
    for case, blobs in stores.items():
        blobs.create("-".join(case), [b"content"])

    def try_it(case: tuple[str, str, str]) -> tuple[str, float]:
        _, kind, method = case
        blobs, key = stores[case], "-".join(case) + ("-new" if method == "PUT" else "")
        fault_proxy.fail(kind, method, times=np.inf, match=key)
        begin = time.monotonic()
        with pytest.raises(Stopped) as caught:
            blobs.create(key, [b"content"]) if method == "PUT" else blobs.read(key)
        # aiohttp repeats a request once when its connection drops.
        assert fault_proxy.counts[key] < 20
        return str(caught.value), time.monotonic() - begin

    with ThreadPoolExecutor(len(cases)) as pool:
        for case, (says, seconds) in zip(cases, pool.map(try_it, cases), strict=True):
            assert re.match(r"storage unreachable: (writ|read)ing [^\n]*$", says), (case, says)
            assert seconds < 30, case


@pytest.mark.slow
def test_command_ends_in_time(fault_proxy, s3_url, corpus_maker):
    corpus_maker().write(s3_url, storage_options=fault_proxy.options)
    fault_proxy.fail("hang", "GET", times=np.inf, match=FEATURES)
    main = "from dflash_offline.common.cache_cli import main; main()"
    options = [f"--storage-option={each}" for each in fault_proxy.options]
    with subprocess.Popen(
        [sys.executable, "-c", main, "verify", "--deep", s3_url, *options],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        while not fault_proxy.counts[FEATURES] and command.poll() is None:
            time.sleep(0.05)
        begin = time.monotonic()
        _, said = command.communicate()
        assert time.monotonic() - begin < 30
    assert command.returncode == 3, said
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "storage unreachable: reading features/c/" in line


def test_store_is_written_and_read_through_random_faults(
    fault_proxy, s3_url, client, corpus_maker, short_timeouts
):
    options = (*fault_proxy.options, client)
    corpus = corpus_maker(teacher="final", codec="lossless", lengths=(60, 110) * 6)
    # So few that the same request does not fail seven times.
    fault_proxy.share = 0.15
    corpus.write(s3_url, storage_options=options)
    assert_equal_content(s3_url, corpus, options)
    met = {name for name in fault_proxy.counts if " " in name}
    assert len(met) >= 5, f"only {met}"


def test_nothing_listens(s3_url, client, monkeypatch):
    monkeypatch.setattr(object_blobs, "PATIENCE_S", 0.5)
    options = ("endpoint_url=http://127.0.0.1:9", "key=a", "secret=b", client)
    with pytest.raises(Stopped, match="storage unreachable"):
        open_cache(s3_url, storage_options=options)


@pytest.mark.slow
def test_server_killed_in_the_middle_of_a_write(own_s3_server, corpus_maker, client, monkeypatch):
    server = own_s3_server
    corpus = corpus_maker(lengths=tuple([100] * 30), hidden=256, num_held_out=0)
    url, options = "s3://bucket/store", (*server.options, client)
    ended: list[Exception] = []

    def write(packs: list[int]) -> None:
        try:
            with corpus.open(url, storage_options=options) as store:
                corpus.commit(store, packs)
        except Stopped as problem:
            ended.append(problem)

    corpus.open(url, storage_options=options).close()
    writer = threading.Thread(target=write, args=(list(range(30)),))
    writer.start()
    time.sleep(0.5)
    server.stop()
    time.sleep(1)
    server.start()
    writer.join()
    # A server that is away for less than the writer's patience goes unnoticed.
    assert all("storage unreachable" in str(problem) for problem in ended)
    # The rerun is another process, which finds the first one gone.
    monkeypatch.setattr("dflash_offline.common.lease._is_running", lambda _owner: False)
    with corpus.open(url, storage_options=options) as store:
        corpus.commit(store, sorted(set(range(30)) - store.committed))
    assert_equal_content(url, corpus, options)


class NoLease(Lease):
    """What a run without the lease would do."""

    def acquire(self, description: str) -> None:
        pass

    def check(self) -> None:
        pass


@pytest.mark.parametrize("storage", ["s3", "local"])
def test_two_racing_writers_never_mix(storage, request, tmp_path, corpus_maker, monkeypatch):
    """Both write the same packs with different states; each pack is wholly one's or refused."""
    url, options = str(tmp_path / "s"), ()
    if storage == "s3":
        options = request.getfixturevalue("s3_server").options
        url = request.getfixturevalue("s3_url")
    monkeypatch.setattr("dflash_offline.common.lease._lock_for", NoLease)
    corpora = [corpus_maker(lengths=(60, 70) * 6, num_held_out=0) for _ in range(2)]
    corpora[1].features = [states ^ 1 for states in corpora[1].features]
    stores = [corpus.open(url, storage_options=options) for corpus in corpora]
    barrier, told = threading.Barrier(2), [0, 0]

    def write(number: int) -> None:
        for pack in range(corpora[number].plan.num_packs):
            barrier.wait()
            try:
                corpora[number].commit(stores[number], [pack])
            except FileExistsError:
                told[number] += 1

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(told) >= corpora[0].plan.num_packs, "at most one commit a pack"
    cache = open_cache(url, partial=True, storage_options=options)
    assert cache.packs, "somebody won"
    for index in cache.samples:
        found = cache.read(index).features
        assert any((found == corpus.features[index]).all() for corpus in corpora)
        for key in cache.blobs.list(COMMIT):
            assert re.fullmatch(r"commit/\d{8}\.json", key)


def test_store_on_a_file_system_of_fsspec(tmp_path, corpus_maker):
    url = f"memory://{tmp_path}"
    corpus = corpus_maker(codec="lossless")
    with corpus.open(url) as store:
        corpus.commit(store, [0])
    with corpus.open(url) as store:
        assert store.committed == {0}
        corpus.commit(store, [1, 2, 3])
    assert_equal_content(url, corpus, ())
    assert isinstance(open_cache(url).blobs, ObjectBlobs)


def test_store_on_s3(s3_server, s3_url, client, corpus_maker, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    options = (*s3_server.options, client)
    corpus = corpus_maker(teacher="final")
    with corpus.open(s3_url, storage_options=options) as store:
        corpus.commit(store, [0, 1])
    with corpus.open(s3_url, storage_options=options) as store:
        corpus.commit(store, [2, 3])
    assert_equal_content(s3_url, corpus, options)
    cache = open_cache(s3_url, storage_options=options, read_cache=tmp_path / "kept")
    assert cache.target_tensor("embed_tokens").shape == (97, 64)
    assert cache.target_config["num_hidden_layers"] == 6
    np.testing.assert_array_equal(cache.read(0, layers=(3,)).features, corpus.features[0][1:])
    assert list((tmp_path / "kept").iterdir())


def test_full_disk(small_disk, corpus_maker, monkeypatch):
    monkeypatch.setattr("dflash_offline.common.store_checks._RESERVE_BYTES", 0)
    corpus, disk = corpus_maker(), small_disk(1)
    ballast = disk / "ballast"
    with corpus.open(disk / "s") as store:
        corpus.commit(store, [0])
        free = os.statvfs(disk)
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 8192))
        with pytest.raises(Stopped, match="No space left.*free space and run the same command"):
            corpus.commit(store, [1])
        ballast.unlink()
    with corpus.open(disk / "s") as store:
        assert store.committed == {0}
        corpus.commit(store, [1, 2, 3])
    assert_equal_content(str(disk / "s"), corpus, ())


def test_read_only_disk(small_disk, corpus_maker, monkeypatch):
    monkeypatch.setattr("dflash_offline.common.store_checks._RESERVE_BYTES", 0)
    corpus, disk = corpus_maker(), small_disk(1)
    corpus.write(disk / "s")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert_equal_content(str(disk / "s"), corpus, ())
    with pytest.raises(Stopped, match="Read-only file system"):
        corpus.open(disk / "s")
