"""A new object on S3 in parts: only the completion is conditional, and only it makes the object.

Each part carries its CRC-32C, which the server checks, and is repeated alone when it fails. A run
that dies leaves parts that nobody sees but that cost storage; `stale_uploads` finds them.
"""

import base64
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from zlib import crc32

from crc32c import crc32c

_PARTS_IN_FLIGHT = 4

Call = Callable[..., dict[str, Any]]


@dataclass(kw_only=True)
class MultipartUpload:
    """One upload.

    Args:
        call: makes an S3 request by the name of its operation, and repeats it while that helps.
        bucket, key: full name of the object.
        part_bytes: size of every part but the last.
        has_checksums: send checksums for the server to check.
    """

    call: Call
    bucket: str
    key: str
    part_bytes: int
    has_checksums: bool
    size: int = 0
    digest: int = 0  # zlib's CRC-32 of what was sent, to recognise it
    _target: dict[str, str] = field(default_factory=dict)
    _parts: list[dict[str, Any]] = field(default_factory=list)

    def send(self, views: Iterator[memoryview]) -> None:
        """Start the upload and send every part; aborts it when that fails."""
        where = {"Bucket": self.bucket, "Key": self.key}
        kind = {"ChecksumAlgorithm": "CRC32C"} if self.has_checksums else {}
        upload = self.call("create_multipart_upload", **where, **kind)
        self._target = {**where, "UploadId": upload["UploadId"]}
        in_flight: deque[Future[dict[str, Any]]] = deque()
        with ThreadPoolExecutor(_PARTS_IN_FLIGHT) as pool:
            for number, body in enumerate(_regrouped(views, self.part_bytes), 1):
                self.size, self.digest = self.size + len(body), crc32(body, self.digest)
                if len(in_flight) >= _PARTS_IN_FLIGHT:
                    self._parts.append(in_flight.popleft().result())
                in_flight.append(pool.submit(self._send_part, number, body))
            self._parts += [future.result() for future in in_flight]

    def _send_part(self, number: int, body: bytes) -> dict[str, Any]:
        checked = {"ChecksumCRC32C": checksum_header(body)} if self.has_checksums else {}
        answer = self.call("upload_part", PartNumber=number, Body=body, **checked, **self._target)
        return {"PartNumber": number, "ETag": answer["ETag"], **checked}

    def complete(self) -> None:
        """Make the object; raises `FileExistsError`, or `FileNotFoundError` when it is done."""
        self.call(
            "complete_multipart_upload",
            MultipartUpload={"Parts": self._parts},
            IfNoneMatch="*",
            **self._target,
        )

    def abort(self) -> None:
        """Give the parts up."""
        if self._target:
            self.call("abort_multipart_upload", **self._target)


def stale_uploads(call: Call, *, bucket: str, prefix: str, older_than_s: float) -> list[dict]:
    """Return the unfinished uploads under a prefix that began longer ago than an age."""
    found: list[dict[str, Any]] = []
    marker: dict[str, str] = {}
    while True:
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        found += page.get("Uploads", [])
        if not page.get("IsTruncated"):
            break
        marker = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }
    now = datetime.now(UTC)
    # The prefix is checked here too: not every server keeps to it.
    return [
        {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        for upload in found
        if upload["Key"].startswith(prefix)
        and (now - upload["Initiated"]).total_seconds() >= older_than_s
    ]


def checksum_header(body: bytes) -> str:
    """Return the CRC-32C of a body as S3 writes it."""
    return base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()


def _regrouped(views: Iterator[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Cut a stream of views into parts of one size, the last one shorter."""
    pieces: list[memoryview] = []
    size = 0
    for view in views:
        rest = view
        while len(rest):
            piece = rest[: part_bytes - size]
            pieces.append(piece)
            size += len(piece)
            rest = rest[len(piece) :]
            if size == part_bytes:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)
