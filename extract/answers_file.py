"""The file of answers: rows are appended as they are finished, and a second run goes on."""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_offline.common.errors import BadInput, Stopped

_ROW_BEGINS = b'{"id": "'
# Of settings that are not called as their options are.
_OPTIONS = {
    "chat_template_sha256": "chat-template (its SHA-256)",
    "chat_template_args": "chat-template-arg",
}


class AnswersFile:
    """An append-only JSONL file whose rows know how they were made.

    Use as a context manager.

    Args:
        path: made when it does not exist.
        target: name of the target, in every row.
        settings: what decides an answer; must be that of the rows already there.

    Raises:
        BadInput: the file holds something else, or rows of other settings.
    """

    def __init__(self, path: Path, *, target: str, settings: Mapping[str, Any]) -> None:
        self.path = path.expanduser()
        self._target = target
        self._settings = dict(settings)
        self.done: set[str] = set()
        self._num_bytes = 0
        self._whole_bytes = self._read() if self.path.exists() else 0

    def __enter__(self) -> "AnswersFile":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        except OSError as problem:
            raise BadInput(
                f"--out {self.path} cannot be written ({problem}); give a file in a folder that can"
            ) from problem
        self._refuse_second_run()
        # A row that a crash cut short is written again.
        self._file.truncate(self._whole_bytes)
        return self

    def _refuse_second_run(self) -> None:
        try:
            # Given up with the file, however the process ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = self._file.tell() == self._num_bytes
        except BlockingIOError:
            is_ours = False
        except OSError:  # a file system without locks
            return
        if not is_ours:
            self._file.close()
            raise BadInput(
                f"--out {self.path} is written by another run; wait for its end, or give another "
                "file"
            )

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Write one finished row.

        Raises:
            Stopped: the disk is full.
        """
        whole = {**row, "key": key, "target": self._target, "settings": self._settings}
        # Messages of Parquet files may have times and the like beside their texts.
        line = json.dumps(whole, ensure_ascii=False, default=str).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise Stopped(
                f"--out {self.path} cannot be written ({problem}); finished rows are safe, run the "
                "same command to go on"
            ) from problem
        self.done.add(key)

    def _read(self) -> int:
        """Check and count the rows that are there; return the bytes of whole ones."""
        content = self.path.read_bytes()
        self._num_bytes = len(content)
        whole_bytes = content.rfind(b"\n") + 1
        # What a crash leaves of a row is cut off; what somebody else wrote is not.
        if not _ROW_BEGINS.startswith(content[whole_bytes:][: len(_ROW_BEGINS)]):
            raise self._foreign(content.count(b"\n") + 1)
        for number, line in enumerate(content[:whole_bytes].splitlines(), start=1):
            try:
                row = json.loads(line)
                self.done.add(row["key"])
                settings = {"target": row["target"], **row["settings"]}
            except (ValueError, KeyError, TypeError) as problem:
                raise self._foreign(number) from problem
            self._compare(settings)
        return whole_bytes

    def _foreign(self, line: int) -> BadInput:
        return BadInput(
            f"--out {self.path} line {line} is not an answer of this command; give a new file"
        )

    def _compare(self, found: Mapping[str, Any]) -> None:
        given = {"target": self._target, **self._settings}
        for name in sorted(given.keys() | found.keys()):
            if given.get(name) != found.get(name):
                option = _OPTIONS.get(name, name.replace("_", "-"))
                raise BadInput(
                    f"--{option} is {given.get(name)!r} but --out {self.path} was written with "
                    f"{found.get(name)!r}; use the same option, or a new file"
                )
