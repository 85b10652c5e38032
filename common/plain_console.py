"""The one way in which commands print for people: what a text says, and nothing read into it."""

from typing import TextIO

from rich.console import Console


def plain_console(file: TextIO) -> Console:
    """Return a console for standard output, standard error or a log.

    Names of users may look like marks for colours or emoji, and highlighting a long id takes
    minutes.
    """
    return Console(file=file, markup=False, highlight=False, emoji=False)
