"""obstore behind the few calls that S3 storage needs, raising Python's own exceptions.

It moves the bytes of large objects for a fraction of the CPU time of s3fs. Retries are the
caller's, so that there is one layer of them. obstore hangs after a fork; callers never fork.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

# A put gets its time by its size, at this rate or better.
_SLOWEST_BYTES_PER_S = 8 << 20
_GET_S = 120.0


class CannotServe(OSError):
    """The server answers in a way that obstore does not accept."""


class _PastTheEnd(Exception):
    """The range begins behind the object's end."""


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """Where and as whom; the same as what botocore resolved."""

    bucket: str
    endpoint: str
    region: str
    is_anonymous: bool
    credentials: Callable[[], dict[str, Any]]
    has_checksums: bool


class ObstoreBytes:
    """One bucket."""

    def __init__(self, address: S3Address, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._get_store = self._open({"timeout": timedelta(seconds=_GET_S)})
        self._put_stores: dict[int, S3Store] = {}

    def _open(self, client: Mapping[str, Any]) -> S3Store:
        where = self._address
        identity: dict[str, Any] = {"credential_provider": where.credentials}
        if where.is_anonymous:
            identity = {"skip_signature": True}
        if where.has_checksums:
            # The server checks what arrives against it.
            identity["checksum_algorithm"] = "CRC64NVME"
        is_plain = where.endpoint.startswith("http://")
        return S3Store(
            where.bucket,
            endpoint=where.endpoint,
            region=where.region,
            virtual_hosted_style_request=False,
            # Signing the body costs more than half of the CPU time; TLS makes it needless.
            unsigned_payload=not is_plain,
            client_options={
                "allow_http": is_plain,
                "connect_timeout": timedelta(seconds=self._timeout_s),
                "read_timeout": timedelta(seconds=self._timeout_s),
                **client,
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            **identity,
        )

    def get_whole(self, path: str) -> tuple[bytes, str]:
        """Return an object and its entity tag."""
        with _python_errors():
            answer = obstore.get(self._get_store, path)
            return bytes(answer.bytes()), answer.meta["e_tag"] or ""

    def get(self, path: str, start: int, end: int | None) -> memoryview:
        """Return a range of an object, or its last bytes for a negative `start`."""
        with suppress(_PastTheEnd), _python_errors():
            if start < 0:
                options = {"range": {"suffix": -start}}
                return memoryview(obstore.get(self._get_store, path, options=options).bytes())
            return memoryview(obstore.get_range(self._get_store, path, start=start, end=end))
        return memoryview(b"")

    def put_new(self, path: str, views: Sequence[memoryview]) -> None:
        """Put an object with `If-None-Match`."""
        seconds = self._timeout_s + sum(map(len, views)) / _SLOWEST_BYTES_PER_S
        size_class = int(seconds / self._timeout_s).bit_length()
        if size_class not in self._put_stores:
            limit = timedelta(seconds=self._timeout_s * (1 << (size_class - 1)))
            # While a body goes out nothing is read, so the total is what is limited.
            self._put_stores[size_class] = self._open({"timeout": limit, "read_timeout": limit})
        with _python_errors():
            obstore.put(self._put_stores[size_class], path, iter(views), mode="create")

    def size(self, path: str) -> int:
        """Return an object's size in bytes."""
        with _python_errors():
            return obstore.head(self._get_store, path)["size"]

    def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder."""
        with _python_errors():
            batches = obstore.list(self._get_store, prefix)
            return [entry["path"] for batch in batches for entry in batch]


@contextmanager
def _python_errors() -> Iterator[None]:
    try:
        yield
    except (AlreadyExistsError, PreconditionError) as problem:
        raise FileExistsError(_first_line(problem)) from problem
    except (PermissionDeniedError, UnauthenticatedError) as problem:
        raise PermissionError(_first_line(problem)) from problem
    except NotSupportedError as problem:
        raise CannotServe(_first_line(problem)) from problem
    except BaseError as problem:
        text = _first_line(problem)
        if "416 Range Not Satisfiable" in text:
            raise _PastTheEnd from problem
        if "NotPartial" in text or "not a partial" in text.lower():
            raise CannotServe(text) from problem
        raise ConnectionError(text) from problem


def _first_line(problem: Exception) -> str:
    # The body of the answer follows.
    return str(problem).partition("\n")[0].partition(": <?xml")[0]
