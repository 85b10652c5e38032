"""A resume tokenises nothing where the store's plan was made of the same rows, and only there."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_offline.common import records
from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import load_tokenizer
from dflash_offline.extract import planning, rows
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.same_rows import row_facts, rows_digest
from dflash_offline.extract.self_check import checked_samples

COUNT = 33
SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--codec", "raw")


@pytest.fixture
def target(make_target, tmp_path) -> Path:
    """A target that a test may change."""
    return Path(shutil.copytree(make_target("qwen3"), tmp_path / "target"))


@pytest.fixture
def extract(target, write_corpus, run, tmp_path, monkeypatch, capsys):
    """Run the command; returns its exit code, the rows that were converted, and its error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_corpus(COUNT)
    convert_row = CorpusReader.convert_row

    def call(*options: object, out: str = "store", given: Path = data) -> tuple[int, int, str]:
        converted: list[int] = []

        def convert(self: CorpusReader, row: rows.Row):
            converted.append(row.number)
            return convert_row(self, row)

        with monkeypatch.context() as patched:
            patched.setattr(CorpusReader, "convert_row", convert)
            args = ("--target", target, "--data", given, "--out", tmp_path / out, *SMALL)
            code = run(extract_command, *args, *options)
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        return code, len(converted), "\n".join(errors)

    call.data = data
    return call


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def content(store: Path) -> dict[str, bytes]:
    """Everything that is not the run's own: its log, and its options in the root."""
    files = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
    mine = ("logs/", ".owner", "zarr.json", "manifest.json", "index-")
    return {name: p.read_bytes() for name, p in files.items() if not name.startswith(mine)}


def report_of(store: Path) -> dict[str, object]:
    return records.unseal((store / "plan/0/plan.json").read_bytes(), "plan.json")["report"]


@pytest.mark.parametrize("begun", ["killed on the way", "only planned"])
def test_resume_tokenises_nothing(begun: str, extract, store, run, tmp_path, sigterm_at_batch):
    """The self-check, which has its tokens from the store, included."""
    assert extract(out="whole") == (0, COUNT, "")
    if begun == "only planned":
        assert extract("--plan-only") == (0, COUNT, "")
        assert extract("--plan-only") == (0, 0, "")
    else:
        with sigterm_at_batch(4):
            assert extract()[:2] == (3, COUNT)
        packs, every = (list(folder.glob("commit/*")) for folder in (store, tmp_path / "whole"))
        assert 0 < len(packs) < len(every)
    assert extract() == (0, 0, "")
    assert content(store) == content(tmp_path / "whole")
    assert run(cache_command, "verify", "--deep", store) == 0
    logs = ((tmp_path / out / "logs/extract.jsonl").read_text() for out in ("whole", "store"))
    first, again = ([json.loads(line) for line in log.splitlines()] for log in logs)
    checks = [each for each in first if each["kind"] == "self-check"]
    assert checks
    assert [each for each in again if each["kind"] == "self-check"][-len(checks) :] == checks
    assert extract() == (0, 0, "")


def test_files_elsewhere_with_other_times(extract, tmp_path):
    """Only content counts, and the name, which is in the identity."""
    extract("--plan-only")
    (tmp_path / "moved").mkdir()
    moved = Path(shutil.copyfile(extract.data, tmp_path / "moved" / extract.data.name))
    os.utime(moved, (1, 1))
    assert extract(given=moved) == (0, 0, "")


