"""Ownership of a store: one run writes it at a time.

On the local file system the kernel keeps the lock. On object storage it is a lease: generation n of
`.owner/` belongs to the run that created `<n>.json`, the highest generation owns the store, and its
`<n>.beat` is rewritten every 15 s. A beat's age is taken between two times of the storage's clock.
"""

import errno
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import click

from dflash_offline.common.blobs import OWNER, Blobs, LocalBlobs, room_or_stopped
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.object_blobs import ObjectBlobs

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
BEAT_S = 15.0
SILENCE_S = 90.0
# Writing goes on for this long after the last beat that arrived, well before others may take over.
_TRUST_S = 60.0


class Ownership(Protocol):
    """Who may write a store.

    Attributes:
        claim: what tells this run's ownership from any other's, for the processes that write for
            the owner; once it is acquired.
    """

    claim: str

    def acquire(self, description: str) -> None:
        """Take ownership; raises `BadInput` that names the owner when another live run has it."""
        ...

    def refuse_if_taken(self) -> None:
        """Raise what `acquire` would now, without taking or writing anything."""
        ...

    def check(self) -> None:
        """Raise `Stopped` when ownership was lost or given back."""
        ...

    def release(self) -> None:
        """Give ownership back; harmless when it was never taken."""
        ...

    def standing(self) -> str:
        """Return the claim of whoever owns the store now, this run or another."""
        ...

    def describe(self, claim: str) -> str:
        """Return whose a standing claim is, for people."""
        ...


def take_ownership(blobs: Blobs) -> Ownership:
    """Own the store at an address, and warn where its storage cannot keep two writers apart.

    Raises:
        BadInput: another live run owns it; names that run and its age.
    """
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock = _lock_for(blobs)
    lock.acquire(f"process {os.getpid()} on {platform.node()}, since {since}")
    try:
        lost = blobs.probe()
    except BaseException:
        lock.release()
        raise
    if lost:
        click.echo(f"warning: {lost}", err=True)
    return lock


def refuse_second_run(blobs: Blobs) -> None:
    """Refuse a store that another run writes, before the work that ownership is taken for.

    Raises:
        BadInput: as `take_ownership`.
    """
    _lock_for(blobs).refuse_if_taken()


def _lock_for(blobs: Blobs) -> Ownership:
    if isinstance(blobs, LocalBlobs):
        return LocalLock(blobs.root)
    assert isinstance(blobs, ObjectBlobs), "only folders and object storage are written"
    return Lease(blobs)


class Joined:
    """The right to write for the owner of a store, for as long as that one owns it."""

    def __init__(self, blobs: Blobs, claim: str) -> None:
        self._url = blobs.url
        self._lock = _lock_for(blobs)
        self.claim = claim

    def check(self) -> None:
        """Raise `Stopped` when another run owns the store; asks the storage, in one request."""
        claim = self._lock.standing()
        if claim != self.claim:
            raise _taken_over(self._url, self._lock.describe(claim))

    def release(self) -> None:
        """Own nothing, so give nothing back."""


def is_owner_key(key: str) -> bool:
    """Return whether a key belongs to ownership and not to the store's content."""
    return key.partition("/")[0] == OWNER


