"""A command as several worker processes of one machine, one for each GPU.

Workers get the variables that torchrun sets, so that the same code runs under an outer torchrun.
Its agent is not used: it hides exit codes, and its workers outlive a kill -9 of it.
"""

import ctypes
import importlib
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import click

from dflash_offline.common.errors import BadInput, FoundProblems, Stopped
from dflash_offline.common.options import EXIT_BUG, exit_code_of

# Set for the processes that this module starts: the process number of the launcher.
LAUNCHER = "DFLASH_LAUNCHER_PID"
_POLL_S = 0.1
# After the first worker that ended badly: until the others are told, and until they are killed.
_TELL_S, _KILL_S = 1.5, 9.0
_PR_SET_PDEATHSIG = 1
# Codes with which a worker has said itself what it ended of.
_OWN_CODES = {BadInput.exit_code, FoundProblems.exit_code, Stopped.exit_code, EXIT_BUG}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker does."""

    command: str  # its name, for messages
    run: str  # "package.module:function", called with the configuration
    config: Any
    safe: str  # what a message about a lost worker ends with
    stop_s: float  # for which workers may still write after a signal
    # Workers tell each other how they end, and the first tells the user, where they still can.
    first_tells: bool = False
    # Each worker gets its part of the cores; with another number of them sums may round otherwise.
    shares_cores: bool = True


def is_worker() -> bool:
    """Say whether a launcher, ours or another, has given this process a place in a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_gpus(gpus: str) -> None:
    """Refuse a number of `--gpus` in a process that another launcher has started.

    Raises:
        BadInput: it is not `all`.
    """
    if gpus != "all":
        raise BadInput(
            f"--gpus {gpus} is for a run that starts its own workers, and these were started by "
            "torchrun or Slurm; leave it out, and start as many as there are GPUs"
        )


def count_workers(gpus: str, *, on_cpu: bool) -> int:
    """Return how many processes `--gpus` means on this machine.

    Args:
        gpus: `all` or a number.
        on_cpu: leave GPUs alone; a number then means workers on the CPU.

    Raises:
        BadInput: not a number, or more than there are.
    """
    import torch

    num_gpus = 0 if on_cpu else torch.cuda.device_count()
    if gpus == "all":
        return max(1, num_gpus)
    if not gpus.isdecimal() or gpus == "0" or (num_gpus and int(gpus) > num_gpus):
        allowed = f"1 to {num_gpus}" if num_gpus else "numbers from 1 (workers on the CPU)"
        raise BadInput(f"--gpus {gpus} is not possible here; allowed are {allowed}, and all")
    return int(gpus)


def launch(job: Job, num_workers: int) -> int:
    """Run a job in worker processes; returns the exit code for the command."""
    return _Launcher(job, num_workers).run()


