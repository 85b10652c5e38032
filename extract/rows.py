"""Rows of the data as they lie in files or on the hub, each with its address for messages."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.prompts import reason_of_line

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
# What a thread reads of a large file, and at once.
_PIECE_BYTES, _PART_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, its values untouched.

    Attributes:
        source: short name of where it comes from, a file's stem or a hub id.
        address: where a person finds it: file or hub id, and row number from 1.
        number: row number in its source, from 0.
        values: column name to value.
    """

    source: str
    address: str
    number: int
    values: dict[str, Any]

    @property
    def id(self) -> str:
        """Its own, or else its place."""
        given = self.values.get("id")
        return f"{self.source}:{self.number}" if given is None else str(given)

    @property
    def named_source(self) -> str:
        """What the row itself calls its source, or else where it comes from."""
        return str(self.values.get("source") or self.source)

    @property
    def licence(self) -> str:
        """What the row says of it, nothing where it does not."""
        return str(self.values.get("licence") or self.values.get("license") or "")


def read_rows(spec: str) -> Iterator[Row]:
    """Yield the rows of one `--data` value, in order.

    Args:
        spec: a JSONL, JSON, Parquet or Arrow file, a folder of such files, or
            `hf:ID[:SUBSET[:SPLIT]]`.

    Raises:
        BadInput: nothing there, not readable, or a row that is no mapping.
    """
    if spec.startswith("hf:"):
        yield from _hub_rows(spec)
        return
    path = Path(spec).expanduser()
    for file in _files(path):
        for number, values in enumerate(_file_values(file)):
            address = f"{file} row {number + 1}"
            if not isinstance(values, dict):
                raise BadInput(
                    f"--data {address} is a {type(values).__name__}; a row is a mapping with "
                    "messages, conversations, turns, prompt and completion, text or input_ids"
                )
            yield Row(source=_stem(file), address=address, number=number, values=values)


