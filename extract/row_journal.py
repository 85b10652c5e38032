"""What rows became, kept on local disk until the plan is written, so that a kill does not cost it.

Results are kept in order, in segments: files that are written whole or not at all, numbered, each
with a digest of itself. A later run reads them back instead of converting these rows again, and
hands them to the same code, so that counts, repeated ids and the plan come out as in a run that was
never interrupted.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.errors import BadInput, DamagedStore, Stopped
from dflash_offline.common.lease import LocalLock
from dflash_offline.common.records import seal, sha256, unseal
from dflash_offline.extract.token_rows import Skipped, TokenRow

# A segment ends with whichever comes first; a second or two of eight cores' work.
_SEGMENT_ROWS, _SEGMENT_TOKENS = 4096, 1 << 20
_CODEC = pa.Codec("zstd", 1)

Result = TokenRow | Skipped


class RowJournal:
    """Results of one corpus for one store.

    Attributes:
        num_known: results that `known` has yielded.
    """

    def __init__(self, folder: Path | None) -> None:
        """Touch nothing yet.

        Args:
            folder: named by everything that decides the results, in a folder named by the store.
                What else lies in there belongs to other options or other data, and goes. None
                keeps nothing.
        """
        self._folder = folder
        self._is_open = False
        self.num_known = 0
        self._num_segments = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read and write here alone; a live run that has the same folder keeps it to itself."""
        with self._alone() as problem:
            self._is_open = problem is None
            if problem:
                self._warn(problem)
            try:
                yield
            finally:
                self._is_open = False

    def known(self) -> Iterator[Result]:
        """Yield what earlier runs have kept, from the first row on, up to anything damaged."""
        if not self._is_open or self._folder is None:
            return
        for other in self._folder.parent.iterdir():
            if other.is_dir() and other != self._folder:
                shutil.rmtree(other)
        self._folder.mkdir(exist_ok=True)
        while (results := self._read(self._num_segments)) is not None:
            self._num_segments += 1
            self.num_known += len(results)
            yield from results
        kept = {_name(number) for number in range(self._num_segments)}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def keep(self, results: Iterable[Result]) -> Iterator[Result]:
        """Hand results on that follow the known ones, and keep them."""
        waiting: list[Result] = []
        num_tokens = 0
        for each in results:
            waiting.append(each)
            num_tokens += 0 if isinstance(each, Skipped) else len(each.tokens)
            if len(waiting) >= _SEGMENT_ROWS or num_tokens >= _SEGMENT_TOKENS:
                self._write(waiting)
                waiting, num_tokens = [], 0
            yield each
        if waiting:
            self._write(waiting)

    def drop(self) -> None:
        """Remove everything that is kept for the store."""
        with self._alone() as problem:
            if problem is None and self._folder is not None:
                shutil.rmtree(self._folder.parent, ignore_errors=True)

    def describe(self) -> str:
        """Return how much is known and where, for people."""
        return f"{self.num_known:,} rows were tokenised by an earlier run ({self._folder})"

    @contextmanager
    def _alone(self) -> Iterator[str | None]:
        """Yield why the folder cannot be used; None where it is this run's."""
        if self._folder is None:
            yield ""
            return
        lock, problem = LocalLock(self._folder.parent), None
        try:
            lock.acquire("planning")
        except BadInput:
            problem = "another live run uses it"
        except (Stopped, OSError) as reason:
            problem = str(reason)
        try:
            yield problem
        finally:
            lock.release()

    def _warn(self, problem: str) -> None:
        click.echo(
            f"warning: tokens are not kept in {self._folder} ({problem}), so planning starts over "
            "if it is interrupted; XDG_CACHE_HOME names another place",
            err=True,
        )

    def _write(self, results: list[Result]) -> None:
        if not self._is_open or self._folder is None:
            return
        content = _packed(results, key=self._folder.name, number=self._num_segments)
        try:
            LocalBlobs(self._folder).create(_name(self._num_segments), content)
        except (Stopped, OSError) as problem:
            # The room is needed elsewhere.
            self._warn(str(problem))
            self._is_open = False
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        self._num_segments += 1

    def _read(self, number: int) -> list[Result] | None:
        """Return a segment's results; None where it is missing or not what was written."""
        assert self._folder is not None
        path = self._folder / _name(number)
        try:
            return _unpacked(path.read_bytes(), key=self._folder.name, number=number)
        except (FileNotFoundError, DamagedStore):
            return None


def _name(number: int) -> str:
    return f"{number:08d}"


def _packed(results: list[Result], *, key: str, number: int) -> list[bytes]:
    """Return a segment: a sealed line that describes every row, then all tokens and all masks."""
    kept = [each for each in results if isinstance(each, TokenRow)]
    arrays = [each.tokens.tobytes() for each in kept] + [each.mask.tobytes() for each in kept]
    # Level 1 takes a hundredth of the time that tokenising does, and half of the room.
    body = _CODEC.compress(b"".join(arrays), asbytes=True)
    head = {"key": key, "number": number, "rows": list(map(_as_list, results))}
    return [seal({**head, "arrays": sha256(body)}), body]


def _unpacked(content: bytes, *, key: str, number: int) -> list[Result]:
    head, _, body = content.partition(b"\n")
    data = unseal(head + b"\n", "a segment")
    if (data["key"], data["number"], data["arrays"]) != (key, number, sha256(body)):
        raise DamagedStore("a segment is not what was written, or lies in another's place")
    lengths = [row[-1] for row in data["rows"] if len(row) > 2]
    num_tokens = sum(lengths)
    plain = _CODEC.decompress(body, num_tokens * 5, asbytes=True)
    tokens = np.frombuffer(plain, np.int32, num_tokens)
    masks = np.frombuffer(plain, np.uint8, num_tokens, offset=4 * num_tokens)
    results: list[Result] = []
    at = 0
    for row in data["rows"]:
        if len(row) == 2:
            results.append(Skipped(reason=row[0], example=row[1]))
            continue
        name, source, licence, conversation, is_truncated, length = row
        place = slice(at, at + length)
        at += length
        results.append(
            TokenRow(
                id=name,
                source=source,
                licence=licence,
                conversation=conversation,
                tokens=tokens[place],
                mask=masks[place],
                is_truncated=is_truncated,
            )
        )
    return results


def _as_list(result: Result) -> list[Any]:
    if isinstance(result, Skipped):
        return [result.reason, result.example]
    texts = [result.id, result.source, result.licence, result.conversation]
    return [*texts, result.is_truncated, len(result.tokens)]


def fingerprint(facts: Any) -> str:
    """Return what tells plain JSON data apart, 16 hexadecimal digits."""
    return sha256(json.dumps(facts, sort_keys=True).encode())[:16]
