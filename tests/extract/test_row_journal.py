"""What rows became is kept until the plan is written: a later run goes on, and plans the same."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.blobs import LocalBlobs
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import Stopped
from dflash_offline.common.lease import LocalLock
from dflash_offline.common.target import load_tokenizer
from dflash_offline.extract import corpus, planning, row_journal
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.corpus import CorpusReader, CorpusReport
from dflash_offline.extract.row_journal import RowJournal
from dflash_offline.extract.rows import Row
from dflash_offline.extract.token_rows import TokenRows

FIRST, SEGMENT, COUNT = 10, 16, 150
SMALL = ("--pack-tokens", 512, "--layers", "0,1")


@dataclass(frozen=True, kw_only=True)
class CountingReader(CorpusReader):
    """Remembers which rows it has converted."""

    converted: list[int] = field(default_factory=list)

    def convert_row(self, row: Row):
        self.converted.append(row.number)
        return super().convert_row(row)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "_FIRST_ROWS", FIRST)
    monkeypatch.setattr(row_journal, "_SEGMENT_ROWS", SEGMENT)
    monkeypatch.setattr(planning, "num_cores", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reader(tiny_target: Path) -> Callable[[], CountingReader]:
    tokenizer = load_tokenizer(tiny_target)

    def make() -> CountingReader:
        return CountingReader(
            tokenizer=tokenizer, options=ChatOptions(), vocab_size=len(tokenizer), max_length=60
        )

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store" / "key"


def rows(stop_after: int | None = None) -> Iterator[Row]:
    """Some without an answer, some too long, some with the id of another."""
    for i in range(COUNT):
        if i == stop_after:
            raise Stopped("killed")
        answers = [f"{i} is " + "odd " * (i % 17)] * (i % 5 > 0)
        values = {"id": f"id-{i % 90}", "source": f"s{i % 3}"}
        values |= {"turns": [f"Q{i}"] * (i % 5), "answers": answers * (i % 5), "licence": "CC0"}
        # A name of a file that is not UTF-8.
        yield Row(source="set", address=f"\udcff row {i}", number=i, values=values)


def assert_same(
    found: tuple[TokenRows, CorpusReport], wanted: tuple[TokenRows, CorpusReport]
) -> None:
    assert found[1] == wanted[1]
    assert len(found[0]) == len(wanted[0])
    for one, other in zip(found[0], wanted[0], strict=True):
        for name, value in vars(other).items():
            np.testing.assert_array_equal(vars(one)[name], value)
            assert type(vars(one)[name]) is type(value)


def interrupt(reader: CountingReader, folder: Path, *, after: int) -> None:
    with pytest.raises(Stopped, match="killed"):
        reader.convert(rows(after), journal=RowJournal(folder))


@pytest.mark.parametrize("after", [FIRST - 1, FIRST + 1, FIRST + 3 * SEGMENT, 140, None])
@pytest.mark.parametrize("num_samples", [None, 60])
def test_goes_on_where_it_ended(reader, folder, after, num_samples):
    wanted = reader().convert(rows(), num_samples)
    if after is None:
        reader().convert(rows(), journal=RowJournal(folder))
        known = COUNT - FIRST
    else:
        interrupt(reader(), folder, after=after)
        known = max(0, after - FIRST) // SEGMENT * SEGMENT
    again = reader()
    assert_same(again.convert(rows(), num_samples, journal=RowJournal(folder)), wanted)
    read = wanted[1].num_rows
    assert again.converted == [*range(FIRST), *range(FIRST + known, read)]


def test_many_interruptions(reader, folder):
    """Each run goes on from the one before, and the segments are those of one run."""
    for after in (30, 31, 60, 75, 130):
        interrupt(reader(), folder, after=after)
    last = reader()
    assert_same(last.convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert len(last.converted) == FIRST + COUNT - FIRST - 112
    other = folder.parent.parent / "whole" / folder.name
    reader().convert(rows(), journal=RowJournal(other))
    whole = {path.name: path.read_bytes() for path in other.iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def cut(segments: list[Path]) -> None:
    segments[2].write_bytes(segments[2].read_bytes()[:-1])


def flip(segments: list[Path]) -> None:
    content = bytearray(segments[2].read_bytes())
    content[len(content) // 2] ^= 1
    segments[2].write_bytes(content)


def lose(segments: list[Path]) -> None:
    segments[2].unlink()


def swap(segments: list[Path]) -> None:
    segments[2].write_bytes(segments[3].read_bytes())


def empty(segments: list[Path]) -> None:
    segments[2].write_bytes(b"")


def litter(segments: list[Path]) -> None:
    """What a kill during a write leaves."""
    (segments[2].parent / ".tmp-abc").write_bytes(b"half")
    lose(segments)


@pytest.mark.parametrize("damage", [cut, flip, lose, swap, empty, litter])
def test_damage_costs_what_follows(reader, folder, damage):
    interrupt(reader(), folder, after=120)
    damage(sorted(folder.iterdir()))
    again = reader()
    found = again.convert(rows(), journal=RowJournal(folder))
    assert_same(found, reader().convert(rows()))
    assert again.converted == [*range(FIRST), *range(FIRST + 2 * SEGMENT, COUNT)]
    last = reader()
    assert_same(last.convert(rows(), journal=RowJournal(folder)), found)
    assert len(last.converted) == FIRST
    assert len(list(folder.iterdir())) == -(-(COUNT - FIRST) // SEGMENT)


def test_segments_of_other_data_go(reader, folder):
    """Even moved into this data's folder they do not count."""
    other = folder.parent / "other"
    interrupt(reader(), other, after=100)
    segments = [path.read_bytes() for path in sorted(other.iterdir())]
    folder.mkdir()
    for number, content in enumerate(segments):
        (folder / f"{number:08d}").write_bytes(content)
    again = reader()
    assert_same(again.convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert len(again.converted) == COUNT
    assert not other.exists()


def test_one_run_at_a_time_keeps_tokens(reader, folder, capsys):
    lock = LocalLock(folder.parent)
    lock.acquire("another run")
    assert_same(reader().convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert not folder.exists()
    assert "another live run uses it" in capsys.readouterr().err
    RowJournal(folder).drop()
    assert folder.parent.exists()
    lock.release()
    RowJournal(folder).drop()
    assert not folder.parent.exists()


def test_no_room_costs_the_journal_only(reader, folder, capsys, monkeypatch):
    create = LocalBlobs.create

    def fill(blobs: LocalBlobs, key: str, parts: list[bytes]) -> int:
        if key == "00000002":
            raise Stopped("the disk is full")
        return create(blobs, key, parts)

    monkeypatch.setattr(LocalBlobs, "create", fill)
    assert_same(reader().convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert "the disk is full" in capsys.readouterr().err
    assert not folder.exists()


def test_no_place_at_all(reader, folder, capsys):
    folder.parent.write_text("not a folder")
    assert_same(reader().convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert "tokens are not kept" in capsys.readouterr().err


def test_long_rows_end_a_segment(reader, folder, monkeypatch):
    monkeypatch.setattr(row_journal, "_SEGMENT_TOKENS", 200)
    reader().convert(rows(), journal=RowJournal(folder))
    num_segments = len(list(folder.iterdir()))
    assert num_segments > (COUNT - FIRST) / SEGMENT + 5
    again = reader()
    assert_same(again.convert(rows(), journal=RowJournal(folder)), reader().convert(rows()))
    assert len(again.converted) == FIRST


@pytest.fixture
def plan(make_target, write_corpus, run, tmp_path, monkeypatch):
    """Plan a store as the command does, up to the making of the plan or to the end."""
    data = write_corpus(60)
    counted: list[int] = []

    def call(out: str, *options: object, interrupted: bool = False) -> int:
        """Return how many rows have been converted."""
        counted.clear()
        with monkeypatch.context() as patched:
            convert_row = CorpusReader.convert_row

            def convert(self: CorpusReader, row: Row):
                counted.append(row.number)
                return convert_row(self, row)

            patched.setattr(CorpusReader, "convert_row", convert)
            if interrupted:

                def end(*_given: object) -> None:
                    raise Stopped("interrupted")

                patched.setattr(planning, "make_plan", end)
            args = ("--target", make_target("qwen3"), "--data", data, "--out", tmp_path / out)
            code = run(extract_command, *args, "--plan-only", *SMALL, *options)
        assert code == (3 if interrupted else 0)
        return len(counted)

    call.data = data
    return call


def content(store: Path) -> dict[str, bytes]:
    """Everything that is not the run's own: its log, and its options in the root."""
    files = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
    mine = ("logs/", ".owner", "zarr.json", "manifest.json")
    return {name: p.read_bytes() for name, p in files.items() if not name.startswith(mine)}


def test_plan_after_an_interruption(plan, tmp_path):
    """The same bytes as a plan that was never interrupted; nothing is left of the journal."""
    plan("whole")
    assert plan("store", interrupted=True) == 60
    assert not (tmp_path / "store").exists()
    # Of no weight for what rows become.
    assert plan("store", "--seed", 3, interrupted=True) == FIRST
    assert plan("store") == FIRST
    assert content(tmp_path / "store") == content(tmp_path / "whole")
    assert list((tmp_path / "cache" / "dflash-offline" / "planning").iterdir()) == []
    assert plan("store") == 0


def touch(data: Path) -> None:
    os.utime(data, ns=(data.stat().st_atime_ns, data.stat().st_mtime_ns))


def append(data: Path) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "One, two,", "completion": " three."}) + "\n")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (("--max-length", 40), None),
        (("--overlong", "skip"), None),
        (("--system-prompt", "Be brief."), None),
        (("--chat-template-arg", "deep=true"), None),
        ((), touch),
        ((), append),
    ],
    ids=["max-length", "overlong", "system-prompt", "template-arg", "touched", "longer"],
)
def test_other_options_or_data_start_over(plan, tmp_path, options, change):
    plan("store", interrupted=True)
    if change:
        change(plan.data)
    num_rows = 61 if change is append else 60
    assert plan("store", *options) == num_rows
    assert plan("whole", *options) == num_rows
    assert content(tmp_path / "store") == content(tmp_path / "whole")
