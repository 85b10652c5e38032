"""`dflash-extract` forked from a process that has done its imports; for test_extract_kills.py.

A server: each line of its input is a JSON list, the arguments of a command and last the file that
takes its standard error. It answers with the command's process number, and then with its exit
status. The command's own launcher starts its workers, which are forked too: a run takes a tenth of
the CPU time, and everything behind the imports is what users run.
"""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import transformers.models.qwen3.modeling_qwen3
from forking import fork

from dflash_offline.common import launch
from dflash_offline.extract import corpus, planning, row_journal, run
from dflash_offline.extract.cli import main as command

PRELOADED = (transformers.models.qwen3.modeling_qwen3, run)


class Worker:
    """What the launcher uses of `subprocess.Popen`; forked before the launcher has any thread."""

    def __init__(self) -> None:
        told, tell = os.pipe()
        self.pid = fork(lambda: self._work(told, tell))
        os.close(told)
        self._tell = tell
        self._environment: dict[str, str] = {}
        self.stdin = io.BytesIO()
        self.stdin.close = self._start
        self.returncode: int | None = None

    def _work(self, told: int, tell: int) -> None:
        os.close(tell)
        launch.die_with(os.getppid())
        with open(told, "rb") as pipe:
            # Not up to its end, which workers forked later hold open.
            environment, content = pickle.load(pipe)
        os.setsid()
        os.environ.update(environment)
        sys.stdin = SimpleNamespace(buffer=io.BytesIO(content))
        launch._worker()

    def be_given(self, _command: list[str], *, env: dict[str, str], **_more: object) -> "Worker":
        self._environment = env
        return self

    def _start(self) -> None:
        with open(self._tell, "wb") as pipe:
            pipe.write(pickle.dumps((self._environment, self.stdin.getvalue())))

    def poll(self) -> int | None:
        return self._end(os.WNOHANG)

    def wait(self) -> int | None:
        return self._end(0)

    def _end(self, how: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, how)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_command(arguments: list[str], log: str) -> None:
    """Be `dflash-extract`."""
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if "--plan-only" in arguments:
        # A small corpus is many segments, and this process does all of it.
        corpus._FIRST_ROWS, row_journal._SEGMENT_ROWS = 16, 32
        planning.num_cores = lambda: 1
    num_workers = int(arguments[arguments.index("--gpus") + 1])
    workers = [Worker() for _ in range(num_workers if num_workers > 1 else 0)]
    free = iter(workers)

    def popen(*given: Any, **more: Any) -> Worker:
        return next(free).be_given(*given, **more)

    launch.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)
    command(arguments)


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        *arguments, log = json.loads(line)
        process = fork(lambda given=(arguments, log): run_command(*given))
        answer(process)
        answer(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