def data_state(spec: str) -> list[tuple[str, int, int, int]]:
    """Return name, size and times of each file that a `--data` value is read from.

    Whatever changes a file changes its times; empty for a data set that lies in no file.

    Raises:
        BadInput: as `read_rows`.
    """
    if spec.startswith("hf:"):
        files = [Path(each["filename"]) for each in _hub_data(spec).cache_files]
    else:
        files = _files(Path(spec).expanduser())
    # A split of the hub may be any part of its files.
    part = f"{spec} " if spec.startswith("hf:") else ""
    return [
        (f"{part}{file.resolve()}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file in files
        for stat in [file.stat()]
    ]


def data_content(spec: str, pool: Executor) -> list[tuple[str, int, str]]:
    """Return name, offset and SHA-256 of each piece of the files of a `--data` value.

    Empty for a data set of the hub.

    Raises:
        BadInput: as `read_rows`.
    """
    if spec.startswith("hf:"):
        return []
    files = _files(Path(spec).expanduser())
    pieces = [(f, at) for f in files for at in range(0, max(1, f.stat().st_size), _PIECE_BYTES)]
    digests = pool.map(_piece_sha256, pieces)
    return [(file.name, at, sha) for (file, at), sha in zip(pieces, digests, strict=True)]


def _piece_sha256(piece: tuple[Path, int]) -> str:
    file, offset = piece
    digest, left = hashlib.sha256(), _PIECE_BYTES
    with _readable(file), file.open("rb", buffering=0) as content:
        content.seek(offset)
        while left and (part := content.read(min(left, _PART_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def count_rows(spec: str) -> int:
    """Return how many rows one `--data` value has, without making them where that is quicker.

    Raises:
        BadInput: as `read_rows`.
    """
    if spec.startswith("hf:"):
        return len(_hub_data(spec))
    return sum(map(_count_file, _files(Path(spec).expanduser())))


def _count_file(file: Path) -> int:
    if file.name.endswith(".jsonl"):
        with _readable(file), file.open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    if file.suffix == ".parquet":
        with _readable(file), pq.ParquetFile(file) as table:
            return table.metadata.num_rows
    return sum(1 for _ in _file_values(file))


def _files(path: Path) -> list[Path]:
    with _readable(path):
        is_folder, is_file = path.is_dir(), path.is_file()
        files = _folder_files(path) if is_folder else []
    if is_folder:
        if not files:
            raise BadInput(
                f"--data {path} is a folder without {', '.join(_ENDINGS)} files directly in it; "
                "give the folder or the files that hold rows"
            )
        return files
    if not is_file:
        raise BadInput(
            f"--data {path} does not exist; give a {', '.join(_ENDINGS)} file, a folder of them "
            "or hf:ID[:SUBSET[:SPLIT]]"
        )
    if not path.name.endswith(_ENDINGS):
        raise BadInput(f"--data {path} has an unknown ending; allowed are {', '.join(_ENDINGS)}")
    return [path]


def _folder_files(folder: Path) -> list[Path]:
    """Return the files of a folder that hold rows.

    What `datasets` saved has two more, about the set, and may have copies of it from other steps.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise BadInput(
            f"--data {folder} holds several splits ({splits}); give the folder of one of them"
        )
    files = sorted(each for each in folder.iterdir() if each.name.endswith(_ENDINGS))
    if not {folder / "dataset_info.json", folder / "state.json"} <= set(files):
        return files
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / each["filename"] for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise BadInput(
            f"--data {folder} has a state.json that names no files of rows; name the files"
        ) from problem


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0]


def _file_values(file: Path) -> Iterator[Any]:
    with _readable(file):
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(file)
        elif file.name.endswith(".json"):
            yield from _json_list(file)
        else:
            yield from _arrow_values(file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error) as problem:
        if isinstance(problem, BadInput):
            raise
        raise BadInput(
            f"--data {file} cannot be read ({problem}); give a whole file that you may read"
        ) from problem


def _json_lines(file: Path) -> Iterator[Any]:
    open_text = gzip.open if file.name.endswith(".gz") else open
    with open_text(file, "rt", encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            # The last for brackets in brackets without an end.
            except (ValueError, RecursionError) as problem:
                raise BadInput(
                    f"--data {file} line {number} is not JSON ({reason_of_line(problem)}); one "
                    "object a line is allowed"
                ) from problem


def _json_list(file: Path) -> Iterator[Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise BadInput(f"--data {file} is not JSON ({problem}); a list is allowed") from problem
    if not isinstance(data, list):
        raise BadInput(
            f"--data {file} holds a {type(data).__name__}, not a list of rows; for one object a "
            "line call it .jsonl"
        )
    yield from data


def _arrow_values(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from _plain_rows(batch.to_pylist())
        return
    with pa.memory_map(str(file)) as source:
        try:
            batches = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            whole = pa.ipc.open_file(source)
            batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
        for batch in batches:
            yield from _plain_rows(batch.to_pylist())


def _plain_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as they were before a table gave each mapping the keys of all others."""
    return [{name: _without_nulls(value) for name, value in row.items()} for row in rows]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(each) for each in value]
    return value


def _hub_rows(spec: str) -> Iterator[Row]:
    hub_id = spec.removeprefix("hf:").partition(":")[0]
    # As tables: rows would have their pictures and sounds decoded.
    tables = _hub_data(spec).with_format("arrow").iter(batch_size=1024)
    rows = chain.from_iterable(_plain_rows(table.to_pylist()) for table in tables)
    for number, values in enumerate(rows):
        yield Row(source=hub_id, address=f"{spec} row {number + 1}", number=number, values=values)


def _hub_data(spec: str) -> Any:
    """Return the data set of `hf:ID[:SUBSET[:SPLIT]]`."""
    try:
        import datasets
    except ImportError as problem:
        raise BadInput(
            f"--data {spec} needs the datasets package; pip install datasets, or give a file"
        ) from problem
    hub_id, _, rest = spec.removeprefix("hf:").partition(":")
    subset, _, split = rest.partition(":")
    if not hub_id:
        raise BadInput(f"--data {spec} names no data set; the form is hf:ID[:SUBSET[:SPLIT]]")
    try:
        return datasets.load_dataset(hub_id, subset or None, split=split or "train")
    except Stopped:
        raise
    # RuntimeError for a set that is made by code of its own, StopIteration for one without rows.
    except (
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,
        datasets.exceptions.DatasetsError,
    ) as problem:
        told = str(problem.__cause__ or problem).strip() or "it has no rows"
        reason = told.split("\n")[0]
        raise BadInput(
            f"--data {spec} cannot be loaded ({reason}); the form is hf:ID[:SUBSET[:SPLIT]], where "
            "ID may be the folder of a copy"
        ) from problem
