"""Ownership: one live run, takeover of dead ones, and what happens to a run that was silent."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from dflash_offline.common import lease, store_writer
from dflash_offline.common.blobs import Blobs, LocalBlobs, blobs_at
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.lease import Lease, LocalLock, refuse_second_run, take_ownership
from dflash_offline.common.object_blobs import ObjectBlobs
from dflash_offline.common.store import COMMIT, FEATURES, commit_key
from dflash_offline.common.store_writer import Store


@pytest.fixture
def blobs(request, tmp_path) -> ObjectBlobs:
    return blobs_at(f"memory://{tmp_path}")


def pretend_owner(blobs: ObjectBlobs, **fields: object) -> None:
    """Make the present owner's record look like another machine's or process's."""
    key = max(k for k in blobs.list(lease.OWNER) if k.endswith(".json"))
    blobs.replace(key, json.dumps(json.loads(blobs.read(key)) | fields).encode())


def pretend_age(blobs: ObjectBlobs, monkeypatch, seconds: float) -> None:
    monkeypatch.setattr(type(blobs), "age_s", lambda _self, _key: seconds)


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_second_live_run_is_refused(blobs):
    first = take_ownership(blobs)
    with pytest.raises(BadInput, match=rf"process {os.getpid()} on .*, since .*, on this machine"):
        take_ownership(blobs)
    first.release()
    take_ownership(blobs).release()
    names = [key.rpartition("/")[2] for key in blobs.list(lease.OWNER)]
    assert names == ["00000001.beat", "00000001.json"], "older generations are gone"


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_second_run_is_seen_before_it_begins(kind, tmp_path):
    blobs = blobs_at(str(tmp_path) if kind == "folder" else f"memory://{tmp_path}")
    refuse_second_run(blobs)
    assert blobs.list("") == [], "nothing is written"
    first = take_ownership(blobs)
    with pytest.raises(BadInput, match=rf"another live run \(process {os.getpid()} on "):
        refuse_second_run(blobs)
    first.release()
    refuse_second_run(blobs)


def test_dead_process_of_this_machine_is_followed_at_once(blobs):
    first = Lease(blobs, beat_s=1000)
    first.acquire("first")
    pretend_owner(blobs, pid=dead_process())
    second = Lease(blobs)
    second.acquire("second")
    first._beat()
    with pytest.raises(Stopped, match="taken over by another run .second."):
        first.check()
    second.check()
    second.release()
    first.release()
    assert blobs.read(lease._beat_key(1)) == b"released", "a lost lease is not released twice"


def test_reused_process_number_counts_as_dead(blobs):
    first = Lease(blobs, beat_s=1000)
    first.acquire("first")
    pretend_owner(blobs, started="1")
    second = Lease(blobs)
    second.acquire("second")
    second.release()
    first.release()


def test_other_machine_waits_for_silence(blobs, monkeypatch):
    first = Lease(blobs, beat_s=1000)
    first.acquire("process 7 on far")
    pretend_owner(blobs, host="far", boot="other")
    pretend_age(blobs, monkeypatch, 89)
    with pytest.raises(BadInput, match="process 7 on far, last heard from 89 s ago.*after 90 s"):
        take_ownership(blobs)
    pretend_age(blobs, monkeypatch, 91)
    take_ownership(blobs).release()
    first.release()


def test_trials_of_killed_runs_go_when_they_are_old(blobs):
    now = int(time.time())
    for age in (60, 7200):
        blobs.create(f"{lease.OWNER}/trial-{now - age}-{age}", [b"first"])
    take_ownership(blobs).release()
    left = [key for key in blobs.list("") if "trial" in key]
    assert left == [f"{lease.OWNER}/trial-{now - 60}-60"]


def test_owner_between_record_and_first_beat_is_alive(blobs):
    blobs.create(f"{lease.OWNER}/00000000.json", [b'{"description": "far", "host": "far"}'])
    with pytest.raises(BadInput, match="far, last heard from 0 s ago"):
        take_ownership(blobs)


def test_beats_go_on(blobs):
    owner = Lease(blobs, beat_s=0.05)
    owner.acquire("owner")
    begin = owner._last_beat
    time.sleep(0.3)
    assert owner._last_beat > begin
    owner.release()


def test_silent_owner_stops_writing(blobs, monkeypatch):
    owner = Lease(blobs, beat_s=0.01)
    owner.acquire("owner")
    owner._stop.set()
    owner._thread.join()

    def unreachable(*_arguments, **_options):
        raise Stopped("storage unreachable")

    monkeypatch.setattr(type(blobs), "list", unreachable)
    owner._last_beat -= 61
    with pytest.raises(Stopped, match="storage unreachable"):
        owner.check()
    monkeypatch.undo()
    owner.check()
    owner.release()


def test_machine_that_was_suspended_sees_the_newer_owner(blobs, monkeypatch):
    owner = Lease(blobs, beat_s=1000)
    owner.acquire("owner")
    pretend_owner(blobs, boot="of another machine")
    pretend_age(blobs, monkeypatch, lease.SILENCE_S + 1)
    take_ownership(blobs).release()
    # While it sleeps, only this one of the clocks that never jump goes on.
    clock = time.clock_gettime
    ahead = {time.CLOCK_BOOTTIME: 3600.0}
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + ahead.get(which, 0.0))
    with pytest.raises(Stopped, match="taken over by another run"):
        owner.check()
    owner.release()