def test_one_byte_of_the_data(extract):
    """Of the same size and time of change; refused, as it is without any digest."""
    extract("--plan-only")
    before = extract.data.stat()
    text = extract.data.read_bytes()
    extract.data.write_bytes(text.replace(b"17 is", b"18 is"))
    os.utime(extract.data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert extract.data.stat().st_size == before.st_size
    code, converted, error = extract()
    assert (code, converted) == (2, COUNT)
    assert "data_sha256 is" in error
    extract.data.write_bytes(text)
    assert extract() == (0, 0, "")


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", 1),
        ("--holdout", "20%"),
        ("--num-samples", 12),
        ("--max-length", 40),
        ("--overlong", "skip"),
        ("--pack-tokens", 512),
        ("--batch-tokens", 1024),
        ("--layers", "0,1"),
        ("--codec", "lossless"),
        ("--teacher", "final"),
        ("--system-prompt", "Be brief."),
        ("--chat-template-arg", "deep=true"),
        ("--dtype", "bfloat16"),
    ],
    ids=lambda value: value[0],
)
def test_other_options_are_refused(extract, store, options):
    """Before any row is tokenised."""
    extract("--plan-only")
    before = content(store)
    code, converted, error = extract(*options)
    assert (code, converted) == (2, 0)
    assert f"but the store at {store} has" in error
    assert content(store) == before


@pytest.mark.parametrize(
    ("options", "again"),
    [
        (("--dtype", "auto"), ("--dtype", "float32")),
        (("--holdout", "7%"), ("--holdout", "0.07")),
        (("--max-length", 256), ()),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_other_words_for_the_same(extract, options, again):
    assert extract(*options, "--plan-only")[0] == 0
    assert extract(*again, "--plan-only") == (0, 0, "")


def change_template(target: Path) -> None:
    file = target / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def change_settings(target: Path) -> None:
    """What the tokenizer's Python side reads; its own file stays as it is."""
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"split_special_tokens": True}))


@pytest.mark.parametrize("change", [change_template, change_settings])
def test_another_template_or_tokenizer(extract, target, change):
    extract("--plan-only")
    change(target)
    code, converted, error = extract()
    is_template = change is change_template
    assert (code, converted) == (2, 0 if is_template else COUNT)
    assert ("chat_template_sha256 is" if is_template else "data_sha256 is") in error


def test_another_version(extract, monkeypatch):
    extract("--plan-only")
    with monkeypatch.context() as patched:
        patched.setattr("dflash_offline.extract.same_rows.version", lambda _package: "99.0")
        assert extract("--plan-only") == (0, COUNT, "")
    assert extract() == (0, 0, "")


def test_store_that_knows_nothing_of_its_rows(extract, store, tmp_path, monkeypatch):
    """Made by a version that did not write the digest."""
    with monkeypatch.context() as patched:
        patched.setattr(planning, "with_digest", lambda plan, _digest: plan)
        extract("--plan-only")
    assert "rows_sha256" not in report_of(store)
    assert extract() == (0, COUNT, "")
    extract(out="whole")
    ours, whole = content(store), content(tmp_path / "whole")
    assert ours.keys() == whole.keys()
    assert {name for name in ours if ours[name] != whole[name]} == {"plan/0/plan.json"}


def test_appended_data(extract, write_corpus):
    more = write_corpus(12, "more.jsonl")
    assert extract("--plan-only")[0] == 0
    assert extract("--append") == (0, COUNT, "")
    assert extract() == (0, 0, "")
    assert extract("--append", given=more) == (0, 12, "")
    assert extract() == (0, COUNT, "")
    assert extract("--append", given=more) == (0, 12, "")


@pytest.mark.parametrize("name", ["tokens", "loss_mask"])
def test_shard_that_a_repair_gave_up(name, extract, store, tmp_path):
    extract("--plan-only")
    extract(out="whole")
    shutil.rmtree(store / name / "c/2")
    assert extract() == (0, COUNT, "")
    assert content(store) == content(tmp_path / "whole")


def test_pack_that_a_killed_rm_was_rewriting(extract, store, run, monkeypatch):
    """Its tokens are not the plan's any more, and come from the rows."""
    extract()
    before, plan = content(store), open_cache(str(store)).plan
    # The self-check reads nothing of the pack, so it does not notice.
    seen = {plan.samples[at].pack for at in checked_samples(plan.column("length"))}
    chosen = next(sample.id for sample in plan.samples if sample.pack not in seen)
    with monkeypatch.context() as killed:
        killed.setattr(Store, "commit_pack", lambda *_, **__: 1 / 0)
        assert run(cache_command, "rm", store, "--yes", "--where", f"id == {chosen!r}") == 70
    assert extract()[:2] == (0, COUNT)
    assert content(store) == before