class LocalLock:
    """`flock` on `<root>/.owner`.

    The kernel drops it with the process, so a rerun after a crash takes over at once.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / OWNER
        self.claim = ""
        self._descriptor: int | None = None
        self._guard = threading.Lock()

    def acquire(self, description: str) -> None:
        with room_or_stopped(str(self.path.parent)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 4096).decode(errors="replace")
            os.close(descriptor)
            raise _taken(str(self.path.parent), _first_line(owner)) from None
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise
            click.echo(
                f"warning: {self.path.parent} is on a file system without locks, so a second run "
                "would not be refused; never start one",
                err=True,
            )
        # Processes of two containers may have the same name and number.
        self.claim = f"{description}\n{uuid.uuid4().hex}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.claim.encode(), 0)
        self._descriptor = descriptor

    def refuse_if_taken(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as owner:
            try:
                # Shared, so that two that ask at once do not refuse each other.
                fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(str(self.path.parent), self.describe(self.standing())) from None
            except OSError as problem:
                if problem.errno not in _NO_LOCKS:
                    raise

    def check(self) -> None:
        if self._descriptor is None:
            raise _given_back(str(self.path.parent))

    def standing(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def describe(self, claim: str) -> str:
        return _first_line(claim) or "unknown"

    def release(self) -> None:
        with self._guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class Lease:
    """A create-only record on object storage, kept alive by a thread."""

    def __init__(self, blobs: ObjectBlobs, *, beat_s: float = BEAT_S) -> None:
        self._blobs = blobs
        self._beat_s = beat_s
        self.claim = ""
        self._generation: int | None = None
        self._last_beat = 0.0
        self._lost_to: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, description: str) -> None:
        highest = self._highest()
        if highest is not None:
            self._refuse_if_alive(highest)
        generation = 0 if highest is None else highest + 1
        record = {"description": description, **_this_process()}
        try:
            self._blobs.create(_record_key(generation), [json.dumps(record).encode()])
        except FileExistsError:
            self._refuse_if_alive(generation)
            raise _taken(self._blobs.url, "it took the store a moment ago") from None
        newest = self._highest()
        if newest != generation:
            # A run that was slower than a whole life of its successor.
            raise _taken(self._blobs.url, self._owner(newest)["description"])
        self._generation, self.claim = generation, str(generation)
        self._blobs.replace(_beat_key(generation), b"beat")
        self._last_beat = _now_s()
        self._drop_older(generation)
        self._thread = threading.Thread(target=self._keep_alive, daemon=True, name="store-lease")
        self._thread.start()

    def refuse_if_taken(self) -> None:
        highest = self._highest()
        if highest is not None:
            self._refuse_if_alive(highest)

    def check(self) -> None:
        if self._generation is None:
            raise _given_back(self._blobs.url)
        if self._lost_to is None and _now_s() - self._last_beat > 2 * self._beat_s:
            self._beat()
        if self._lost_to is not None:
            raise _taken_over(self._blobs.url, self._lost_to)
        if _now_s() - self._last_beat > _TRUST_S:
            raise Stopped(
                f"storage unreachable: {self._blobs.url} took no sign of life for {_TRUST_S:.0f} s;"
                " what is committed is safe, run the same command again"
            )

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._generation is not None and self._lost_to is None:
            # Where this fails, others find the process gone or the beat silent. A lease that went
            # with its store leaves nothing: the next owner's could be taken for given back.
            with suppress(Stopped, OSError):
                if self._highest() == self._generation:
                    self._blobs.replace(_beat_key(self._generation), b"released")
        self._generation = None

    def standing(self) -> str:
        highest = self._highest()
        return "" if highest is None else str(highest)

    def describe(self, claim: str) -> str:
        return self._owner(int(claim or 0))["description"]

    def _keep_alive(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                self._beat()
            except (Stopped, OSError, BadInput):
                # `check` counts from the last beat that arrived.
                continue
            if self._lost_to is not None:
                return

    def _beat(self) -> None:
        assert self._generation is not None, "the lease is not held"
        newest = self._highest()
        if newest is not None and newest > self._generation:
            self._lost_to = self._owner(newest)["description"]
            return
        if newest is not None:  # else it went with its store
            self._blobs.replace(_beat_key(self._generation), b"beat")
            self._last_beat = _now_s()

    def _highest(self) -> int | None:
        names = [key.rpartition("/")[2] for key in self._blobs.list(OWNER)]
        numbers = [int(n.removesuffix(".json")) for n in names if n.endswith(".json")]
        return max(numbers, default=None)

    def _owner(self, generation: int | None) -> dict[str, Any]:
        try:
            return json.loads(self._blobs.read(_record_key(generation or 0)))
        except (FileNotFoundError, ValueError):
            return {"description": "unknown"}

    def _refuse_if_alive(self, generation: int) -> None:
        owner = self._owner(generation)
        heard = _beat_key(generation)
        try:
            if self._blobs.read(heard) == b"released":
                return
        except FileNotFoundError:
            # Between its record and its first beat.
            heard = _record_key(generation)
        try:
            age_s = self._blobs.age_s(heard)
        except FileNotFoundError:
            return  # it went with its store
        if _is_same_machine(owner):
            if _is_running(owner):
                raise _taken(self._blobs.url, f"{owner['description']}, on this machine")
            return
        if age_s < SILENCE_S:
            who = f"{owner['description']}, last heard from {age_s:.0f} s ago"
            raise _taken(self._blobs.url, who, f"after {SILENCE_S:.0f} s of silence")

    def _drop_older(self, generation: int) -> None:
        for key in self._blobs.list(OWNER):
            number = key.rpartition("/")[2].partition(".")[0]
            if number.isdecimal() and int(number) < generation:
                self._blobs.delete(key)


def _now_s() -> float:
    """Return a time that goes on while the machine is suspended, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _record_key(generation: int) -> str:
    return f"{OWNER}/{generation:08d}.json"


def _beat_key(generation: int) -> str:
    return f"{OWNER}/{generation:08d}.beat"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _given_back(url: str) -> Stopped:
    # Of a thread that was still writing when its run ended.
    return Stopped(f"this run has given the store at {url} back; what is committed is safe")


def _taken_over(url: str, owner: str) -> Stopped:
    return Stopped(
        f"the store at {url} was taken over by another run ({owner}) while this one was silent; "
        "what is committed is safe"
    )


def _taken(url: str, owner: str, takeover: str = "") -> BadInput:
    remedy = "wait for it, stop it, or use another --out"
    if takeover:
        remedy += f"; a run that died is followed {takeover}"
    return BadInput(f"--out {url} is being written by another live run ({owner}); {remedy}")


def _this_process() -> dict[str, Any]:
    return {**_this_machine(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _this_machine() -> dict[str, str]:
    """Return what must agree for a process number to mean the same process."""
    return {
        "host": platform.node(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_space": os.readlink("/proc/self/ns/pid"),
    }


def _is_same_machine(owner: Mapping[str, Any]) -> bool:
    return all(owner.get(name) == value for name, value in _this_machine().items())


def _is_running(owner: Mapping[str, Any]) -> bool:
    started = _start_time(int(owner["pid"]))
    return started is not None and started == owner["started"]


def _start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; `None` when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in brackets and may hold spaces; a zombie is gone.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
