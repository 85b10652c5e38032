"""The file of answers: foreign content, two runs, places that take no file."""

import datetime
import json
from pathlib import Path

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.extract.answers_file import AnswersFile


def answers_at(path: Path) -> AnswersFile:
    return AnswersFile(path, target="t", settings={})


def test_one_run_writes_a_file(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    late = answers_at(path)
    with answers_at(path) as first:
        first.append("k", {"id": "a"})
        second = answers_at(path)
        with pytest.raises(BadInput, match="written by another run"), second:
            pass
    # It has read a file that is another by now.
    with pytest.raises(BadInput, match="written by another run"), late:
        pass
    with answers_at(path) as again:
        assert again.done == {"k"}
    assert len(path.read_bytes().splitlines()) == 1


def test_place_that_takes_no_file(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="--out .* cannot be written"):
        answers_at(tmp_path / "file/a.jsonl").__enter__()


def test_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with answers_at(Path("~/a.jsonl")) as answers:
        answers.append("k", {"id": "a", "at": datetime.date(2026, 1, 2)})
    assert json.loads((tmp_path / "a.jsonl").read_text())["at"] == "2026-01-02"


def test_row_that_a_crash_cut_is_cut_off(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with answers_at(path) as answers:
        answers.append("k", {"id": "a"})
    whole = path.read_bytes()
    for length in (1, 8, 20):
        path.write_bytes(whole + whole[:length])
        with answers_at(path):
            pass
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"not ours")
    with pytest.raises(BadInput, match="line 2 is not an answer"):
        answers_at(path)
