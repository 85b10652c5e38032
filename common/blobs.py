"""Objects under one address: create-only writes, ranged reads, listing. Here: a local folder.

A write is atomic and durable: a temporary file, fsync, a hard link that fails when the name exists,
and fsync of the folder.
"""

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dflash_offline.common.errors import BadInput, Stopped

_TEMPORARY = ".tmp-"


class Blobs(Protocol):
    """What the store needs from storage; keys are relative and use `/`."""

    url: str

    def read(self, key: str) -> bytes:
        """Return a whole object; raises `FileNotFoundError`."""
        ...

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Return bytes from `offset` (from the end when negative); fewer where it ends."""
        ...

    def size(self, key: str) -> int:
        """Return an object's size in bytes; raises `FileNotFoundError`."""
        ...

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        """Write a new object whole or not at all; raises `FileExistsError`. Returns its size."""
        ...

    def replace(self, key: str, content: bytes) -> None:
        """Replace an object whole or not at all; only the owner of a store does it."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder, sorted; empty where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; raises `FileNotFoundError`."""
        ...

    def free_bytes(self) -> int | None:
        """Return the room left, or `None` where storage has no such limit."""
        ...


class LocalBlobs:
    """A folder of the local file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        descriptor = os.open(self.root / key, os.O_RDONLY)
        try:
            if offset < 0:
                offset = max(0, os.fstat(descriptor).st_size + offset)
            # One pread returns at most 2 GiB.
            pieces = []
            while length > 0:
                piece = os.pread(descriptor, length, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset, length = offset + len(piece), length - len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def size(self, key: str) -> int:
        return (self.root / key).stat().st_size

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with _room_or_stopped(self.url):
                num_bytes = _write_durably(temporary, parts)
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
        return num_bytes

    def replace(self, key: str, content: bytes) -> None:
        path = self.root / key
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with _room_or_stopped(self.url):
                _write_durably(temporary, [content])
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def list(self, prefix: str) -> list[str]:
        base = self.root / prefix
        if not base.is_dir():
            return []
        found = (Path(folder) / name for folder, _, names in os.walk(base) for name in names)
        return sorted(p.relative_to(self.root).as_posix() for p in found)

    def delete(self, key: str) -> None:
        (self.root / key).unlink()

    def free_bytes(self) -> int:
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free


def is_temporary(key: str) -> bool:
    """Return whether a key is what an interrupted `create` left behind."""
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def blobs_at(url: str) -> Blobs:
    """Return the storage behind a folder or a `file://` address.

    Raises:
        BadInput: the scheme is not supported.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalBlobs(Path(url).expanduser())
    if scheme == "file":
        return LocalBlobs(Path(rest))
    raise BadInput(f"{url} has the scheme {scheme}; only local folders are supported")


@contextmanager
def _room_or_stopped(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise Stopped(
            f"{url} takes no more data ({os.strerror(problem.errno)}): what is committed is "
            "safe; free space and run the same command again"
        ) from problem


def _write_durably(path: Path, parts: Iterable[memoryview | bytes]) -> int:
    num_bytes = 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part).cast("B")
            while len(rest):
                written = file.write(rest)
                rest = rest[written:]
                num_bytes += written
        os.fsync(file.fileno())
    return num_bytes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalLock:
    """Ownership of a store on the local file system: `flock` on `<root>/.owner`.

    The kernel drops it with the process, so a rerun after a crash takes over at once.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / ".owner"
        self._descriptor: int | None = None
        self._guard = threading.Lock()

    def acquire(self, description: str) -> None:
        """Take ownership.

        Raises:
            BadInput: another live run owns the store; names it.
        """
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 4096).decode(errors="replace").strip()
            os.close(descriptor)
            raise BadInput(
                f"--out {self.path.parent} is being written by another live run ({owner}); "
                "wait for it, stop it, or use another --out"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, description.encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give ownership back; harmless when it was never taken."""
        with self._guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
