"""The five commands' `--help`: quick, without heavy imports, complete and with an example."""

import dataclasses
import importlib
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
HEAVY = {"torch", "transformers", "zarr", "numpy", "pyarrow", "triton", "matplotlib", "s3fs"}
# Half a second on a quiet machine, in CPU time so that a busy one changes little; 0.2 measured.
MAX_CPU_S = 0.5
# Options that are no field of a command's dataclass.
EVERYWHERE = {"config", "version", "help"}


def cli_of(entry: str) -> click.Command:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function).cli


def leaves(name: str, cli: click.Command) -> list[tuple[str, click.Command]]:
    """Return the command itself, or the commands of a group."""
    if isinstance(cli, click.Group):
        return [(f"{name} {sub}", each) for sub, each in sorted(cli.commands.items())]
    return [(name, cli)]


def every_command() -> list:
    return [
        pytest.param(command, id=name.replace(" ", "-"))
        for script, entry in SCRIPTS.items()
        for name, command in leaves(script, cli_of(entry))
    ]


def with_config() -> list:
    """Return script and dataclass of every command that is one command, not a group."""
    found = []
    for script, entry in SCRIPTS.items():
        module = importlib.import_module(entry.partition(":")[0])
        configs = [v for v in vars(module).values() if dataclasses.is_dataclass(v)]
        if not isinstance(cli_of(entry), click.Group):
            (config,) = configs
            found.append(pytest.param(script, config, id=script))
    return found


def options(command: click.Command) -> list[click.Option]:
    """Return a command's own options, without those that every command has."""
    own = [each for each in command.params if isinstance(each, click.Option)]
    return [each for each in own if each.name not in EVERYWHERE]


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=command.name))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_quick(script: str):
    path = Path(sys.executable).parent / script
    subprocess.run(
        [path, "--help"], capture_output=True, check=True, timeout=60
    )  # fills the caches
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Usage: {script}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < MAX_CPU_S


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_heavy(script: str):
    module, _, function = SCRIPTS[script].partition(":")
    code = (
        f"import sys\nfrom {module} import {function}\n"
        f"try:\n    {function}(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"print('heavy:', *sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "heavy:"


@pytest.mark.parametrize("script", SCRIPTS)
def test_version(script: str, capsys: pytest.CaptureFixture[str]):
    module, _, function = SCRIPTS[script].partition(":")
    with pytest.raises(SystemExit) as end:
        getattr(importlib.import_module(module), function)(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"{script} 0.1.0\n"


@pytest.mark.parametrize("command", every_command())
def test_page_has_an_example(command: click.Command):
    page = help_of(command)
    assert re.search(r"^ +(\$ )?dflash-", page, re.MULTILINE), page


@pytest.mark.parametrize("command", every_command())
def test_options_say_what_they_do(command: click.Command):
    for option in options(command):
        assert option.help, option.opts
        assert option.help[0].isupper(), option.help
        assert option.help.endswith((".", "]")), option.help
        is_number = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
        is_range = isinstance(option.type, click.IntRange | click.FloatRange)
        assert is_range or not is_number, f"{option.opts} is a number without a range"


@pytest.mark.parametrize(("script", "config"), with_config())
def test_options_are_the_fields(script: str, config: type):
    """Names and defaults are those of the dataclass, and the page shows them."""
    command = cli_of(SCRIPTS[script])
    page = " ".join(help_of(command).split())
    declared = {option.name: option for option in options(command)}
    fields = {field.name: field for field in dataclasses.fields(config)}
    assert list(declared) == list(fields)
    for name, field in fields.items():
        option = declared[name]
        spelled = f"--{name.replace('_', '-')}"
        assert spelled in option.opts, f"{script} has no {spelled}"
        assert option.required == (field.default is dataclasses.MISSING), spelled
        if field.default not in (None, (), dataclasses.MISSING):
            assert option.get_default(click.Context(command)) == field.default
            if not option.is_flag:
                assert f"[default: {field.default}" in page, spelled


def test_options_stand_under_headings():
    page = help_of(cli_of(SCRIPTS["dflash-train"]))
    headings = re.findall(r"^([A-Z].*):$", page, re.MULTILINE)
    assert headings[0] == "Data"
    assert headings[-1] == "Other"
    assert len(headings) == len(set(headings)) > 5
    data, other = page.split("\nData:\n")[1].split("\nRun:\n")[0], page.split("\nOther:\n")[1]
    assert "--cache" in data
    assert "--out" not in data
    assert "--config" in other
