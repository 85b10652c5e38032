"""Objects under one address: create-only writes, ranged reads, listing. Here: a local folder.

A local write is atomic and durable: a temporary file, fsync, a hard link that fails when the name
exists, and fsync of the folder, and of those above it where it is new. Object storage is in
common/object_blobs.py and s3_blobs.py.
"""

import errno
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dflash_offline.common import direct_io
from dflash_offline.common.direct_io import Seen, write_durably
from dflash_offline.common.errors import BadInput, Stopped

# What ownership keeps beside a store's content: a file, on object storage a folder.
OWNER = ".owner"
_TEMPORARY = ".tmp-"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
UPLOAD_AGE_S = 3600.0

T = TypeVar("T")
R = TypeVar("R")


class Blobs(Protocol):
    """What the store needs from storage; keys are relative and use `/`."""

    url: str  # for messages, without credentials
    parallel: int  # operations in flight that pay
    rereads: int  # how often wrong bytes are asked for again; 0 where no network can garble them

    def read(self, key: str) -> bytes:
        """Return a whole object; raises `FileNotFoundError`."""
        ...

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Return bytes from `offset` (from the end when negative); fewer where it ends."""
        ...

    def read_into(
        self, key: str, offset: int, *buffers: memoryview, seen: Seen | None = None
    ) -> int:
        """Fill buffers one after another from `offset`; returns the bytes read, fewer at the end.

        Page-aligned buffers, page-locked memory for one, are filled without a copy where storage
        allows it. `seen` is called with the pieces of the first buffer, in order, as they come.
        """
        ...

    def size(self, key: str) -> int:
        """Return an object's size in bytes; raises `FileNotFoundError`."""
        ...

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        """Write a new object whole or not at all; raises `FileExistsError`. Returns its size.

        Parts must stay as they are until it returns.
        """
        ...

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        """Replace an object whole or not at all; only the owner of a store does it.

        Raises:
            FileExistsError: the object is not as `expected`.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder, sorted; empty where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; may raise `FileNotFoundError`."""
        ...

    def forget(self, key: str) -> None:
        """Drop what is remembered of an object, before wrong bytes are read again."""
        ...

    def expect(self, num_bytes: int) -> None:
        """Say how much will be read over and over, so that caching can be judged."""
        ...

    def free_bytes(self) -> int | None:
        """Return the room left, or `None` where storage has no such limit."""
        ...

    def probe(self) -> str | None:
        """Try create-only writes; returns what is lost where storage does not keep to them.

        Only the owner of a store does it; what its predecessors left of theirs goes.
        """
        ...

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        """Abort unfinished uploads under this address; returns their keys."""
        ...


