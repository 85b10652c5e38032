"""The kept rows of a corpus: tokens and masks in a file, everything else in columns.

A corpus does not fit in memory as Python objects; in a file, the system keeps of it what it likes.
Letter: T tokens.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

# Rows whose columns wait as Python objects.
_ROWS_AT_ONCE = 4096
_COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("licence", pa.string()),
        ("conversation", pa.string()),
        ("length", pa.int64()),
        ("is_truncated", pa.bool_()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row of the corpus, ready to be planned.

    Attributes:
        tokens: int32 [T].
        mask: uint8 [T] of `LossMask` bits.
        conversation: digest of the first user turn; rows that share it are held out together.
        is_truncated: whether tokens beyond the length limit were cut.
    """

    id: str
    source: str
    licence: str
    conversation: str
    tokens: np.ndarray
    mask: np.ndarray
    is_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that does not become a sample, and why."""

    reason: str
    example: str


def digest(content: bytes) -> str:
    """Return what tells contents apart, 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


class TokenRows(Sequence[TokenRow]):
    """Rows in the order in which they were read; a `TokenRow` is made when it is asked for.

    Attributes:
        lengths: tokens of each row, int64 [rows].
    """

    def __init__(self, table: pa.Table, tokens: np.ndarray, masks: np.ndarray) -> None:
        self._table = table
        self._tokens, self._masks = tokens, masks
        self.lengths: np.ndarray = table["length"].to_numpy()
        self._starts = np.cumsum(self.lengths) - self.lengths

    @classmethod
    def of(cls, rows: Iterable[TokenRow]) -> "TokenRows":
        """Keep rows; there must be one."""
        with TokenRowsWriter() as writer:
            for row in rows:
                writer.append(row)
            return writer.finish()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        (fields,) = self._table.slice(index, 1).drop_columns(["length"]).to_pylist()
        return TokenRow(**fields, tokens=self.tokens_of(index), mask=self.mask_of(index))

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one of id, source, licence, conversation, is_truncated of every row."""
        return self._table[name]

    def tokens_of(self, index: int) -> np.ndarray:
        """Return a row's token ids, int32 [T], in the file."""
        return self._tokens[self._starts[index] :][: self.lengths[index]]

    def mask_of(self, index: int) -> np.ndarray:
        """Return a row's loss mask, uint8 [T], in the file: what is written there stays."""
        return self._masks[self._starts[index] :][: self.lengths[index]]


class TokenRowsWriter:
    """Take rows one by one, in bounded memory. Use as a context manager.

    The two files are in the system's folder for temporary ones and have no name there, so nothing
    is left of them however the process ends.
    """

    def __init__(self) -> None:
        # Closed by `__exit__`.
        self._tokens = tempfile.TemporaryFile()  # noqa: SIM115
        self._masks = tempfile.TemporaryFile()  # noqa: SIM115
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS.names}
        self._batches: list[pa.RecordBatch] = []

    def __enter__(self) -> "TokenRowsWriter":
        return self

    def __exit__(self, *_exception: object) -> None:
        # Mapped files stay readable.
        self._tokens.close()
        self._masks.close()

    def append(self, row: TokenRow) -> None:
        """Keep a row."""
        self._tokens.write(row.tokens.data)
        self._masks.write(row.mask.data)
        values = (row.id, row.source, row.licence, row.conversation)
        for column, value in zip(
            self._columns.values(), (*values, len(row.tokens), row.is_truncated), strict=True
        ):
            column.append(value)
        if len(self._columns["id"]) == _ROWS_AT_ONCE:
            self._flush_columns()

    def finish(self) -> TokenRows:
        """Return what was appended, at least one row; repeated ids have a count."""
        self._flush_columns()
        table = pa.Table.from_batches(self._batches, schema=_COLUMNS)
        at = _COLUMNS.get_field_index("id")
        table = table.set_column(at, "id", _unique(table["id"]))
        return TokenRows(table, _mapped(self._tokens, np.int32), _mapped(self._masks, np.uint8))

    def _flush_columns(self) -> None:
        self._batches.append(pa.record_batch(self._columns, schema=_COLUMNS))
        for column in self._columns.values():
            column.clear()


class RowArrays(Sequence[np.ndarray]):
    """Tokens or masks of rows in another order, read from the file one at a time."""

    def __init__(self, rows: TokenRows, order: np.ndarray, *, masks: bool = False) -> None:
        self._get = rows.mask_of if masks else rows.tokens_of
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(i) for i in self._order[index]]
        return self._get(self._order[index])

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self._get, self._order)


def _mapped(file: IO[bytes], dtype: Any) -> np.ndarray:
    file.flush()
    return np.memmap(file, dtype, mode="r+")


def _unique(ids: pa.ChunkedArray) -> pa.Array:
    """Return ids of which the n-th of the same name, n > 1, is called `name#n`."""
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    runs = np.diff(np.append(starts, len(codes)))
    count = np.empty(len(codes), np.int64)
    count[order] = np.arange(len(codes)) - np.repeat(starts, runs) + 1
    if not (count > 1).any():
        return ids.combine_chunks()
    names = ids.to_pylist()
    taken = set(names)
    for at in np.flatnonzero(count > 1):
        number = count[at]
        while (name := f"{names[at]}#{number}") in taken:
            number += 1
        taken.add(name)
        names[at] = name
    return pa.array(names)
