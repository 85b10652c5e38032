"""Objects on S3: s3fs always, obstore for the bytes when it is installed.

A new object is one conditional PUT or, above a size, a multipart upload whose completion is
conditional, so that what has to be repeated after a failure stays small. botocore and s3fs both
retry on their own and multiply; both are set to a single try, and common/object_blobs.py repeats.
"""

import hashlib
import importlib.util
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import aiohttp
import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.session import Session
from crc32c import crc32c
from fsspec.asyn import sync

from dflash_offline.common.blobs import UPLOAD_AGE_S
from dflash_offline.common.errors import BadInput
from dflash_offline.common.object_blobs import TIMEOUT_S, ObjectBlobs

if TYPE_CHECKING:
    from dflash_offline.common.obstore_bytes import ObstoreBytes

CLIENTS = ("obstore", "s3fs")
# s3fs copies a body once, so it gets smaller ones; obstore sends the caller's memory as it is.
SINGLE_PUT_BYTES = {"obstore": 1 << 30, "s3fs": 64 << 20}
PART_BYTES = 32 << 20
_PARTS_IN_FLIGHT = 4
_CONNECTIONS = 64
# Metadata is smaller, and shards have checksums of their own.
_MD5_BYTES = 64 << 20
_CONFLICTS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")


class S3Blobs(ObjectBlobs):
    """Objects under a prefix of a bucket."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        chosen = options.get("client", "")
        if chosen not in ("", *CLIENTS):
            raise BadInput(
                f"--storage-option client={chosen} is unknown; choose one of {', '.join(CLIENTS)}"
            )
        super().__init__(url, options)
        self._bucket, _, self._prefix = self._root.partition("/")
        if not self._bucket:
            raise BadInput(f"{url} names no bucket; give s3://BUCKET/PREFIX")
        self.client = chosen or ("obstore" if importlib.util.find_spec("obstore") else "s3fs")
        self.part_bytes = PART_BYTES
        self.single_put_bytes = SINGLE_PUT_BYTES[self.client]

    def _connect(self) -> s3fs.S3FileSystem:
        options = {k: v for k, v in self._options.items() if k not in ("client", "region")}
        client_kwargs = dict(options.pop("client_kwargs", {}))
        if "region" in self._options:
            client_kwargs["region_name"] = self._options["region"]
        config = {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "connect_timeout": TIMEOUT_S,
            "read_timeout": TIMEOUT_S,
            "max_pool_connections": _CONNECTIONS,
            # Our own checksums cover every byte; these would be computed in Python beside them.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **options.pop("config_kwargs", {}),
        }
        try:
            filesystem = s3fs.S3FileSystem(
                **options,
                client_kwargs=client_kwargs,
                config_kwargs=config,
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            filesystem.connect()
        except (BotoCoreError, ValueError, TypeError) as problem:
            raise BadInput(f"{self.url} cannot be opened: {problem}") from None
        filesystem.retries = 1
        return filesystem

    @cached_property
    def _obstore(self) -> "ObstoreBytes":
        from dflash_offline.common.obstore_bytes import ObstoreBytes, S3Address

        client = self._filesystem.s3
        address = S3Address(
            bucket=self._bucket,
            endpoint=client.meta.endpoint_url,
            region=client.meta.region_name or "us-east-1",
            is_anonymous=self._filesystem.anon,
            credentials=self._credentials,
        )
        return ObstoreBytes(address, timeout_s=TIMEOUT_S)

    def _credentials(self) -> dict[str, Any]:
        """Return what botocore finds, given options first, in obstore's words."""
        given = self._options
        if "key" in given:
            access, secret, token = given["key"], given.get("secret"), given.get("token")
        else:
            found = Session(profile=given.get("profile")).get_credentials()
            if found is None:
                raise PermissionError("no credentials found")
            frozen = found.get_frozen_credentials()
            access, secret, token = frozen.access_key, frozen.secret_key, frozen.token
        return {
            "access_key_id": access,
            "secret_access_key": secret,
            "token": token,
            # Asked for again every few minutes: botocore renews its own.
            "expires_at": datetime.fromtimestamp(datetime.now(UTC).timestamp() + 300, UTC),
        }

    def read(self, key: str) -> bytes:
        """Return a whole object, asked for again when it does not match the server's MD5."""
        for _ in range(self.rereads):
            content, tag = self._persist(lambda: self._get_whole(key), "reading", key)
            if _may_match(content, tag):
                return content
        # With some encryptions the tag is no MD5; the store's own checksums decide then.
        return self._persist(lambda: self._get_whole(key), "reading", key)[0]

    def create(self, key: str, parts: Iterable[memoryview | bytes]) -> int:
        views = (memoryview(part).cast("B") for part in parts)
        first: list[memoryview] = []
        size = 0
        for view in views:
            first.append(view)
            size += len(view)
            if size > self.single_put_bytes:
                return self._create_in_parts(key, itertools.chain(first, views))
        return self._create_at_once(key, first)

    def _create_in_parts(self, key: str, views: Iterator[memoryview]) -> int:
        """Upload in parts; only the completion is conditional, and only it makes the object."""
        if not self._is_conditional and self._exists(key):
            raise FileExistsError(key)
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        upload = self._persist(
            lambda: self._call("create_multipart_upload", **target), "writing", key
        )
        target["UploadId"] = upload["UploadId"]
        try:
            tags, size, crc = self._upload_parts(key, target, views)
            self._complete(key, target, tags, size, crc)
        except BaseException:
            self._abort(target)
            raise
        return size

    def _upload_parts(
        self, key: str, target: Mapping[str, str], views: Iterator[memoryview]
    ) -> tuple[list[dict[str, Any]], int, int]:
        """Return the parts' tags, the size in bytes and the CRC-32C of the whole."""

        def send(number: int, body: bytes) -> dict[str, Any]:
            answer = self._persist(
                lambda: self._call("upload_part", PartNumber=number, Body=body, **target),
                f"writing part {number} of",
                key,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        tags, size, crc = [], 0, 0
        in_flight: deque[Future[dict[str, Any]]] = deque()
        with ThreadPoolExecutor(_PARTS_IN_FLIGHT) as pool:
            for number, body in enumerate(_regrouped(views, self.part_bytes), 1):
                size, crc = size + len(body), crc32c(body, crc)
                if len(in_flight) >= _PARTS_IN_FLIGHT:
                    tags.append(in_flight.popleft().result())
                in_flight.append(pool.submit(send, number, body))
            tags += [future.result() for future in in_flight]
        return tags, size, crc

    def _complete(
        self,
        key: str,
        target: Mapping[str, str],
        tags: list[dict[str, Any]],
        size: int,
        crc: int,
    ) -> None:
        def complete() -> None:
            self._call(
                "complete_multipart_upload",
                MultipartUpload={"Parts": tags},
                IfNoneMatch="*",
                **target,
            )

        try:
            self._persist(complete, "completing", key)
        except (FileExistsError, FileNotFoundError):
            # After a lost answer the object is there and the upload gone by our own doing.
            if not self._has_content(key, size, crc):
                raise

    def _abort(self, target: Mapping[str, str]) -> None:
        try:
            self._call("abort_multipart_upload", **target)
        except self._transient():
            # `drop_stale_uploads` finds it later.
            pass

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        condition = {}
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        if expected is not None:
            if self.read(key) != expected:
                raise FileExistsError(key)
            tag = self._persist(lambda: self._call("head_object", **target), "looking up", key)
            condition = {"IfMatch": tag["ETag"]} if self._is_conditional else {}
        try:
            self._persist(
                lambda: self._call("put_object", Body=content, **target, **condition),
                "writing",
                key,
            )
        except FileExistsError:
            # After a lost answer the new content itself fails the condition.
            if self.read(key) != content:
                raise

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        found, marker = [], {}
        while True:
            page = self._persist(
                lambda marker=marker: self._call(
                    "list_multipart_uploads",
                    Bucket=self._bucket,
                    Prefix=self._full(""),
                    **marker,
                ),
                "listing uploads",
                "",
            )
            found += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                break
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }
        dropped = []
        for upload in found:
            age_s = (datetime.now(UTC) - upload["Initiated"]).total_seconds()
            # Checked here too: not every server keeps to the prefix.
            if upload["Key"].startswith(self._full("")) and age_s >= older_than_s:
                target = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._abort({"Bucket": self._bucket, **target})
                dropped.append(upload["Key"][len(self._full("")) :])
        return dropped

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _get_whole(self, key: str) -> tuple[bytes, str]:
        """Return an object with its entity tag."""
        if self.client == "obstore":
            return self._obstore.get_whole(self._full(key))
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        try:
            return sync(self._filesystem.loop, _fetch, self._filesystem, target)
        except (OSError, BotoCoreError) as problem:
            raise self._translated(problem) from problem

    def _get(self, key: str, start: int | None, end: int | None) -> bytes | memoryview:
        assert start is not None, "whole objects are read with their tag"
        if self.client == "obstore":
            from dflash_offline.common.obstore_bytes import CannotServe

            try:
                return self._obstore.get(self._full(key), start, end)
            except CannotServe:
                self.client = "s3fs"
        try:
            return self._filesystem.cat_file(
                self._path(key), start=start, end=end, max_concurrency=1
            )
        except (OSError, BotoCoreError) as problem:
            if _code(problem) in ("InvalidRange", "416"):
                return b""
            raise self._translated(problem) from problem

    def _size(self, key: str) -> int:
        if self.client == "obstore":
            return self._obstore.size(self._full(key))
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        return self._call("head_object", **target)["ContentLength"]

    def _find(self, prefix: str) -> Iterable[str]:
        if self.client == "obstore":
            start = len(self._full(""))
            found = self._obstore.list(self._full(prefix).rstrip("/"))
            return [path[start:] for path in found]
        return super()._find(prefix)

    def _modified(self, key: str) -> float:
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        return self._call("head_object", **target)["LastModified"].timestamp()

    def _put_new(self, key: str, views: Sequence[memoryview]) -> None:
        try:
            if self.client == "obstore":
                self._obstore.put_new(self._full(key), views)
            else:
                target = {"Bucket": self._bucket, "Key": self._full(key)}
                self._call("put_object", Body=b"".join(views), IfNoneMatch="*", **target)
        except FileExistsError:
            # Also the answer while another conditional write of the key is under way.
            if not self._exists(key):
                raise ConnectionError("another write of the same object is under way") from None
            raise

    def _overwrite(self, key: str, content: bytes) -> None:
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        self._call("put_object", Body=content, **target)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._filesystem.call_s3(method, **arguments)
        except (OSError, BotoCoreError) as problem:
            raise self._translated(problem) from problem

    def _translated(self, problem: Exception) -> Exception:
        """Return what s3fs's exception means here."""
        if isinstance(problem, NoCredentialsError | PartialCredentialsError):
            return PermissionError(str(problem))
        code = _code(problem)
        if code == "NoSuchBucket":
            return BadInput(f"{self.url}: bucket {self._bucket} does not exist; create it first")
        if code in _CONFLICTS:
            return FileExistsError(str(problem))
        return problem

    def _transient(self) -> tuple[type[Exception], ...]:
        return (OSError, BotoCoreError, aiohttp.ClientError)


async def _fetch(filesystem: s3fs.S3FileSystem, target: Mapping[str, str]) -> tuple[bytes, str]:
    answer = await filesystem._call_s3("get_object", **target)
    try:
        return await answer["Body"].read(), answer.get("ETag", "")
    finally:
        answer["Body"].close()


def _may_match(content: bytes, tag: str) -> bool:
    """Return whether an entity tag allows this content; only single puts have an MD5 as theirs."""
    if len(content) > _MD5_BYTES or not re.fullmatch(r'"?[0-9a-f]{32}"?', tag):
        return True
    return hashlib.md5(content, usedforsecurity=False).hexdigest() == tag.strip('"')


def _code(problem: Exception) -> str:
    """Return the server's error code behind an exception of s3fs."""
    cause = problem.__cause__
    return cause.response["Error"].get("Code", "") if isinstance(cause, ClientError) else ""


def _regrouped(views: Iterator[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Cut a stream of views into parts of one size, the last one shorter."""
    pieces: list[memoryview] = []
    size = 0
    for view in views:
        while len(view):
            piece = view[: part_bytes - size]
            pieces.append(piece)
            size += len(piece)
            view = view[len(piece) :]
            if size == part_bytes:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)