class LocalBlobs:
    """A folder of the local file system."""

    rereads = 0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self.parallel = min(4, os.cpu_count() or 1)
        self.reads_direct = False
        self._has_links = True

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        path = self.root / key
        if offset < 0:
            offset = max(0, path.stat().st_size + offset)
        content = bytearray(length)
        count = direct_io.read_into(path, offset, [memoryview(content)], direct=False)
        return bytes(content[:count])

    def read_into(
        self, key: str, offset: int, *buffers: memoryview, seen: Seen | None = None
    ) -> int:
        return direct_io.read_into(
            self.root / key, offset, buffers, direct=self.reads_direct, seen=seen
        )

    def size(self, key: str) -> int:
        return (self.root / key).stat().st_size

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        path = self.root / key
        with room_or_stopped(self.url), _temporary_beside(path) as temporary:
            num_bytes = write_durably(temporary, parts)
            self._publish(temporary, path)
        _sync_folder(path.parent)
        return num_bytes

    def _publish(self, temporary: Path, path: Path) -> None:
        if self._has_links:
            try:
                os.link(temporary, path)
                return
            except OSError as problem:
                if problem.errno not in _NO_LINKS:
                    raise
                self._has_links = False
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.rename(path)

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        path = self.root / key
        if expected is not None and path.read_bytes() != expected:
            raise FileExistsError(errno.EEXIST, "changed by another process", str(path))
        with room_or_stopped(self.url), _temporary_beside(path) as temporary:
            write_durably(temporary, [content])
            temporary.rename(path)
        _sync_folder(path.parent)

    def list(self, prefix: str) -> list[str]:
        base = self.root / prefix
        if not base.is_dir():
            return []
        found = (Path(folder) / name for folder, _, names in os.walk(base) for name in names)
        return sorted(p.relative_to(self.root).as_posix() for p in found)

    def delete(self, key: str) -> None:
        (self.root / key).unlink()

    def forget(self, key: str) -> None:
        pass

    def expect(self, num_bytes: int) -> None:
        """Read past the page cache when it cannot hold half of what will be read."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.reads_direct = num_bytes > memory // 2

    def free_bytes(self) -> int:
        return shutil.disk_usage(nearest_there(self.root)).free

    def probe(self) -> str | None:
        for key in self.list(""):
            if is_temporary(key):
                (self.root / key).unlink(missing_ok=True)
        key = f"{_TEMPORARY}probe"
        self.create(key, [b"probe"])
        self.delete(key)
        if self._has_links:
            return None
        return (
            f"{self.url} is on a file system without hard links, so create-only writes are only "
            "checked, not enforced: two runs that write this store at once can overwrite each "
            "other's packs; never start a second one"
        )

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        return []


def is_temporary(key: str) -> bool:
    """Return whether a key is what an interrupted `create` left behind."""
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def nearest_there(path: Path) -> Path:
    """Return a path or, where it is not there yet, the nearest one above it that is."""
    return next(each for each in (path, *path.parents) if each.exists())


def blobs_at(url: str, storage_options: Sequence[str] = ()) -> Blobs:
    """Return the storage behind a folder or any fsspec address.

    Args:
        url: a folder, `file://…`, `s3://bucket/prefix`, or another scheme that fsspec knows.
        storage_options: `KEY=VALUE` each, for the file system: `endpoint_url=http://…`, `key=…`,
            `secret=…`, `profile=…`. For s3 also `region=…`, `client=s3fs`, which keeps obstore out,
            and `checksums=false` for servers that refuse them. Values are JSON where they can be,
            text otherwise.

    Raises:
        BadInput: the scheme is unknown, its package is not installed, an option is malformed, or
            options are given for a folder, which has none.
    """
    scheme, separator, rest = url.partition("://")
    options = parse_storage_options(storage_options)
    if not separator and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", url):
        raise BadInput(f"{url} lacks a slash behind the colon; write {url.replace(':/', '://', 1)}")
    if _is_folder(url):
        if options:
            raise BadInput(
                f"--storage-option {next(iter(options))}=… says nothing of {url}, which is a "
                "folder; leave it out, or give an address such as s3://bucket/prefix"
            )
        root = Path(rest if separator else url).expanduser()
        if root.is_symlink() and not root.exists():
            raise BadInput(f"{url} is a link to nothing ({root.readlink()}); is the disk mounted?")
        nearest = nearest_there(root)
        if not nearest.is_dir():
            raise BadInput(f"{url} is no folder, since {nearest} is a file; give another folder")
        return LocalBlobs(root)
    if scheme in ("s3", "s3a"):
        from dflash_offline.common.s3_blobs import S3Blobs

        return S3Blobs(url, options)
    from dflash_offline.common.object_blobs import ObjectBlobs

    return ObjectBlobs(url, options)


def options_by_address(urls: Sequence[str], storage_options: Sequence[str]) -> list[Sequence[str]]:
    """Return the options of each of a command's addresses: folders beside other storage have none.

    Where all are folders, each gets them, and `blobs_at` refuses.
    """
    all_folders = all(map(_is_folder, urls))
    return [() if _is_folder(url) and not all_folders else storage_options for url in urls]


def _is_folder(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return not separator or scheme == "file"


def in_parallel(blobs: Blobs, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of every item, in order, with as many in flight as the storage rewards."""
    if len(items) < 2 or blobs.parallel < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(blobs.parallel, thread_name_prefix="storage") as pool:
        return list(pool.map(function, items))


def parse_storage_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return `KEY=VALUE` pairs as a mapping.

    Raises:
        BadInput: a pair has no `=`; the message shows no value, since it may be a secret.
    """
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not (separator and name):
            raise BadInput("--storage-option takes KEY=VALUE, and one of those given has no '='")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
        if name in ("key", "secret", "token"):
            options[name] = value
    return options


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    # A folder is as durable as its name in the one above.
    made = list(itertools.takewhile(lambda folder: not folder.exists(), path.parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in made:
        _sync_folder(folder.parent)
    temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def room_or_stopped(url: str) -> Iterator[None]:
    """Turn "disk full" and "read-only" into `Stopped`."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise Stopped(
            f"{url} takes no more data ({os.strerror(problem.errno)}): what is committed is "
            "safe; free space and run the same command again"
        ) from problem


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
