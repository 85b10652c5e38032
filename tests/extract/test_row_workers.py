"""Rows through processes: in order, in bounded memory, errors in place, nothing left behind."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.target import load_tokenizer
from dflash_offline.extract import corpus
from dflash_offline.extract.conversations import parse_row
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.row_workers import map_rows
from dflash_offline.extract.rows import Row

DEADLINE_S = 20.0


def test_order_errors_and_bounds():
    """One start of processes for all: they take seconds."""
    read: list[int] = []

    def rows(count: int) -> Iterator[str]:
        for number in range(count):
            read.append(number)
            yield str(number)

    results = map_rows(int, rows(100_000), num_workers=2)
    assert [next(results) for _ in range(500)] == list(range(500))
    assert len(read) < 500 + 6 * 64, "rows are read ahead without a bound"
    results.close()


def test_bad_row_comes_after_the_rows_before_it():
    rows = [
        Row(source="set", address=f"row {i}", number=i, values={"turns": ["Hi"] if i != 200 else 1})
        for i in range(1000)
    ]
    results = map_rows(parse_row, rows, num_workers=2)
    assert all(next(results) == parse_row(rows[0]) for _ in range(200))
    with pytest.raises(BadInput, match="row 200"):
        next(results)


def test_lost_process_stops_the_run():
    with pytest.raises(Stopped, match="exit code 7"):
        list(map_rows(os._exit, [7] * 1000, num_workers=2))


@pytest.mark.parametrize(("call", "row"), [(json.loads, "{"), (os.rmdir, "/nowhere")])
def test_bug_in_a_process_comes_with_its_traceback(
    call: Callable[[str], object], row: str, capfd: pytest.CaptureFixture
):
    """Not as a process that was killed: the same command would end the same way."""
    with pytest.raises(RuntimeError, match="see its traceback") as told:
        list(map_rows(call, [row], num_workers=2))
    assert not isinstance(told.value, Stopped)
    assert re.search(r"(?s)Traceback.*(JSONDecodeError|/nowhere)", capfd.readouterr().err)


def test_process_without_memory_stops_the_run():
    with pytest.raises(Stopped, match="exit code 3; was it killed for memory"):
        list(map_rows(bytes, [1 << 62], num_workers=2))


MEETING = """
import os, time
from pathlib import Path

class Meeting:
    '''Waits, when it is unpickled, for as many processes that do so; notes where they are late.'''

    def __init__(self, folder, size):
        self.folder, self.size = folder, size

    def __setstate__(self, state):
        vars(self).update(state)
        Path(self.folder, str(os.getpid())).touch()
        until = time.monotonic() + {deadline}
        while len(os.listdir(self.folder)) < self.size:
            if time.monotonic() > until:
                Path(self.folder).with_name("late").touch()
                break
            time.sleep(0.01)

class Function:
    '''Adds one; as large as a tokenizer, behind what takes its time.'''

    def __init__(self, *given):
        self.meeting, self.tables = Meeting(*given), bytes(1 << 20)

    def __call__(self, row):
        return row + 1
"""


def test_processes_start_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a function needs takes seconds to import, and there may be a hundred cores."""
    # Of a module of its own: processes need not find this one.
    (tmp_path / "meeting_of_rows.py").write_text(MEETING.format(deadline=DEADLINE_S))
    (tmp_path / "met").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("meeting_of_rows").Function(tmp_path / "met", 3)
    assert list(map_rows(function, range(300), num_workers=3)) == list(range(1, 301))
    assert not (tmp_path / "late").exists(), "processes start one after another"


LAUNCHER = """
import itertools, os, time
from dflash_offline.extract.row_workers import map_rows
if __name__ == "__main__":
    for i, pid in enumerate(map_rows({function}, itertools.count(), num_workers=2)):
        if i < 256:
            print(pid, flush=True)
        else:
            time.sleep(0.01)
"""


def test_processes_end_with_a_launcher_that_is_killed(is_running, tmp_path: Path):
    script = tmp_path / "launcher.py"
    script.write_text(
        LAUNCHER.format(function="pid_of").replace(
            "if __name__", "def pid_of(_row):\n    return os.getpid()\nif __name__", 1
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        workers = {int(launcher.stdout.readline()) for _ in range(256)}
        assert len(workers) == 2
        launcher.send_signal(signal.SIGKILL)
    until = time.monotonic() + DEADLINE_S
    while any(map(is_running, workers)):
        assert time.monotonic() < until, "a process outlives its launcher"
        time.sleep(0.05)


@pytest.mark.slow
def test_corpus_is_the_same_with_processes(tiny_target: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(tiny_target)
    reader = CorpusReader(
        tokenizer=tokenizer, options=ChatOptions(), vocab_size=len(tokenizer), max_length=200
    )
    values = [
        {"id": str(i % 250), "turns": [f"Question {i}"] * (i % 3), "answers": [f"{i}."] * (i % 3)}
        for i in range(300)
    ]
    rows = [
        Row(source="set", address=f"row {i}", number=i, values=each)
        for i, each in enumerate(values)
    ]
    alone, alone_report = reader.convert(rows, 190)
    monkeypatch.setattr(corpus, "_FIRST_ROWS", 10)
    together, report = reader.convert(rows, 190, num_workers=2)
    assert report == alone_report
    assert report.num_kept == len(together) == 190
    assert report.skipped == {corpus.NO_ASSISTANT: report.num_rows - 190}
    assert together.column("id").to_pylist() == alone.column("id").to_pylist()
    assert len(set(together.column("id").to_pylist())) == 190
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.mask, other.mask)
