"""Objects on S3: s3fs always, obstore for the bytes when it is installed.

A new object is one conditional PUT or, above a size, a multipart upload whose completion is
conditional, so that what has to be repeated after a failure stays small. botocore and s3fs both
retry on their own and multiply; both are set to a single try, and common/object_blobs.py repeats.
"""

import hashlib
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
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
from fsspec.asyn import sync

from dflash_offline.common.blobs import UPLOAD_AGE_S
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.object_blobs import TIMEOUT_S, ObjectBlobs
from dflash_offline.common.s3_multipart import MultipartUpload, checksum_header, stale_uploads

if TYPE_CHECKING:
    from dflash_offline.common.obstore_bytes import ObstoreBytes

CLIENTS = ("obstore", "s3fs")
_OWN_OPTIONS = ("client", "region", "checksums")
# s3fs copies a body once, so it gets smaller ones; obstore sends the caller's memory as it is.
SINGLE_PUT_BYTES = {"obstore": 1 << 30, "s3fs": 64 << 20}
PART_BYTES = 32 << 20
_CONNECTIONS = 64
# Metadata is smaller, and shards have checksums of their own.
_MD5_BYTES = 64 << 20
# What a body that was damaged or cut on its way is answered with.
_GARBLED = (
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)
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
        # Clients do not agree on what these mean.
        if self._prefix and {"", ".", ".."} & set(self._prefix.split("/")):
            raise BadInput(f"{self.url} has an empty part or one of dots; give s3://BUCKET/PREFIX")
        if "\\" in self._prefix:
            raise BadInput(f"{self.url} has a backslash; write / instead")
        self.client = chosen or ("obstore" if importlib.util.find_spec("obstore") else "s3fs")
        self.part_bytes = PART_BYTES
        self.single_put_bytes = SINGLE_PUT_BYTES[self.client]
        self._has_checksums = bool(options.get("checksums", True))

    def _connect(self) -> s3fs.S3FileSystem:
        options = {k: v for k, v in self._options.items() if k not in _OWN_OPTIONS}
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
            has_checksums=self._has_checksums,
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
        if not self._is_conditional and self._exists(key):
            raise FileExistsError(key)
        upload = MultipartUpload(
            call=partial(self._persistent_call, "writing", key),
            bucket=self._bucket,
            key=self._full(key),
            part_bytes=self.part_bytes,
            has_checksums=self._has_checksums,
        )
        try:
            upload.send(views)
            upload.complete()
        except (FileExistsError, FileNotFoundError):
            # After a lost answer the object is there and the upload gone by our own doing.
            if not self._has_content(key, upload.size, upload.digest):
                self._give_up(upload.abort)
                raise
        except BaseException:
            self._give_up(upload.abort)
            raise
        return upload.size

    def _give_up(self, abort: Callable[[], None]) -> None:
        # `drop_stale_uploads` finds later what this does not reach.
        with suppress(Stopped, BadInput, FileNotFoundError):
            abort()

    def replace(self, key: str, content: bytes, *, expected: bytes | None = None) -> None:
        condition = {}
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        if expected is not None:
            if self.read(key) != expected:
                raise FileExistsError(key)
            tag = self._persist(lambda: self._call("head_object", **target), "looking up", key)
            condition = {"IfMatch": tag["ETag"]} if self._is_conditional else {}
        try:
            self._persist(lambda: self._overwrite(key, content, **condition), "writing", key)
        except FileExistsError:
            # After a lost answer the new content itself fails the condition.
            if self.read(key) != content:
                raise

    def drop_stale_uploads(self, older_than_s: float = UPLOAD_AGE_S) -> Sequence[str]:
        prefix = self._full("")
        if not prefix:
            # A store at the root of a bucket cannot tell its uploads from a stranger's.
            return []
        call = partial(self._persistent_call, "listing uploads of", "the store")
        found = stale_uploads(call, bucket=self._bucket, prefix=prefix, older_than_s=older_than_s)
        for upload in found:
            self._give_up(partial(call, "abort_multipart_upload", **upload))
        return [upload["Key"][len(prefix) :] for upload in found]

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
                body = b"".join(views)
                checked = {"ChecksumCRC32C": checksum_header(body)} if self._has_checksums else {}
                self._call("put_object", Body=body, IfNoneMatch="*", **checked, **target)
        except FileExistsError:
            # Also the answer while another conditional write of the key is under way.
            if not self._exists(key):
                raise ConnectionError("another write of the same object is under way") from None
            raise
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _overwrite(self, key: str, content: bytes, **condition: str) -> None:
        target = {"Bucket": self._bucket, "Key": self._full(key)}
        checked = {"ChecksumCRC32C": checksum_header(content)} if self._has_checksums else {}
        self._call("put_object", Body=content, **checked, **target, **condition)

    def _persistent_call(self, doing: str, key: str, method: str, **arguments: Any) -> Any:
        return self._persist(lambda: self._call(method, **arguments), doing, key)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._filesystem.call_s3(method, **arguments)
        except (OSError, BotoCoreError) as problem:
            raise self._translated(problem) from problem

    def _no_bucket(self) -> BadInput:
        return BadInput(f"{self.url}: bucket {self._bucket} does not exist; create it first")

    def _translated(self, problem: Exception) -> Exception:
        """Return what s3fs's exception means here."""
        if isinstance(problem, NoCredentialsError | PartialCredentialsError):
            return PermissionError(str(problem))
        code = _code(problem)
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code in _CONFLICTS:
            return FileExistsError(str(problem))
        if _is_refusal(problem):
            return Stopped(
                f"{self.url}: the server refuses a request ({code}: {problem}); servers that know "
                "no checksums need --storage-option checksums=false; what is committed is safe"
            )
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


def _is_refusal(problem: Exception) -> bool:
    """Return whether the server will answer the same again: most of the 400s."""
    cause = problem.__cause__
    if not isinstance(cause, ClientError) or isinstance(
        problem, FileNotFoundError | PermissionError
    ):
        return False
    status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    return 400 <= status < 500 and status not in (408, 429) and _code(problem) not in _GARBLED


def _code(problem: Exception) -> str:
    """Return the server's error code behind an exception of s3fs."""
    cause = problem.__cause__
    return cause.response["Error"].get("Code", "") if isinstance(cause, ClientError) else ""
