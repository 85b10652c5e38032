"""The five commands' `--help`: quick, without heavy imports, complete and with an example."""

import importlib
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
# Added to every command by `command`, not a field of its dataclass.
EXTRA = {"config", "version", "show", "help"}


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


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=command.name, max_content_width=100))


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
    assert "$ dflash-" in page or "\n  dflash-" in page, page


@pytest.mark.parametrize("command", every_command())
def test_options_say_what_they_do(command: click.Command):
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            continue
        assert parameter.help, parameter.opts
        assert parameter.help[0].isupper() or parameter.help[0] == "`", parameter.help
        assert parameter.help.endswith("."), parameter.help
        is_number = isinstance(
            parameter.type, click.types.IntParamType | click.types.FloatParamType
        )
        is_range = isinstance(parameter.type, click.IntRange | click.FloatRange)
        assert is_range or not is_number, f"{parameter.opts} is a number without a range"


@pytest.mark.parametrize("command", every_command())
def test_page_shows_defaults(command: click.Command):
    page = help_of(command)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in EXTRA:
            has_default = parameter.default not in (None, (), click.core.UNSET)
            if has_default and not parameter.is_flag and not parameter.required:
                assert parameter.show_default, f"{parameter.opts} hides its default"
    assert "[default: " in page or "[required]" in page or "Usage" in page