class _Launcher:
    def __init__(self, job: Job, num_workers: int) -> None:
        self._job = job
        self._num_workers = num_workers
        self._workers: list[subprocess.Popen] = []
        # Exit codes by rank, in order, of those that ended badly before anybody was told to stop.
        self._bad: dict[int, int] = {}
        self._tell_at = self._kill_at = float("inf")
        self._asked_by = ""
        self._has_told = self._has_killed = False

    def run(self) -> int:
        from torch.distributed import TCPStore

        # In this process, so that a port is chosen without a race and no worker's end closes it.
        meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            self._workers = [self._start(rank, meeting.port) for rank in range(self._num_workers)]
            self._wait()
        finally:
            for worker in self._workers:
                worker.kill()
                worker.wait()
        return self._exit_code()

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._num_workers,
            "LOCAL_WORLD_SIZE": self._num_workers,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            LAUNCHER: os.getpid(),
            # A worker that ends closes connections, which torch reports with a stack trace.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        environment = dict(os.environ)
        if self._job.shares_cores:
            threads = max(1, (os.cpu_count() or 1) // self._num_workers)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        worker = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.common.launch"],
            env=environment | {name: str(value) for name, value in place.items()},
            stdin=subprocess.PIPE,
            # A Ctrl-C reaches this process alone, which hands it on once.
            start_new_session=True,
        )
        assert worker.stdin is not None
        # Not in the arguments, which every user of the machine can read.
        worker.stdin.write(pickle.dumps(self._job))
        worker.stdin.close()
        return worker

    def _wait(self) -> None:
        while any(worker.poll() is None for worker in self._workers):
            try:
                time.sleep(_POLL_S)
                self._watch()
            except Stopped as problem:
                # The command's handler lets a second signal end this process at once, and the
                # kernel ends the workers with it.
                self._asked_by = str(problem)
                self._kill_at = time.monotonic() + self._job.stop_s
                self._tell()
        self._watch()

    def _watch(self) -> None:
        now = time.monotonic()
        ended = {rank: w.returncode for rank, w in enumerate(self._workers) if w.poll()}
        if not self._has_told:
            for rank, code in ended.items():
                self._bad.setdefault(rank, code)
        # Whoever has heard of a stop ends with 3, and the others have heard of it too.
        heard = (Stopped.exit_code,) if self._job.first_tells else ()
        if not self._has_told and any(code not in heard for code in ended.values()):
            self._tell_at = min(self._tell_at, now + _TELL_S)
            self._kill_at = min(self._kill_at, now + _KILL_S)
        if now > self._tell_at:
            self._tell()
        if now > self._kill_at and not self._has_killed:
            self._has_killed = True
            for worker in self._workers:
                worker.kill()

    def _tell(self) -> None:
        # Once: a second signal ends a worker that is still writing.
        if not self._has_told:
            self._has_told = True
            for worker in self._workers:
                worker.terminate()

    def _exit_code(self) -> int:
        """Tell the user what no worker could tell; returns the command's exit code."""
        codes = [worker.returncode for worker in self._workers]
        if self._has_killed and (self._asked_by or not self._bad):
            _complain(f"workers did not end in time and were killed; {self._job.safe}")
            return Stopped.exit_code
        if self._asked_by and codes[0] in (0, *_OWN_CODES):
            return codes[0]
        if self._asked_by and codes[0] == -signal.SIGTERM:
            # Before it could listen to signals.
            _complain(self._asked_by)
            return Stopped.exit_code
        # Whoever was killed first is why the others ended; of those that ended by themselves, one
        # that lost the others, or was told to stop with them, is not the reason.
        bad = self._bad or {rank: code for rank, code in enumerate(codes) if code}
        if not bad:
            return 0
        is_said = next(iter(bad)) == 0 or set(bad.values()) <= _OWN_CODES
        if self._job.first_tells and codes[0] in _OWN_CODES and is_said:
            return codes[0]
        quiet = (BadInput.exit_code, Stopped.exit_code)
        rank = min(bad, key=lambda rank: (bad[rank] in _OWN_CODES, bad[rank] in quiet))
        code = bad[rank]
        # Bad input is found by all, and the first says it, which may have been the last to end.
        is_told = rank == 0 or code not in quiet or codes[0] == code == BadInput.exit_code
        if code in _OWN_CODES and is_told:
            return code
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        place = f"rank {rank} of {self._num_workers} on {platform.node()}, {device_name(rank)}"
        _complain(f"worker {rank} ({place}) was ended by {how}{hint}; {self._job.safe}")
        return code if code in _OWN_CODES else Stopped.exit_code


def device_name(local_rank: int) -> str:
    """Return the name of a worker's device, for messages."""
    import torch

    return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"


def die_with(parent: int) -> None:
    """Let the kernel end this process when its parent is gone, which may be by now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _complain(message: str) -> None:
    click.echo("error: " + message, err=True)


def _worker() -> None:
    die_with(int(os.environ[LAUNCHER]))
    job: Job = pickle.load(sys.stdin.buffer)
    module, name = job.run.split(":")
    # Before signals become exceptions: some packages take one during their import for a reason to
    # do without a module, and go on. Until here a signal simply ends the process.
    function = getattr(importlib.import_module(module), name)
    command = click.Command(job.command, callback=lambda: function(job.config))
    sys.exit(exit_code_of(command, []))


if __name__ == "__main__":
    # Pickled as a class of the module's own name.
    from dflash_offline.common.launch import _worker as worker

    worker()