def test_slow_contender_sees_the_newer_owner(blobs, monkeypatch):
    """A run that saw a dead owner, slept through a whole successor, and then creates its record."""
    for _ in range(2):
        take_ownership(blobs).release()
    newest = take_ownership(blobs)
    late = Lease(blobs)
    whole, first_sight = Lease._highest, iter([0])
    monkeypatch.setattr(
        Lease, "_highest", lambda self: 0 if next(first_sight, None) == 0 else whole(self)
    )
    monkeypatch.setattr(Lease, "_refuse_if_alive", lambda _self, _generation: None)
    with pytest.raises(BadInput, match="another live run"):
        late.acquire("late")
    monkeypatch.undo()
    newest.check()
    newest.release()


def test_local_lock_names_its_owner(tmp_path):
    first = LocalLock(tmp_path)
    first.acquire("process 1 on here, since noon")
    with pytest.raises(BadInput, match="process 1 on here, since noon"):
        LocalLock(tmp_path).acquire("second")
    first.check()
    first.release()
    LocalLock(tmp_path).acquire("third")


def test_file_system_without_locks_warns(tmp_path, monkeypatch, capsys):
    def refuse(*_arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    take_ownership(LocalBlobs(tmp_path)).release()
    assert "without locks" in capsys.readouterr().err


def test_lease_on_s3(s3_server, s3_url):
    blobs = blobs_at(s3_url, s3_server.options)
    first = take_ownership(blobs)
    with pytest.raises(BadInput, match="on this machine"):
        take_ownership(blobs)
    pretend_owner(blobs, host="far")
    with pytest.raises(BadInput, match="last heard from [0-9] s ago"):
        take_ownership(blobs)
    first.release()
    take_ownership(blobs).release()


def test_store_keeps_a_second_run_out(s3_server, s3_url, corpus_maker):
    corpus = corpus_maker(lengths=(40, 30), num_held_out=0)
    with corpus.open(s3_url, storage_options=s3_server.options) as store:
        with pytest.raises(BadInput, match="being written by another live run"):
            corpus.open(s3_url, storage_options=s3_server.options)
        corpus.commit(store)


def take_over(url: str, blobs: Blobs, owner: Store, options: tuple[str, ...] = ()) -> Store:
    """Let another run own a store, as it does when the owner's process is gone."""
    if isinstance(blobs, LocalBlobs):
        owner.close()
    else:
        pretend_owner(blobs, pid=dead_process())
    return Store.open(url, options)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_joined_workers_write_for_their_owner_only(kind, request, tmp_path, corpus_maker):
    url, options = str(tmp_path / "store"), ()
    if kind == "s3":
        url = request.getfixturevalue("s3_url")
        options = request.getfixturevalue("s3_server").options
    corpus = corpus_maker(lengths=(100, 90, 110, 120), num_held_out=0)
    owner = corpus.open(url, storage_options=options)
    joined = Store.join(url, options, claim=owner.claim)
    corpus.commit(joined, [0])
    other = take_over(url, joined.blobs, owner, options)
    with pytest.raises(Stopped, match=rf"taken over by another run .process {os.getpid()} on"):
        corpus.commit(joined, [1])
    assert not joined.blobs.list(f"{FEATURES}/c/1"), "nothing was uploaded either"
    stale = Store.join(url, options, claim=owner.claim)
    with pytest.raises(Stopped, match="taken over"):
        corpus.commit(stale, [1])
    corpus.commit(Store.join(url, options, claim=other.claim), [1])
    other.refresh()
    assert other.committed == {0, 1}
    owner.close()
    other.close()


def test_store_lost_while_a_pack_is_written(tmp_path, corpus_maker, monkeypatch):
    """The record is what counts, and shards may take minutes."""
    url, corpus = str(tmp_path / "store"), corpus_maker(lengths=(100, 90), num_held_out=0)
    owner = corpus.open(url)
    joined = Store.join(url, claim=owner.claim)
    write, others = store_writer.write_shard, []

    def lose(*given: object) -> object:
        written = write(*given)
        others.append(take_over(url, joined.blobs, owner))
        return written

    monkeypatch.setattr(store_writer, "write_shard", lose)
    with pytest.raises(Stopped, match="taken over"):
        corpus.commit(joined, [0])
    assert joined.blobs.list(f"{FEATURES}/c/0")
    assert not joined.blobs.list(COMMIT)
    others[0].close()


@pytest.mark.parametrize("address", ["{}", "memory://{}"])
def test_nothing_is_committed_once_ownership_is_given_back(address, tmp_path, corpus_maker):
    """A thread may be writing a pack while its run ends, and the next run begins."""
    corpus = corpus_maker(lengths=(100, 90), num_held_out=0)
    store = corpus.open(address.format(tmp_path / "store"))
    corpus.commit(store, [0])
    store.close()
    with pytest.raises(Stopped, match="has given the store .* back"):
        corpus.commit(store, [1])
    assert store.blobs.list(COMMIT) == [commit_key(0)]


def test_owner_whose_lease_went_with_its_store_stops_writing(blobs):
    owner = Lease(blobs, beat_s=1000)
    owner.acquire("owner")
    for key in blobs.list(lease.OWNER):
        blobs.delete(key)
    owner.check()
    owner._last_beat -= 61
    with pytest.raises(Stopped, match="took no sign of life for 60 s"):
        owner.check()
    owner.release()


def test_lease_that_went_with_its_store_leaves_nothing(blobs):
    owner = Lease(blobs, beat_s=1000)
    owner.acquire("owner")
    for key in blobs.list(""):
        blobs.delete(key)
    owner._beat()
    owner.release()
    assert blobs.list("") == []


def test_owner_that_goes_while_it_is_looked_up_is_followed(blobs, monkeypatch):
    Lease(blobs, beat_s=1000).acquire("owner")
    age_s = type(blobs).age_s

    def late(self, key: str) -> float:
        for each in self.list(lease.OWNER):
            self.delete(each)
        return age_s(self, key)

    monkeypatch.setattr(type(blobs), "age_s", late)
    take_ownership(blobs).release()
