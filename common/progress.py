"""One progress line for a terminal or a log file, and the JSONL log beside it."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.live import Live
from rich.text import Text

from dflash_offline.common.plain_console import plain_console

_PLAIN_INTERVAL_S = 10.0


class ProgressLine:
    """Show `name value` pairs in a fixed order, with the time left.

    On a terminal the line is redrawn in place; elsewhere a plain line is printed at most every
    ten seconds, and once at the end.

    Args:
        total: amount of work in the unit of `update(done=…)`.
        fields: names in the order in which they are shown.
        done: work already done by an earlier run; it does not count for the time left.
    """

    def __init__(
        self, total: float, fields: tuple[str, ...], *, done: float = 0, file: TextIO | None = None
    ) -> None:
        self.total = total
        self.fields = fields
        self._first = self._done = done
        self._start = time.monotonic()
        self._last_plain = float("-inf")
        self._text = ""
        self._file = file if file is not None else sys.stderr
        console = plain_console(self._file)
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live:
            self._live.stop()
        elif self._text:
            self._print()

    def update(self, done: float, values: Mapping[str, str]) -> None:
        """Show the state after `done` units of work; `values` holds a text for every field."""
        self._done = done
        parts = [f"{name} {values[name]}" for name in self.fields]
        self._text = "  ".join([*parts, f"ETA {format_seconds(self._seconds_left())}"])
        if self._live:
            self._live.update(Text(self._text, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._last_plain >= _PLAIN_INTERVAL_S:
            self._print()

    def _print(self) -> None:
        self._last_plain = time.monotonic()
        self._file.write(self._text + "\n")
        self._file.flush()
        self._text = ""

    def _seconds_left(self) -> float:
        done = self._done - self._first
        if done <= 0:
            return float("inf")
        return (time.monotonic() - self._start) / done * max(0.0, self.total - self._done)


def format_seconds(seconds: float) -> str:
    """Return a duration as `1:02:03` or `2:03`; `?` when it is not known."""
    if seconds == float("inf"):
        return "?"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class JsonLog:
    """Append records to a JSONL file, each flushed as it is written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record; values must be plain JSON."""
        self._file.write(json.dumps(record, allow_nan=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
