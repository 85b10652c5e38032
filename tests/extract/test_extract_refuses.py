"""What dflash-extract refuses: one line, exit code 2, nothing written."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest

from dflash_offline.common import blobs as blobs_module
from dflash_offline.common import checkpoint_files, store_checks
from dflash_offline.common.store_writer import Store
from dflash_offline.extract import planning as planning_module
from dflash_offline.extract import run as run_module
from dflash_offline.extract.cli import main as extract_command


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one error line; nothing else may look like one."""
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, lines
    assert lines[-1] == errors[0], "the error is the last line"
    assert not any("Traceback" in line for line in lines)
    return errors[0]


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refuse(tiny_target, write_corpus, run, tmp_path, capsys):
    """Run with changed options and return the error."""

    def call(*changes: object, target: Path = tiny_target, data: Path | None = None) -> str:
        data = write_corpus(4) if data is None else data
        before = everything(tmp_path)
        args = ("--target", target, "--data", data, "--out", tmp_path / "store")
        assert run(extract_command, *args, *changes) == 2
        after = everything(tmp_path)
        assert after == before, "nothing is written"
        return error_of(capsys)

    return call


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--layers", "99"), "--layers 99 has 99.*8 layers does not have"),
        (("--layers", "-1"), "--layers -1"),
        (("--layers", "7"), "the last layer"),
        (("--layers", "1,1"), "repeats"),
        (("--layers", "first"), "not a list of layer ids"),
        (("--layers", "auto:7"), "no 7 distinct layers"),
        (("--max-length", 4096, "--pack-tokens", 1024), "--max-length 4096 is above --pack-tokens"),
        (("--max-length", 2048), "above the target's context of 1024"),
        (("--max-length", 1), "--max-length"),
        (("--batch-tokens", 16), "--batch-tokens 16 is below the longest sample"),
        (("--codec", "zip"), "--codec zip is not available.*lossless"),
        (("--teacher", "topk:1"), "--teacher topk:1 .* topk:K with K from 2 to"),
        (("--teacher", "topk:2000"), "--teacher topk:2000 .* topk:K with K from 2 to"),
        (("--teacher", "topk:"), "--teacher topk: .* topk:K with K from 2 to"),
        (
            ("--teacher", "all"),
            "--teacher all is not possible; allowed are none, final, and topk:K",
        ),
        (("--holdout", "120%"), "--holdout 120%"),
        (("--holdout", "few"), "--holdout few is not a share"),
        (("--chat-template", "none.jinja"), "--chat-template none.jinja cannot be read"),
        (("--chat-template-arg", "thinking"), "--chat-template-arg thinking is not name=value"),
        (("--overlong", "keep"), "--overlong"),
        (("--no-such-option",), "--no-such-option"),
        (("--dry-run", "--plan-only"), "--dry-run and --plan-only cannot be had together"),
        (("--storage-option", "key=a"), "--storage-option key=… says nothing of .*/store, which"),
        (("--dry-run", "--storage-option", "key=a"), "--storage-option key=… says nothing of"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_options(refuse, options, words):
    assert re.search(words, refuse(*options))


def test_missing_target(refuse, tmp_path):
    assert "--target /no/such/model does not exist" in refuse(target=Path("/no/such/model"))
    assert "without config.json" in refuse(target=tmp_path)


def test_target_without_a_known_final_norm(refuse, tiny_target, tmp_path, monkeypatch):
    """Before the corpus is read and the weights are."""
    monkeypatch.setattr(planning_module, "row_facts", None)
    monkeypatch.setattr(run_module, "load_target", None)
    folder = tmp_path / "olmo"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "olmo", "architectures": ["OlmoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    words = "olmo is a OlmoModel without a final norm .* that has a weight"
    assert re.search(words, refuse(target=folder))


def test_missing_hub_target(refuse, monkeypatch):
    monkeypatch.setattr(checkpoint_files.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "--target no-one/none is no local file" in refuse(target=Path("no-one/none"))


def test_tokenizer_without_template(refuse, no_template):
    assert "no chat template; give one with --chat-template" in refuse(target=no_template)


def test_token_ids_need_no_template(no_template, run, tmp_path):
    data = tmp_path / "ids.jsonl"
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ("--target", no_template, "--data", data, "--out", tmp_path / "store")
    assert run(extract_command, *args) == 0


def test_template_that_is_not_there(refuse, tmp_path):
    """Also where other rows need none: conversations would only be left out."""
    data = tmp_path / "data.jsonl"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": said}, {"prompt": "Hi", "completion": " you there"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = refuse("--chat-template", "none.jinja", data=data)
    assert error.startswith("error: --chat-template none.jinja cannot be read")


def test_template_at_home(tiny_target, write_corpus, run, tmp_path, monkeypatch):
    """Which a shell does not put into --chat-template=~/own.jinja, nor into a file of options."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copyfile(tiny_target / "chat_template.jinja", tmp_path / "own.jinja")
    args = ("--target", tiny_target, "--data", write_corpus(4), "--out", tmp_path / "store")
    assert run(extract_command, *args, "--chat-template=~/own.jinja", "--plan-only") == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "--data holds no rows"),
        ('{"turns": ["Hi"]}\n', "no assistant turn in any of 1 rows"),
        ('{"messages": "Hi"}\n', "row 1: messages is a str"),
        ('{"input_ids": [5, 6], "loss_mask": [0, 0]}\n', "nothing to train on"),
        ("not json\n", "line 1 is not JSON"),
    ],
    ids=["empty", "prompts-only", "wrong-type", "zero-masks", "no-json"],
)
def test_data(refuse, tmp_path, content, words):
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    assert words in refuse(data=data)


def test_missing_data(refuse, tmp_path):
    assert "none.jsonl does not exist" in refuse(data=tmp_path / "none.jsonl")


def test_folder_that_is_no_store(refuse, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "load_target", None)
    (tmp_path / "store").mkdir()
    (tmp_path / "store/holiday.jpg").write_text("x")
    assert "holds no store (it has holiday.jpg)" in refuse()


def test_store_of_other_settings(
    refuse, tiny_target, write_corpus, make_target, run, tmp_path, monkeypatch
):
    """Before the target is loaded."""
    args = ("--target", tiny_target, "--data", write_corpus(4), "--out", tmp_path / "store")
    assert run(extract_command, *args) == 0
    monkeypatch.setattr(run_module, "load_target", None)
    assert "layers is '1,3'" in refuse("--layers", "1,3")
    assert "seed is 1" in refuse("--seed", 1)
    assert "codec is 'raw'" in refuse("--codec", "raw")
    assert "system_prompt is 'Be brief.'" in refuse("--system-prompt", "Be brief.")
    assert "weight_digest is" in refuse("--layers", "0,2", target=make_target("qwen3"))
    assert "sources is 'chat2.jsonl'" in refuse(data=write_corpus(5, "chat2.jsonl"))
    assert "data_sha256 is" in refuse(data=write_corpus(5))
    assert "layers is '1,3'" in refuse("--layers", "1,3", "--append")


def test_store_of_a_newer_format(refuse, tiny_target, write_corpus, run, tmp_path):
    args = ("--target", tiny_target, "--data", write_corpus(4), "--out", tmp_path / "store")
    assert run(extract_command, *args) == 0
    group = tmp_path / "store/zarr.json"
    data = json.loads(group.read_text())
    data["attributes"]["dflash_offline"]["format"] = 2
    group.write_text(json.dumps(data))
    assert "store format 2" in refuse()


def test_second_live_run(refuse, tiny_target, write_corpus, run, tmp_path, monkeypatch):
    """Before the corpus is read; a store that its run has left is nobody's."""
    args = ("--target", tiny_target, "--data", write_corpus(4), "--out", tmp_path / "store")
    assert run(extract_command, *args) == 0
    assert run(extract_command, *args) == 0
    monkeypatch.setattr(planning_module, "row_facts", None)
    with Store.open(str(tmp_path / "store")):
        assert "is being written by another live run (process" in refuse()


def test_too_little_disk(refuse, monkeypatch):
    monkeypatch.setattr(blobs_module.LocalBlobs, "free_bytes", lambda _self: 1000)
    monkeypatch.setattr(run_module, "load_target", None)  # found out before the target is loaded
    assert "GB free and the store needs about" in refuse()
    assert store_checks.refuse_small_disk is run_module.refuse_small_disk


def test_disk_that_fills_up(tiny_target, write_corpus, run, tmp_path, monkeypatch, capsys):
    """Not bad input: what is committed is safe, and the same command goes on."""
    args = ("--target", tiny_target, "--data", write_corpus(12), "--out", tmp_path / "store")
    args = (*args, "--pack-tokens", 256)
    create = blobs_module.LocalBlobs.create

    def full(self, key, parts):
        if key.startswith("features/c/2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, key, parts)

    with monkeypatch.context() as patch:
        patch.setattr(blobs_module.LocalBlobs, "create", full)
        code = run(extract_command, *args)
    assert code == 3, capsys.readouterr().err
    assert "what is committed is safe" in error_of(capsys)
    assert run(extract_command, *args) == 0