def test_damaged_tokens_are_not_taken_for_the_check(extract, store):
    extract("--plan-only")
    for file in (store / "tokens/c").rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            file.write_bytes(bytes(file.stat().st_size))
    assert extract("--plan-only") == (0, COUNT, "")


def test_file_that_changes_while_it_is_read(extract, store, monkeypatch):
    """Nobody knows which of its contents became the rows."""
    make_plan = planning.make_plan

    def change(*given):
        extract.data.write_text(extract.data.read_text())
        return make_plan(*given)

    with monkeypatch.context() as patched:
        patched.setattr(planning, "make_plan", change)
        extract("--plan-only")
    assert "rows_sha256" not in report_of(store)
    assert extract() == (0, COUNT, "")


def test_file_that_goes_while_it_is_read(extract, store, monkeypatch):
    make_plan = planning.make_plan

    def remove(*given):
        extract.data.unlink()
        return make_plan(*given)

    with monkeypatch.context() as patched:
        patched.setattr(planning, "make_plan", remove)
        assert extract("--plan-only")[0] == 0
    assert "rows_sha256" not in report_of(store)


def test_every_byte_of_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_PIECE_BYTES", 100)
    monkeypatch.setattr(rows, "_PART_BYTES", 33)
    text = bytes(range(250))
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with ThreadPoolExecutor(2) as pool:
        found = rows.data_content(str(tmp_path), pool)
        pieces = [text[:100], text[100:200], text[200:], b""]
        places = [("a.jsonl", 0), ("a.jsonl", 100), ("a.jsonl", 200), ("b.jsonl", 0)]
        wanted = [(*each, records.sha256(piece)) for each, piece in zip(places, pieces)]  # noqa: B905
        assert found == wanted


def test_rows_that_nothing_is_known_of(tiny_target, write_corpus):
    """Code that came with a checkpoint, and data sets of the hub."""
    tokenizer, data = load_tokenizer(tiny_target), [str(write_corpus(3))]

    def digest(specs: list[str]) -> str | None:
        reader = CorpusReader(
            tokenizer=tokenizer, options=ChatOptions(), vocab_size=300, max_length=60
        )
        return rows_digest(reader, row_facts(reader), specs, num_threads=1)

    assert digest(data) == digest(data) != digest(data * 2)
    assert digest(data) is not None
    assert digest([*data, "hf:a/b"]) is None
    shipped = {"__module__": "transformers_modules"}
    tokenizer.__class__ = type("Shipped", (type(tokenizer),), shipped)
    assert digest(data) is None


def test_parts_of_a_hub_data_set_are_told_apart(monkeypatch, write_corpus):
    """They lie in the same files."""
    data = SimpleNamespace(cache_files=[{"filename": str(write_corpus(3))}])
    monkeypatch.setattr(rows, "_hub_data", lambda _spec: data)
    first, last = (rows.data_state(f"hf:a/b::train[{part}]") for part in (":10%", "90%:"))
    assert first == rows.data_state("hf:a/b::train[:10%]") != last


def test_a_copy_in_another_codec_has_the_plan(extract, run, store, tmp_path, capsys):
    """It is resumed, not appended to."""
    assert extract()[0] == 0
    assert run(cache_command, "copy", store, tmp_path / "copy", "--codec", "lossless") == 0
    before = content(tmp_path / "copy")
    assert extract("--codec", "lossless", out="copy")[0] == 0
    assert content(tmp_path / "copy") == before
    assert len(open_cache(str(tmp_path / "copy")).samples) == COUNT
