"""Rows of the hub's data sets, without the hub: a package made up, and a repository on the disk."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.extract.rows import count_rows, data_state, read_rows


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError("Dataset scripts are no longer supported"), "Dataset scripts"),
        (StopIteration(), "it has no rows"),
        (LookupError("a file that is cut"), "a file that is cut"),
    ],
)
def test_hub_data_that_cannot_be_loaded(problem, words: str, monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_args: object, **_options: object) -> None:
        raise problem

    exceptions = SimpleNamespace(DatasetsError=LookupError)
    module = SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(BadInput, match=f"--data hf:a/b cannot be loaded .{words}"):
        list(read_rows("hf:a/b"))
    with pytest.raises(BadInput, match="--data hf::en names no data set; the form is hf:ID"):
        list(read_rows("hf::en"))


class Table:
    """A data set of the hub with pictures, which only rows made by it would decode."""

    def __init__(self, *, is_arrow: bool = False) -> None:
        self.is_arrow = is_arrow

    def with_format(self, name: str) -> "Table":
        return Table(is_arrow=name == "arrow")

    def iter(self, *, batch_size: int) -> Iterator[pa.Table]:
        assert self.is_arrow, "pictures are decoded"
        yield from (pa.table({"text": [text], "image": [b"no png"]}) for text in "ab"[:batch_size])


def test_hub_data_is_not_decoded(monkeypatch: pytest.MonkeyPatch):
    module = SimpleNamespace(load_dataset=lambda *_args, **_options: Table())
    monkeypatch.setitem(sys.modules, "datasets", module)
    rows = list(read_rows("hf:a/b"))
    assert [row.values["text"] for row in rows] == ["a", "b"]
    assert [(row.number, row.address) for row in rows] == [
        (0, "hf:a/b row 1"),
        (1, "hf:a/b row 2"),
    ]


def test_hub_data_of_a_local_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="needs datasets (pip install datasets)")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "set"
    repository.mkdir()
    pictures = pa.array([{"bytes": b"no png", "path": None}] * 3)
    table = pa.table({"text": ["a", "b", "c"], "image": pictures})
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    pq.write_table(table.cast(features.arrow_schema), repository / "train.parquet")
    (repository / "cut.parquet").write_bytes((repository / "train.parquet").read_bytes()[:-9])
    files = "data_files: [{split: train, path: train.parquet}]"
    broken = "data_files: [{split: train, path: cut.parquet}]"
    configs = f"- {{config_name: good, {files}}}\n- {{config_name: cut, {broken}}}"
    (repository / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    spec = f"hf:{repository}:good"
    assert [row.values["text"] for row in read_rows(f"{spec}:train[1:]")] == ["b", "c"]
    assert count_rows(spec) == 3
    assert len(data_state(spec)) == 1
    for rest, words in (
        (":good:test", "Unknown split"),
        (":none", "not found"),
        (":cut", "corrupted"),
    ):
        with pytest.raises(BadInput, match=f"cannot be loaded .*{words}"):
            list(read_rows(f"hf:{repository}{rest}"))


def test_hub_data_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="--data hf:a/b needs the datasets package"):
        list(read_rows("hf:a/b"))
