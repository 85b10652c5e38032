"""Local files past the page cache: durable writes and reads into the caller's memory.

Direct I/O takes a fifth of the CPU time and keeps a store that is larger than memory from pushing
everything else out of it. It needs aligned memory, offsets and lengths and a file system that
offers it; wherever one of these is missing the same call goes through the page cache.
"""

import contextlib
import errno
import fcntl
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

ALIGN_BYTES = 4096
# Records and metadata: one buffered write is as good, and needs neither threads nor staging.
_SMALL_BYTES = 1 << 20
_JOB_BYTES = 8 << 20
_JOBS_IN_FLIGHT = 2
_SEEN_BYTES = 256 << 10
# Linux only: the advice is missing from the module elsewhere.
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_BYTES = 4 << 20
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

Seen = Callable[[memoryview], object]


class _Scratch(threading.local):
    buffer = memoryview(b"")


_scratch = _Scratch()


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return page-aligned memory, zeroed, of at least one page."""
    size = _round_up(max(1, num_bytes))
    if not _HUGE_PAGES or size < _HUGE_BYTES:
        return memoryview(mmap.mmap(-1, size))
    # First touched in pages of 2 MiB, it costs a third of the CPU time.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        # A kernel may be built without them.
        memory.madvise(_HUGE_PAGES)
    return memoryview(memory)


def empty_aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array to be filled; page-aligned when it is large enough for direct I/O to pay."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _SMALL_BYTES:
        return np.empty(shape, dtype)
    return np.frombuffer(aligned_buffer(num_bytes)[:num_bytes], dtype).reshape(shape)


def scratch_buffer(num_bytes: int) -> memoryview:
    """Return aligned memory of this thread, valid until the thread asks again."""
    if len(_scratch.buffer) < num_bytes:
        _scratch.buffer = aligned_buffer(num_bytes)
    return _scratch.buffer[:num_bytes]


def read_into(
    path: Path,
    offset: int,
    buffers: Sequence[memoryview],
    *,
    direct: bool,
    seen: Seen | None = None,
) -> int:
    """Fill buffers one after another from `offset`; returns the bytes read, fewer at the end.

    Args:
        direct: skip the page cache where every buffer but the end of the last one is aligned.
        seen: called with the pieces of the first buffer, in order, once they are filled. From the
            page cache they come while they are in the core's own cache, which makes checksums of
            them a tenth cheaper.
    """
    if direct and offset % ALIGN_BYTES == 0 and all(_is_aligned(b) for b in buffers[:-1]):
        done = _read_direct(path, offset, buffers)
        if done is not None:
            if seen is not None:
                seen(buffers[0])
            return done
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if seen is None:
            return _read_fully(descriptor, offset, buffers)
        first, done = buffers[0], 0
        for start in range(0, len(first), _SEEN_BYTES):
            piece = first[start : start + _SEEN_BYTES]
            count = os.preadv(descriptor, (piece,), offset + start)
            if count < len(piece):
                count += _read_fully(descriptor, offset + start + count, [piece[count:]])
            seen(piece[:count])
            done += count
            if count < len(piece):
                return done
        return done + _read_fully(descriptor, offset + done, buffers[1:])
    finally:
        os.close(descriptor)


def copy_into(
    content: memoryview, offset: int, *buffers: memoryview, seen: Seen | None = None
) -> int:
    """Fill buffers as `read_into` does, from bytes in memory."""
    done = 0
    for buffer in buffers:
        piece = content[offset + done :][: len(buffer)]
        buffer[: len(piece)] = piece
        done += len(piece)
    if seen is not None:
        seen(buffers[0][:done])
    return done


def _read_direct(path: Path, offset: int, buffers: Sequence[memoryview]) -> int | None:
    """Read with O_DIRECT, or return `None` where that cannot give every byte."""
    *head, last = buffers
    whole = len(last) // ALIGN_BYTES * ALIGN_BYTES if _address(last) % ALIGN_BYTES == 0 else 0
    rest = len(last) - whole
    bounce = aligned_buffer(rest)
    pieces = [*head, last[:whole], bounce]
    wanted = sum(map(len, buffers))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as problem:
        if problem.errno in _NO_DIRECT:
            return None
        raise
    try:
        if os.preadv(descriptor, [p for p in pieces if len(p)], offset) < wanted:
            return None
    except OSError as problem:
        if problem.errno in _NO_DIRECT:
            return None
        raise
    finally:
        os.close(descriptor)
    last[whole:] = bounce[:rest]
    return wanted


def _read_fully(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    done = 0
    left = [b for b in buffers if len(b)]
    # One preadv returns at most 2 GiB.
    while left and (count := os.preadv(descriptor, left, offset + done)):
        done += count
        left = _after(left, count)
    return done


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers behind their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(buffer[count:])
        count = max(0, count - len(buffer))
    return rest


def write_durably(path: Path, parts: Iterable[memoryview | bytes]) -> int:
    """Write a new file and fsync it; returns its size in bytes.

    Raises:
        FileExistsError: there is such a file.
    """
    views = (memoryview(part).cast("B") for part in parts)
    first, size = [], 0
    for view in views:
        first.append(view)
        size += len(view)
        if size >= _SMALL_BYTES:
            break
    is_small = size < _SMALL_BYTES
    descriptor = _create(path, direct=not is_small)
    try:
        if is_small:
            _write_at(descriptor, first, 0)
        else:
            size = _DirectWriter(descriptor).write(itertools.chain(first, views))
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def _create(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as problem:
            if problem.errno not in _NO_DIRECT:
                raise
            # The file may be there: some file systems create it before they refuse.
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o644)


class _DirectWriter:
    """Gather parts into aligned jobs and keep a few of them in flight.

    Aligned memory of the caller is written from where it is; the rest goes through a staging
    buffer. While the disk works, the caller's iterator computes the next parts.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: list[memoryview] = []
        self._job_bytes = 0
        self._offset = 0
        self._in_flight: list[Future[None]] = []
        self._staging = itertools.cycle(
            [aligned_buffer(_JOB_BYTES) for _ in range(_JOBS_IN_FLIGHT + 1)]
        )
        self._stage = next(self._staging)
        self._staged = 0  # bytes of the stage in use, jobs of the past included
        self._piece_start = 0  # where the staged bytes that have no piece yet begin

    def write(self, views: Iterator[memoryview]) -> int:
        num_bytes = 0
        with ThreadPoolExecutor(_JOBS_IN_FLIGHT) as disk:
            for view in views:
                num_bytes += len(view)
                self._add(view, disk)
            padding = -(self._staged - self._piece_start) % ALIGN_BYTES
            self._stage[self._staged : self._staged + padding] = bytes(padding)
            self._staged += padding
            self._submit(disk)
            for future in self._in_flight:
                future.result()
        return num_bytes

    def _add(self, view: memoryview, disk: ThreadPoolExecutor) -> None:
        while len(view):
            staged_whole = (self._staged - self._piece_start) % ALIGN_BYTES == 0
            straight = len(view) // ALIGN_BYTES * ALIGN_BYTES
            if staged_whole and straight and _address(view) % ALIGN_BYTES == 0:
                self._close_piece()
                self._take(view[:straight])
                view = view[straight:]
            else:
                count = min(len(view), len(self._stage) - self._staged)
                self._stage[self._staged : self._staged + count] = view[:count]
                self._staged += count
                view = view[count:]
            if self._staged == len(self._stage) or self._job_bytes >= _JOB_BYTES:
                self._submit_whole_blocks(disk)

    def _take(self, piece: memoryview) -> None:
        self._pieces.append(piece)
        self._job_bytes += len(piece)

    def _close_piece(self) -> None:
        if self._staged > self._piece_start:
            self._take(self._stage[self._piece_start : self._staged])
        self._piece_start = self._staged

    def _submit_whole_blocks(self, disk: ThreadPoolExecutor) -> None:
        """Submit all but the bytes that do not fill a block yet; those open the next stage."""
        partial = (self._staged - self._piece_start) % ALIGN_BYTES
        carried = bytes(self._stage[self._staged - partial : self._staged])
        self._staged -= partial
        self._submit(disk)
        self._stage[:partial] = carried
        self._staged = partial

    def _submit(self, disk: ThreadPoolExecutor) -> None:
        self._close_piece()
        while len(self._in_flight) >= _JOBS_IN_FLIGHT:
            self._in_flight.pop(0).result()
        self._in_flight.append(disk.submit(_write_at, self._descriptor, self._pieces, self._offset))
        self._offset += self._job_bytes
        self._pieces, self._job_bytes = [], 0
        self._stage = next(self._staging)
        self._staged = self._piece_start = 0


def _write_at(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        try:
            # At most 1024 pieces a call, and 2 GiB.
            count = os.pwritev(descriptor, pieces[:512], offset)
        except OSError as problem:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if problem.errno not in _NO_DIRECT or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        offset += count
        pieces = _after(pieces, count)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data if len(buffer) else 0


def _is_aligned(buffer: memoryview) -> bool:
    return len(buffer) % ALIGN_BYTES == 0 and _address(buffer) % ALIGN_BYTES == 0
