"""Options from a file, and the table of all of them."""

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.common.options import (
    click_command,
    exit_code_of,
    option,
    print_config,
    save_config,
)

SEEN: list["_Config"] = []


@dataclass(frozen=True, kw_only=True)
class _Config:
    data: tuple[str, ...] = option(help="Files.", multiple=True)
    note: str | None = option(None, help="Whatever it is.")
    share: float = option(0.5, help="Part.", type=click.FloatRange(0, 1))
    out: str = option(help="Where to.", required=True)
    num: int = option(3, help="How many.")
    is_quiet: bool = option(False, help="Say nothing.")


def be_stopped(_config: _Config) -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    except RuntimeError:
        raise AttributeError("no such operator") from None


def be_stopped_while_reading(_config: _Config) -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    except RuntimeError as problem:
        raise BadInput(f"the file cannot be read ({problem})") from problem


def be_kept_out(_config: _Config) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/theirs/store")


def lose_the_disk(_config: _Config) -> None:
    raise OSError(errno.EIO, "Input/output error", "/store/features/c/1/0/0/0")


def see(config: _Config) -> None:
    SEEN.append(config)


def call(*args: str, function: str = "see") -> int:
    run = f"{__name__}:{function}"
    cli: click.Command = click_command(_Config, name="probe", help="Try.", run=run)
    return exit_code_of(cli, ["--out", "here", *args])


@pytest.mark.parametrize("data", ["a.jsonl", "[a.jsonl]"], ids=["alone", "list"])
def test_file_names_one_value_of_an_option_that_repeats(tmp_path: Path, data: str):
    (tmp_path / "c.yaml").write_text(f"data: {data}\n")
    assert call("--config", str(tmp_path / "c.yaml")) == 0
    assert SEEN[-1].data == ("a.jsonl",)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("note: no\n", {"note": "no"}),
        ("note: 0123\r\nshare: 1e-1\r\n", {"note": "0123", "share": 0.1}),
        ("note: ~\nis-quiet: yes\nnum: 7\n", {"note": None, "is_quiet": True, "num": 7}),
    ],
)
def test_values_of_a_file_are_read_as_on_the_command_line(tmp_path, text, values):
    (tmp_path / "c.yaml").write_bytes(text.encode())
    assert call("--config", str(tmp_path / "c.yaml")) == 0
    assert {name: vars(SEEN[-1])[name] for name in values} == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num: 3.7\n", "'3.7' is not a valid integer"),
        ("num: true\n", "'true' is not a valid integer"),
        ("is_quiet: 2\n", "'2' is not a valid boolean"),
        ("note: [1, 9]\n", "sets note to ['1', '9']; write it as on the command line"),
        ("data: [a, {b: c}]\n", "sets data to"),
        ("share: 0.5\nnote: a\n--share: 0.1\n", "share is there twice"),
    ],
)
def test_values_that_a_file_cannot_mean(tmp_path, capsys, text, words):
    (tmp_path / "c.yaml").write_text(text)
    assert call("--config", str(tmp_path / "c.yaml")) == 2
    assert words in capsys.readouterr().err


def test_file_that_a_run_wrote_is_read_back(tmp_path):
    config = _Config(out="0x1f", note="no", share=1e-7, data=("a b", "1.5", "~"), is_quiet=True)
    (tmp_path / "c.yaml").write_text(save_config(config))
    assert call("--config", str(tmp_path / "c.yaml"), "--out", "0x1f") == 0
    assert SEEN[-1] == config


def test_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "c.yaml").write_bytes(b"data: \xff\n")
    assert call("--config", str(tmp_path / "c.yaml")) == 2
    assert "c.yaml is not YAML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--out", ""), "--out is empty; give a value"),
        (("--share", "nan"), "--share nan is no number"),
    ],
)
def test_values_that_types_let_through(args, words, capsys: pytest.CaptureFixture[str]):
    assert call(*args) == 2
    assert words in capsys.readouterr().err


def test_paths_are_printed_whole(capsys: pytest.CaptureFixture[str]):
    print_config(_Config(out="/a/folder/of/many/words" * 9), out="x", title="probe")
    printed = capsys.readouterr().err
    assert "…" not in printed
    assert "/a/folder/of/many/words" * 9 in "".join(printed.split())


@pytest.mark.parametrize("how", ["be_stopped", "be_stopped_while_reading"])
def test_signal_that_a_library_makes_another_error_of(how: str, capsys: pytest.CaptureFixture[str]):
    assert call(function=how) == 3
    assert capsys.readouterr().err.startswith("error: stopped by SIGTERM")


def test_place_of_others(capsys: pytest.CaptureFixture[str]):
    assert call(function="be_kept_out") == 2
    assert "'/theirs/store'; give a file or folder that you may" in capsys.readouterr().err


def test_disk_that_fails_is_no_bug(capsys: pytest.CaptureFixture[str]):
    assert call(function="lose_the_disk") == 3
    assert "features/c/1/0/0/0': the disk, or the way to it, fails" in capsys.readouterr().err


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_config(_Config(out="x", note="think [THINK][/THINK]"), out="to/[b]", title="probe")
    printed = capsys.readouterr().err
    assert "[THINK][/THINK]" in printed
    assert "to/[b]" in printed
