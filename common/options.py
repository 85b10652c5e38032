"""A command's options, declared once as a frozen dataclass and turned into a click command.

The dataclass holds names, defaults, ranges and help; `command` makes the executable from it,
imports the heavy part only when it runs, and maps exceptions to the exit codes 0, 1, 2, 3 and 70.
"""

import dataclasses
import errno
import importlib
import importlib.metadata
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from dflash_offline.common.errors import BadInput, DamagedStore, FoundProblems, Stopped
from dflash_offline.common.signals import signals_stop

EXIT_BUG = 70
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
FAILING_DISK = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO)


def option(
    default: Any = None,
    *,
    help: str,
    type: click.ParamType | Any = None,
    names: tuple[str, ...] = (),
    multiple: bool = False,
    required: bool = False,
    secret: bool = False,
    metavar: str | None = None,
    argument: bool = False,
    group: str | None = None,
) -> Any:
    """Declare one field of a command's dataclass together with its command line option.

    Args:
        default: value when the option is absent; a `bool` makes a flag.
        help: one sentence with the unit.
        type: a click type; ranges and choices render themselves in `--help`.
        names: option spellings, the canonical one first; `--field-name` when empty. Spellings
            that do not name the field are aliases.
        multiple: the option may be repeated; the field is a tuple.
        required: no default; leaving it out is bad input.
        secret: masked wherever the configuration is printed or saved.
        metavar: what stands for the value in `--help`.
        argument: positional, without dashes; always required.
        group: heading in `--help` of this option and of those after it.
    """
    metadata = {
        "help": help,
        "type": type,
        "names": names,
        "multiple": multiple,
        "required": required,
        "secret": secret,
        "metavar": metavar,
        "argument": argument,
        "group": group,
    }
    if required or argument:
        return dataclasses.field(metadata=metadata)
    if multiple:
        return dataclasses.field(default=tuple(default or ()), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def command(config: type, *, name: str, help: str, run: str) -> Callable[..., None]:
    """Make the entry point of a command; see `click_command` for the arguments."""
    return entry_point(click_command(config, name=name, help=help, run=run))


def click_command(config: type, *, name: str, help: str, run: str) -> click.Command:
    """Make a click command from a dataclass.

    Args:
        config: frozen keyword-only dataclass whose fields are declared with `option`.
        name: the command's name, for usage and `--version`.
        help: the command's page; ends with a runnable example (`\\b` keeps its lines).
        run: `"package.module:function"`, imported when the command runs, called with the config.
    """
    parameters = [_click_option(field) for field in dataclasses.fields(config)]

    def body(**values: Any) -> None:
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        _check_values(config, given)
        module, function = run.split(":")
        getattr(importlib.import_module(module), function)(config(**given))

    groups = {field.name: field.metadata["group"] for field in dataclasses.fields(config)}
    return _GroupedCommand(
        name,
        params=[*parameters, _config_file_option(config), version_option(name)],
        callback=body,
        help=help,
        context_settings=CONTEXT,
        groups={name: heading for name, heading in groups.items() if heading},
    )


def _check_values(config: type, given: Mapping[str, Any]) -> None:
    """Refuse what click's types let through: nothing where something must be, addresses, NaN."""
    for field in dataclasses.fields(config):
        name, value = _names(field)[0], given[field.name]
        for each in value if isinstance(value, tuple) else (value,):
            if each == "" and field.metadata["required"]:
                raise BadInput(f"{name} is empty; give a value (is a variable of the shell unset?)")
            # A Path has one slash left of two, and would be a folder called "s3:".
            if isinstance(each, Path) and re.match(r"\w{2,}:/", str(each)):
                raise BadInput(f"{name} {each} is an address; only local paths are allowed here")
            if isinstance(each, float) and math.isnan(each):
                raise BadInput(f"{name} {each} is no number; give one")


class _GroupedCommand(click.Command):
    """Shows options under the headings that their declarations give, in their order."""

    def __init__(self, *args: Any, groups: dict[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups = groups | {"config": "Other"} if groups else {}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the options."""
        if not self._groups:
            super().format_options(context, formatter)
            return
        sections: dict[str, list[tuple[str, str]]] = {}
        heading = "Options"
        for parameter in self.get_params(context):
            heading = self._groups.get(parameter.name or "", heading)
            if (record := parameter.get_help_record(context)) is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}


def entry_point(cli: click.Command) -> Callable[..., None]:
    """Wrap a click command or group so that it exits with this project's codes."""

    def main(args: list[str] | None = None) -> None:
        sys.exit(exit_code_of(cli, args))

    main.cli = cli  # type: ignore[attr-defined]
    return main


def exit_code_of(cli: click.Command, args: list[str] | None = None) -> int:
    """Run a click command and return its exit code; problems go to stderr, one line each."""
    try:
        with signals_stop():
            code = cli.main(args=args, prog_name=cli.name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as problem:
        _complain(problem.format_message())
        return BadInput.exit_code
    except (BadInput, DamagedStore, FoundProblems, Stopped) as problem:
        told = _stopped_before(problem) or problem
        _complain(str(told))
        return told.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("stopped by a signal; what is committed is safe, run the same command to go on")
        return Stopped.exit_code
    except Exception as problem:
        if (stopped := _stopped_before(problem)) is not None:
            # A signal's exception came up inside a library, which made another of it.
            _complain(str(stopped))
            return stopped.exit_code
        if isinstance(problem, OSError) and problem.errno in _NO_ROOM:
            _complain(f"{problem}: what is committed is safe; free space and run the same command")
            return Stopped.exit_code
        if isinstance(problem, OSError) and problem.errno in FAILING_DISK:
            _complain(
                f"{problem}: the disk, or the way to it, fails; what is committed is safe, run the "
                "same command once it works"
            )
            return Stopped.exit_code
        if isinstance(problem, PermissionError):
            _complain(f"{problem}; give a file or folder that you may read and write")
            return BadInput.exit_code
        traceback.print_exc()
        _complain(f"this is a bug in {cli.name}; please report the traceback above")
        return EXIT_BUG


def _stopped_before(problem: BaseException | None) -> Stopped | None:
    while problem is not None and not isinstance(problem, Stopped):
        problem = problem.__context__
    return problem


def _complain(message: str) -> None:
    click.echo("error: " + " ".join(message.split()), err=True)


def config_as_dict(config: Any) -> dict[str, Any]:
    """Return a command's configuration as plain JSON and YAML values, with secrets masked."""
    plain = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata["secret"] and value:
            value = tuple(_masked(v) for v in value) if isinstance(value, tuple) else "***"
        plain[field.name] = _plain(value)
    return plain


def _masked(value: str) -> str:
    name, separator, _ = value.partition("=")
    return f"{name}=***" if separator else "***"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def print_config(config: Any, *, out: str, title: str) -> None:
    """Print the resolved configuration and where the command writes, as one table on stderr."""
    from rich.table import Table

    from dflash_offline.common.plain_console import plain_console

    table = Table(title=f"{title} → {out}", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    # A path that is cut off, as in a log of 80 columns, is of no use.
    table.add_column(overflow="fold")
    for key, value in config_as_dict(config).items():
        table.add_row(f"--{key.replace('_', '-')}", "" if value is None else str(value))
    plain_console(sys.stderr).print(table)


def save_config(config: Any) -> str:
    """Return the resolved configuration as YAML that `--config` reads back."""
    return yaml.safe_dump(config_as_dict(config), sort_keys=False)


def _names(field: dataclasses.Field) -> tuple[str, ...]:
    return field.metadata["names"] or (f"--{field.name.replace('_', '-')}",)


def _click_option(field: dataclasses.Field) -> click.Parameter:
    meta = field.metadata
    if meta["argument"]:
        return click.Argument([field.name], type=meta["type"], metavar=meta["metavar"])
    is_flag = isinstance(field.default, bool)
    extra: dict[str, Any] = {}
    if is_flag:
        extra["is_flag"] = True
    elif not meta["required"]:
        extra["default"] = field.default
    if meta["required"]:
        extra["required"] = True
    return click.Option(
        [*_names(field), field.name],
        type=meta["type"],
        help=meta["help"],
        multiple=meta["multiple"],
        metavar=meta["metavar"],
        show_default=field.default not in (None, ()) and not is_flag,
        **extra,
    )


class _AsWritten(yaml.SafeLoader):
    """Takes values as they are written, so that they are read as on the command line.

    With YAML's own types `3.7` would become the integer 3, `no` false and `0123` the number 83.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name that the base class has
        first: [each for each in found if each[0] == "tag:yaml.org,2002:null"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping without repeated names, of which YAML keeps the last."""
        names = [_field_name(key.value) for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"{twice[0]} is there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _field_name(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def _config_file_option(config: type) -> click.Option:
    known = {field.name: field for field in dataclasses.fields(config)}

    def read(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        try:
            given = yaml.load(path.read_bytes(), _AsWritten) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as problem:
            raise click.BadParameter(f"{path} is not YAML: {problem}") from problem
        if not isinstance(given, dict):
            raise click.BadParameter(f"{path} holds no mapping of option names to values")
        given = {_field_name(key): value for key, value in given.items()}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise click.BadParameter(
                f"{path} sets {', '.join(unknown)}, which this command does not have; "
                "see --help for the names"
            )
        for key, value in given.items():
            each = value if known[key].metadata["multiple"] and isinstance(value, list) else [value]
            if any(isinstance(one, list | dict) for one in each):
                raise click.BadParameter(
                    f"{path} sets {key} to {value!r}; write it as on the command line"
                )
        context.default_map = {
            key: [v] if known[key].metadata["multiple"] and not isinstance(v, list) else v
            for key, v in given.items()
            if v is not None
        }

    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=read,
        metavar="FILE.yaml",
        help="Read options from a YAML file; those on the command line win.",
    )


def version_option(name: str) -> click.Option:
    """Return the `--version` option of a command."""

    def show(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            click.echo(f"{name} {importlib.metadata.version('dflash-offline')}")
            context.exit()

    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version and exit.",
    )
