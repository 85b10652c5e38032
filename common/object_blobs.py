"""Objects on any fsspec file system, with one layer of retries and one clear error at the end.

S3 has a class of its own in common/s3_blobs.py. File systems are built for each process (pickling
carries the address, not the connection) and are not shared with zarr, whose event loop is another.
"""

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from zlib import crc32

import fsspec

from dflash_offline.common.blobs import OWNER, UPLOAD_AGE_S
from dflash_offline.common.direct_io import Seen, copy_into
from dflash_offline.common.errors import BadInput, Stopped

# A request that hangs is given up after this time.
TIMEOUT_S = 6.0
# Requests are repeated until this long after the first failure: 6 + 14 + 6 s in the worst case.
PATIENCE_S = 14.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 4.0
_TRIAL = "trial-"
_COMPARE_BYTES = 16 << 20
# Answers, not failures: another try gives the same one.
_FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)

T = TypeVar("T")


class ObjectBlobs:
    """Objects under one address of a file system that fsspec knows."""

    rereads = 2
    parallel = 16

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme, _, rest = url.partition("://")
        # What stands before an @ is a user or a secret.
        self.url = f"{scheme}://{rest.rpartition('@')[2]}".rstrip("/")
        self._address = url
        self._options = dict(options)
        self._process = os.getpid()
        self._is_conditional = True
        self._has_answered = False
        self._filesystem = self._connect()
        self._root = self._filesystem._strip_protocol(url).rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._address, self._options)

    def _connect(self) -> Any:
        scheme = self._address.partition("://")[0]
        try:
            return fsspec.filesystem(
                scheme, **self._options, skip_instance_cache=True, use_listings_cache=False
            )
        except ImportError as problem:
            raise BadInput(f"{self.url} needs a package that is not installed: {problem}") from None
        # Each file system checks what it is given in its own way, and some connect at once.
        except (ValueError, TypeError, OSError) as problem:
            raise BadInput(
                f"{self.url} cannot be opened: {problem}; give a folder or an fsspec address, and "
                "what its file system wants as --storage-option"
            ) from None

    def read(self, key: str) -> bytes:
        return bytes(self._persist(lambda: self._get(key, None, None), "reading", key))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        end = None if offset < 0 else offset + length
        return bytes(self._persist(lambda: self._get(key, offset, end), "reading", key))[:length]

    def read_into(
        self, key: str, offset: int, *buffers: memoryview, seen: Seen | None = None
    ) -> int:
        end = offset + sum(map(len, buffers))
        content = self._persist(lambda: self._get(key, offset, end), "reading", key)
        return copy_into(memoryview(content).cast("B"), 0, *buffers, seen=seen)

    def size(self, key: str) -> int:
        return self._persist(lambda: self._size(key), "looking up", key)

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        views = [memoryview(part).cast("B") for part in parts]
        return self._create_at_once(key, views)

    def _create_at_once(self, key: str, views: Sequence[memoryview]) -> int:
        """Put one object.

        An answer of "exists" may mean our own first try, whose answer was lost: the library below
        repeats a request when its connection drops, so even the first answer can be that one.
        """

        def put() -> None:
            if not self._is_conditional and self._exists(key):
                raise _exists_error(key)
            self._put_new(key, views)

        num_bytes = sum(map(len, views))
        try:
            self._persist(put, "writing", key)
        except FileExistsError:
            digest = 0
            for view in views:
                digest = crc32(view, digest)
            if not self._has_content(key, num_bytes, digest):
                raise
        return num_bytes

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        if expected is not None and self.read(key) != expected:
            raise _exists_error(key)
        self._persist(lambda: self._overwrite(key, content), "writing", key)

    def list(self, prefix: str) -> list[str]:
        return sorted(self._persist(lambda: self._find(prefix), "listing", prefix))

    def delete(self, key: str) -> None:
        self._persist(lambda: self._filesystem.rm_file(self._path(key)), "deleting", key)

    def forget(self, key: str) -> None:
        pass

    def expect(self, num_bytes: int) -> None:
        pass

    def free_bytes(self) -> None:
        return None

    def age_s(self, key: str) -> float:
        """Return the seconds since an object was written, both times from the storage's clock."""
        clock = _trial_key()
        self.create(clock, [b"time"])
        try:
            now, then = (
                self._persist(lambda k=each: self._modified(k), "looking up", each)
                for each in (clock, key)
            )
        finally:
            self.delete(clock)
        return now - then

    def probe(self) -> str | None:
        self._drop_old_trials()
        key = _trial_key()
        self.create(key, [b"first"])
        try:
            self._persist(lambda: self._put_new(key, [memoryview(b"second")]), "writing", key)
            self._is_conditional = False
        except FileExistsError:
            self._is_conditional = True
        finally:
            self.delete(key)
        if self._is_conditional:
            return None
        return (
            f"the server of {self.url} ignores create-only writes (If-None-Match), so they are "
            "only checked, not enforced: two runs that write this store at once can overwrite "
            "each other's packs, which readers then refuse as damaged; never start a second one"
        )

    def _drop_old_trials(self) -> None:
        """Delete what killed runs left; young ones may be another run's that is at it."""
        for key in self.list(OWNER):
            name = key.rpartition("/")[2]
            began = name.removeprefix(_TRIAL).partition("-")[0]
            if name.startswith(_TRIAL) and time.time() - int(began) > UPLOAD_AGE_S:
                self.delete(key)

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        return []

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _get(self, key: str, start: int | None, end: int | None) -> bytes | memoryview:
        return self._filesystem.cat_file(self._path(key), start=start, end=end)

    def _size(self, key: str) -> int:
        info = self._filesystem.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return info["size"]

    def _exists(self, key: str) -> bool:
        try:
            self._size(key)
        except FileNotFoundError:
            return False
        return True

    def _modified(self, key: str) -> float:
        return self._filesystem.modified(self._path(key)).timestamp()

    def _put_new(self, key: str, views: Sequence[memoryview]) -> None:
        self._filesystem.pipe_file(self._path(key), b"".join(views), mode="create")

    def _overwrite(self, key: str, content: bytes) -> None:
        self._filesystem.pipe_file(self._path(key), content)

    def _find(self, prefix: str) -> Iterable[str]:
        start = len(self._root) + 1
        paths = self._filesystem.find(self._path(prefix))
        return [path[start:] for path in paths if len(path) > start]

    def _has_content(self, key: str, num_bytes: int, digest: int) -> bool:
        """Return whether an object is what this process tried to write.

        The digest is zlib's CRC-32. A CRC-32C would be the same for all shards of one shape: their
        chunks end in their own.
        """
        if self.size(key) != num_bytes:
            return False
        found = 0
        for offset in range(0, num_bytes, _COMPARE_BYTES):
            found = crc32(self.read_range(key, offset, _COMPARE_BYTES), found)
        return found == digest

    def _transient(self) -> tuple[type[Exception], ...]:
        """Return what is worth another try, beside the answers that are final."""
        return (OSError,)

    def _persist(self, attempt: Callable[[], T], doing: str, key: str) -> T:
        """Repeat a request until it succeeds, its answer is final, or patience ends.

        Raises:
            Stopped: storage cannot be reached.
            BadInput: the first request of all was refused for lack of rights.
        """
        assert os.getpid() == self._process, "connections do not survive a fork: open again"
        transient = self._transient()
        first_failure, pause, attempts = None, _FIRST_PAUSE_S, 0
        while True:
            attempts += 1
            try:
                answer = attempt()
            except _FINAL:
                self._has_answered = True
                raise
            except PermissionError as problem:
                raise self._refused(problem) from problem
            except transient as problem:
                now = time.monotonic()
                first_failure = first_failure or now
                if now - first_failure + pause > PATIENCE_S:
                    raise Stopped(
                        f"storage unreachable: {doing} {key} under {self.url} failed {attempts} "
                        f"times ({_one_line(problem)}); what is committed is safe, run the same "
                        "command again"
                    ) from problem
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._has_answered = True
                return answer

    def _refused(self, problem: PermissionError) -> BadInput | Stopped:
        text = (
            f"{self.url} refuses access ({_one_line(problem)}); check the credentials, from the "
            "usual variables (AWS_ACCESS_KEY_ID and so on) or --storage-option"
        )
        # Credentials that expire in the middle of a run leave a store that can go on.
        return (
            Stopped(f"{text}; what is committed is safe") if self._has_answered else BadInput(text)
        )


def _trial_key() -> str:
    """Return a new key for a trial write, with its time."""
    return f"{OWNER}/{_TRIAL}{int(time.time())}-{uuid.uuid4().hex}"


def _exists_error(key: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)


def _one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= 200 else text[:197] + "..."
