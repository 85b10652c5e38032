"""dflash-cache: look at a store, check it, mend it, copy it, or give samples up."""

from dataclasses import dataclass

import click

from dflash_offline.common.options import (
    CONTEXT,
    click_command,
    entry_point,
    option,
    version_option,
)

_URL = "Store, a folder or any fsspec URL."


def _storage_option() -> tuple[str, ...]:
    return option(
        help="Option of the URL's file system as KEY=VALUE, such as endpoint_url=http://host:9000.",
        multiple=True,
        secret=True,
        metavar="KEY=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class _OneStore:
    url: str = option(help=_URL, argument=True, metavar="URL")
    storage_option: tuple[str, ...] = _storage_option()


@dataclass(frozen=True, kw_only=True)
class InfoConfig(_OneStore):
    """Options of `dflash-cache info`."""

    json: bool = option(False, help="Print one JSON object instead of tables.")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(_OneStore):
    """Options of `dflash-cache verify`."""

    deep: bool = option(
        False, help="Read every byte: checksums, gaps, finite states, token ids in range."
    )
    threads: int = option(4, help="Packs checked at the same time.", type=click.IntRange(1, 256))


@dataclass(frozen=True, kw_only=True)
class RepairConfig(_OneStore):
    """Options of `dflash-cache repair`."""

    retry_quarantined: bool = option(
        False, help="Give up packs with quarantined samples too, so that they are computed again."
    )


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(_OneStore):
    """Options of `dflash-cache preview`."""

    sample: str | None = option(help="Sample id; the first sample when left out.")
    max_tokens: int = option(400, help="Tokens shown at most.", type=click.IntRange(1))


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """Options of `dflash-cache copy`."""

    source: str = option(help=_URL, argument=True, metavar="SRC")
    destination: str = option(help=_URL, argument=True, metavar="DST")
    storage_option: tuple[str, ...] = _storage_option()
    codec: str | None = option(help="Codec of the copy; that of SRC when left out.")
    layers: str | None = option(help="Layer ids to keep, as 1,9,17; all when left out.")
    where: str | None = option(help="Condition on samples, as 'source == \"code\"'.")


@dataclass(frozen=True, kw_only=True)
class RemoveConfig(_OneStore):
    """Options of `dflash-cache rm`."""

    where: str | None = option(help="Take out the samples that meet this condition, and no others.")
    yes: bool = option(False, help="Do not ask.")


_COMMANDS = (
    (
        InfoConfig,
        "info",
        "Show what a store holds: identity, sizes, lengths, sources.",
        "dflash-cache info demo-out/cache",
        "dflash_offline.common.cache_info:info",
    ),
    (
        VerifyConfig,
        "verify",
        "Check a store; exit 1 naming pack and array, or file, of everything that is wrong.",
        "dflash-cache verify --deep demo-out/cache",
        "dflash_offline.common.cache_verify:verify",
    ),
    (
        RepairConfig,
        "repair",
        "Give up what is broken and clean up, so that the next dflash-extract redoes just that.",
        "dflash-cache repair demo-out/cache",
        "dflash_offline.common.cache_edit:repair",
    ),
    (
        PreviewConfig,
        "preview",
        "Print a sample's text with its supervised tokens marked.",
        "dflash-cache preview demo-out/cache --sample demo:3",
        "dflash_offline.common.cache_info:preview",
    ),
    (
        CopyConfig,
        "copy",
        "Copy a store, or part of it; run again to resume. Every byte is checked on the way.",
        "dflash-cache copy demo-out/cache /mnt/fast/cache --codec raw",
        "dflash_offline.common.cache_copy:copy",
    ),
    (
        RemoveConfig,
        "rm",
        "Remove a store, or the samples that meet a condition: their states and their tokens.",
        "dflash-cache rm demo-out/cache --where 'source == \"code\"'",
        "dflash_offline.common.cache_edit:remove",
    ),
)


class _Commands(click.Group):
    """Names the commands where none, or an unknown one, is given."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the command, and look at its name."""
        given = args[0] if args else None
        rest = super().parse_args(context, args)
        if given not in self.commands and not context.resilient_parsing:
            problem = "no command is given" if given is None else f"{given} is no command"
            context.fail(f"{problem}; give one of {', '.join(sorted(self.commands))}")
        return rest


main = entry_point(
    _Commands(
        "dflash-cache",
        no_args_is_help=False,
        commands=[
            click_command(
                config, name=name, help=f"{text}\n\n\b\nExample:\n  {example}", run=target
            )
            for config, name, text, example, target in _COMMANDS
        ],
        help=(
            "Look at a cache of hidden states, check it, mend it, copy it.\n\n"
            "\b\nExample:\n  dflash-cache info demo-out/cache"
        ),
        context_settings=CONTEXT,
        params=[version_option("dflash-cache")],
    )
)
