"""A read-through cache of remote bytes on local disk, up to a size.

What is kept are the ranges that readers ask for, inner chunks mostly. The checksums of the store
stand above it: bytes that went bad on the local disk are forgotten and read from the source again.
Several processes may share a folder; each counts all of it when it starts.
"""

import errno
import hashlib
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dflash_offline.common.blobs import UPLOAD_AGE_S, Blobs
from dflash_offline.common.direct_io import Seen, read_into
from dflash_offline.common.errors import BadInput

_SUFFIX = ".part"


class ReadCache:
    """Another storage, with ranges that were read before on local disk."""

    def __init__(self, source: Blobs, folder: Path, *, limit_bytes: int) -> None:
        self.source = source
        self.url = source.url
        self.parallel = source.parallel
        self.rereads = max(1, source.rereads)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._guard = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0
        try:
            entries = _kept_files(folder)
        except OSError as problem:
            raise BadInput(
                f"--read-cache {folder} cannot be used ({problem.strerror}); give a local folder "
                "that you may write"
            ) from problem
        for name, status in sorted(entries.items(), key=lambda entry: entry[1].st_mtime_ns):
            self._sizes[name] = status.st_size
            self._total += status.st_size

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.source, self._folder, self._limit_bytes)

    def read_into(
        self, key: str, offset: int, *buffers: memoryview, seen: Seen | None = None
    ) -> int:
        wanted = sum(map(len, buffers))
        name = self._name(key, offset, wanted)
        if self._has_filled(name, buffers, seen):
            return wanted
        count = self.source.read_into(key, offset, *buffers, seen=seen)
        if count == wanted:
            self._keep(name, buffers)
        return count

    def read(self, key: str) -> bytes:
        return self.source.read(key)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        # The index at the end of a shard, mostly; `offset` is negative then, and part of the name.
        content = memoryview(bytearray(length))
        name = self._name(key, offset, length)
        if self._has_filled(name, [content], None):
            return bytes(content)
        found = self.source.read_range(key, offset, length)
        if len(found) == length:
            self._keep(name, [memoryview(found)])
        return found

    def forget(self, key: str) -> None:
        prefix = self._prefix(key)
        with self._guard:
            names = [name for name in self._sizes if name.startswith(prefix)]
        for name in names:
            self._drop(name)
        self.source.forget(key)

    def size(self, key: str) -> int:
        return self.source.size(key)

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        return self.source.create(key, parts)

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        self.source.replace(key, content, expected=expected)

    def list(self, prefix: str) -> list[str]:
        return self.source.list(prefix)

    def delete(self, key: str) -> None:
        self.forget(key)
        self.source.delete(key)

    def expect(self, num_bytes: int) -> None:
        self.source.expect(num_bytes)

    def free_bytes(self) -> int | None:
        return self.source.free_bytes()

    def probe(self) -> str | None:
        return self.source.probe()

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        return self.source.drop_stale_uploads(older_than_s)

    def _prefix(self, key: str) -> str:
        return hashlib.sha256(f"{self.url}\n{key}".encode()).hexdigest()[:32]

    def _name(self, key: str, offset: int, length: int) -> str:
        return f"{self._prefix(key)}-{offset}-{length}{_SUFFIX}"

    def _has_filled(self, name: str, buffers: Sequence[memoryview], seen: Seen | None) -> bool:
        """Fill buffers from what is kept, if it is and is whole."""
        with self._guard:
            if name not in self._sizes:
                return False
            self._sizes.move_to_end(name)
        # Another process may have dropped it, or the disk lost it.
        with suppress(OSError):
            path = self._folder / name
            if path.stat().st_size == sum(map(len, buffers)):
                read_into(path, 0, buffers, direct=False, seen=seen)
                return True
        self._drop(name)
        return False

    def _drop(self, name: str) -> None:
        with self._guard:
            self._total -= self._sizes.pop(name, 0)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()

    def _keep(self, name: str, buffers: Sequence[memoryview]) -> None:
        size = sum(map(len, buffers))
        if size > self._limit_bytes:
            return
        for old in self._make_room(name, size):
            self._unlink(old)
        temporary = self._folder / f".{uuid.uuid4().hex}"
        try:
            with temporary.open("xb", buffering=0) as file:
                for buffer in buffers:
                    view = buffer
                    while len(view):
                        view = view[file.write(view) :]
            temporary.rename(self._folder / name)
        except OSError:
            # A disk that is full, read-only or gone costs the cache, not the run.
            self._drop(name)
        finally:
            self._unlink(temporary.name)

    def _make_room(self, name: str, size: int) -> Sequence[str]:
        """Count a new entry in, and return the names that leave for it, oldest use first."""
        leaving = []
        with self._guard:
            self._total -= self._sizes.pop(name, 0)
            while self._sizes and self._total + size > self._limit_bytes:
                old, old_size = self._sizes.popitem(last=False)
                self._total -= old_size
                leaving.append(old)
            self._sizes[name] = size
            self._total += size
        return leaving


def _kept_files(folder: Path) -> dict[str, os.stat_result]:
    """Return what a folder keeps; makes it, and deletes what killed runs were writing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    kept = {}
    for entry in os.scandir(folder):
        # Another process that shares the folder may drop it at any time.
        with suppress(FileNotFoundError):
            status = entry.stat()
            if entry.name.endswith(_SUFFIX):
                kept[entry.name] = status
            elif re.fullmatch(r"\.[0-9a-f]{32}", entry.name) and (
                time.time() - status.st_mtime > UPLOAD_AGE_S
            ):
                os.unlink(entry.path)
    return kept


def _rebuild(source: Blobs, folder: Path, limit_bytes: int) -> ReadCache:
    return ReadCache(source, folder, limit_bytes=limit_bytes)
