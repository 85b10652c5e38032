"""The workers of a run: they meet at the torch.distributed store, and notice when one is gone.

Every worker keeps a connection to the first. The kernel closes it when a process dies and finds out
within ten seconds when a host does, so nothing depends on heartbeats that a busy interpreter
misses. The first worker hears of progress and failures, and tells everybody else to stop.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dflash_offline.common.errors import BadInput, DamagedStore, FoundProblems, Stopped
from dflash_offline.extract.memory_model import FreeMemory
from dflash_offline.extract.place import Place
from dflash_offline.extract.stop_request import StopRequest
from dflash_offline.extract.tally import Tally

_POLL_S = 0.1
_HELLO_S = 10.0
_MEETING_S = 600.0
# For how long complete packs are committed once a worker is lost.
_LOST_COMMIT_S = 6.0
# Silence of a host: seconds until the first question, seconds between questions, their number.
_KEEPALIVE = (3, 2, 3)
_ROLL_CALL = "roll call"

T = TypeVar("T")


@dataclass
class _Member:
    """What the first worker knows of one."""

    name: str
    free_bytes: int | None = None
    connection: socket.socket | None = None
    tally: Tally | None = None
    is_done: bool = False


class Crew:
    """This process's view of all workers. A context manager that hands on how this one ends."""

    def __init__(
        self, place: Place, stop: StopRequest, *, device: str, free_bytes: int | None = None
    ) -> None:
        """Meet nobody yet.

        Args:
            device: this worker's, for messages.
            free_bytes: of its GPU's memory.
        """
        self.place = place
        self._stop = stop
        self._members = {place.rank: _Member(place.describe(device), free_bytes)}
        self._guard = threading.Lock()
        self._is_leaving = False
        self._has_lost_first = False

    def __enter__(self) -> "Crew":
        if self.place.size > 1:
            self._stop.on_request = self._announce
            self._store = self._meet()
            if self.place.is_first:
                self._call_roll()
            else:
                self._answer()
        return self

    def __exit__(self, _type: object, problem: BaseException | None, _trace: object) -> None:
        self._is_leaving = True
        if problem is None or isinstance(problem, SystemExit):
            return
        if self.place.is_first:
            self._tell_all({"stop": "the first worker ended"})
        elif not self._has_lost_first:
            self._confess(problem)
        # Connections are closed by the end of the process: bytes that nobody read yet would make
        # `close` a reset, and the other side lose the last line.

    def _meet(self) -> dist.Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        give_up = time.monotonic() + _MEETING_S
        while True:
            try:
                store = dist.TCPStore(
                    host,
                    port,
                    is_master=self.place.is_first and not is_hosted,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=_HELLO_S),
                )
            except dist.DistError as problem:
                # Signals are heard between two attempts.
                self._stop.check()
                if time.monotonic() > give_up:
                    raise Stopped(
                        f"nobody answers at MASTER_ADDR {host}, MASTER_PORT {port}, where the "
                        f"workers meet ({str(problem).splitlines()[0]}); start all of them"
                    ) from problem
                continue
            # torchrun may start the same workers again with the same store.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            return dist.PrefixStore(f"dflash-extract/{attempt}", store)

    def meeting(self, name: str) -> dist.Store | None:
        """Return a torch.distributed store that all workers share; None where there is one."""
        return dist.PrefixStore(name, self._store) if self.place.size > 1 else None

    def publish(self, key: str, value: object) -> None:
        """Let every worker read a small JSON value."""
        if self.place.size > 1:
            self._store.set(key, json.dumps(value))

    def expect(self, key: str) -> Any:
        """Return what the first worker publishes, once it does."""
        while not self._ask(lambda: self._store.check([key])):
            self._stop.wait(_POLL_S)
        return json.loads(self._ask(lambda: self._store.get(key)))

    def least_free(self) -> FreeMemory:
        """Wait for every worker, and return the memory of the GPU that has least; for the first.

        Raises:
            Stopped: a worker has not come.
        """
        give_up = time.monotonic() + _MEETING_S
        while len(self._members) < self.place.size:
            self._stop.wait(_POLL_S)
            if time.monotonic() > give_up:
                missing = sorted(set(range(self.place.size)) - set(self._members))
                raise Stopped(
                    f"workers {', '.join(map(str, missing))} of {self.place.size} have not come "
                    f"within {_MEETING_S:.0f} s; start all of them"
                )
        with self._guard:
            known = [m for m in self._members.values() if m.free_bytes is not None]
        if self.place.size == 1 or not known:
            return FreeMemory(self._members[self.place.rank].free_bytes)
        least = min(known, key=lambda member: member.free_bytes or 0)
        return FreeMemory(least.free_bytes, least.name)

    def shares(self, items: list[int], key: str) -> Iterator[int]:
        """Yield items, each to one worker alone: whoever asks gets the next."""
        for at in range(len(items)) if self.place.size == 1 else self._counted(key):
            if at >= len(items):
                return
            yield items[at]

    def report(self, tally: Tally, *, is_done: bool = False) -> None:
        """Tell the first worker what this one did so far."""
        self._is_leaving = is_done and not self.place.is_first
        record = {"tally": tally.as_record(), "done": is_done}
        if self.place.is_first:
            self._hear(0, record)
        else:
            self._send(0, record)

    def tallies(self) -> dict[int, Tally]:
        """Return what each worker did so far, by rank; for the first worker."""
        with self._guard:
            known = {rank: member.tally for rank, member in self._members.items()}
        return {rank: tally for rank, tally in sorted(known.items()) if tally is not None}

    def are_done(self, *, every: int = 1) -> bool:
        """Say whether each worker, or of so many only one, has reported its end; for the first."""
        with self._guard:
            done = {rank for rank, member in self._members.items() if member.is_done}
        return done.issuperset(range(0, self.place.size, every))

    def _counted(self, key: str) -> Iterator[int]:
        while True:
            yield self._ask(lambda: self._store.add(key, 1)) - 1

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except dist.DistError:
            # Whoever keeps the store is gone; the first worker's connection ends with it.
            self._stop.wait(_HELLO_S)
            raise

    def _call_roll(self) -> None:
        listener = socket.create_server(("", 0), backlog=self.place.size)
        token = secrets.token_hex(16)
        self.publish(_ROLL_CALL, [listener.getsockname()[1], token, self._members[0].name])
        _thread(self._admit_all, listener, token)

    def _admit_all(self, listener: socket.socket, token: str) -> None:
        with listener:
            while len(self._members) < self.place.size:
                connection, _ = listener.accept()
                connection.settimeout(_HELLO_S)
                lines = connection.makefile("rb")
                try:
                    hello = json.loads(lines.readline())
                    if hello["token"] != token:
                        raise ValueError("a stranger")
                except (OSError, ValueError, KeyError, TypeError):
                    connection.close()
                    continue
                _watch_silence(connection)
                rank = int(hello["rank"])
                with self._guard:
                    self._members[rank] = _Member(hello["name"], hello["free"], connection)
                if self._stop.is_set:
                    self._announce()
                _thread(self._listen, rank, lines)

    def _answer(self) -> None:
        port, token, first = self.expect(_ROLL_CALL)
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), _HELLO_S)
        except OSError as problem:
            raise Stopped(
                f"{first} does not answer ({problem}); run the same command to go on"
            ) from problem
        _watch_silence(connection)
        me = self._members[self.place.rank]
        self._members[0] = _Member(first, connection=connection)
        hello = {"rank": self.place.rank, "token": token, "name": me.name, "free": me.free_bytes}
        self._send(0, hello)
        _thread(self._listen, 0, connection.makefile("rb"))

    def _listen(self, rank: int, lines: Any) -> None:
        """Hear what another worker says until its connection ends."""
        with suppress(OSError):
            for line in lines:
                self._hear(rank, json.loads(line))
        member = self._members[rank]
        if self._is_leaving or member.is_done:
            return
        reason = (
            f"{member.name} is gone without a word: its process was killed, or its host is not "
            "reachable; what is committed is safe, run the same command to go on"
        )
        self._has_lost_first = rank == 0
        # The store's lock went with the first worker, so nothing more is committed without it.
        commit_s = 0.0 if rank == 0 else _LOST_COMMIT_S
        # A launcher of ours has seen how it ended, and says so.
        self._stop.request(reason, is_said=self.place.launched, commit_s=commit_s)

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        member = self._members[rank]
        if "stop" in message:
            member.is_done = True
            self._stop.request(message["stop"], is_said=True, commit_s=_LOST_COMMIT_S)
        elif "failed" in message:
            member.is_done = True
            self._stop.request(f"{member.name}: {message['failed']}", commit_s=_LOST_COMMIT_S)
        else:
            with self._guard:
                member.tally = Tally.from_record(message["tally"])
                member.is_done = message["done"]

    def _announce(self) -> None:
        """Hand a request to stop on to the others; the first worker tells the user."""
        if self.place.is_first:
            self._tell_all({"stop": self._stop.reason})
        elif not self._stop.is_said:
            self._send(0, {"failed": self._stop.reason})

    def _confess(self, problem: BaseException) -> None:
        """Let the first worker tell the user why this one ends, unless it knows."""
        known = isinstance(problem, BadInput | DamagedStore | FoundProblems | Stopped)
        if not self._stop.is_set:
            text = str(problem) if known else f"a bug, with a traceback: {problem!r}"
            self._send(0, {"failed": text})
        if known:
            raise SystemExit(Stopped.exit_code)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for rank in range(1, self.place.size):
            self._send(rank, message)

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        with self._guard:
            member = self._members.get(rank)
            if member is not None and member.connection is not None:
                # Whether the other side is gone is for `_listen` to find out.
                with suppress(OSError):
                    member.connection.sendall(json.dumps(message).encode() + b"\n")


def _thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="crew", daemon=True).start()


def _watch_silence(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for name, value in zip(names, _KEEPALIVE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, name, value)
    # Otherwise what was sent and never acknowledged keeps a dead connection alive.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000)
