"""`dflash-extract` on one machine: in this process, or as one worker process for each GPU.

Workers get the variables that torchrun sets, so that the same code runs under an outer torchrun or
Slurm. Its agent is not used: it hides exit codes, and its workers outlive a kill -9 of it.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time

import click

from dflash_offline.common.errors import BadInput, FoundProblems, Stopped
from dflash_offline.common.options import EXIT_BUG, exit_code_of
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.place import LAUNCHER, Place, die_with_parent, place_in

_POLL_S = 0.1
# After the first worker that ended badly; the rest commit what they can for 6 s.
_GRACE_S = 9.0
_HEARD_S = 1.5
# After the first signal; workers commit for 12 s and have 4 more to end.
_SIGNAL_GRACE_S = 17.0
_SAFE = "what is committed is safe, run the same command to go on"
_OWN_CODES = (0, BadInput.exit_code, FoundProblems.exit_code, Stopped.exit_code, EXIT_BUG)


def extract(config: ExtractConfig) -> None:
    """Run `dflash-extract`: here, or with one process for each GPU that `--gpus` asks for."""
    place = place_in(os.environ)
    if place is not None:
        if config.gpus != "all" and not place.launched:
            raise BadInput(
                f"--gpus {config.gpus} is for a run that starts its own workers, and these were "
                "started by torchrun or Slurm; leave it out, and start as many as there are GPUs"
            )
        die_with_parent(os.environ)
        check_group_size(config.tp, place.size)
        run_here(config, place)
        return
    num_workers = count_workers(config.gpus)
    check_group_size(config.tp, num_workers)
    if num_workers == 1 or config.dry_run or config.plan_only:
        run_here(config, Place())
        return
    code = Launcher(config, num_workers).run()
    if code:
        raise SystemExit(code)


def run_here(config: ExtractConfig, place: Place) -> None:
    """Be one worker of a run, or all of it."""
    try:
        from dflash_offline.extract import run

        run.extract(config, place)
    except Stopped:
        if place.launched and not place.is_first:
            # The first worker or the launcher tells the user.
            raise SystemExit(Stopped.exit_code) from None
        raise


def check_group_size(tp: int, num_workers: int) -> None:
    """Refuse a `--tp` that leaves workers over.

    Raises:
        BadInput: the number of workers is not a multiple.
    """
    if num_workers % tp:
        raise BadInput(
            f"--tp {tp} cannot be had with {num_workers} worker process(es); give --gpus, or "
            f"start, a multiple of {tp}"
        )


def count_workers(gpus: str) -> int:
    """Return how many processes `--gpus` means on this machine.

    Raises:
        BadInput: not a number, or more than there are.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if gpus == "all":
        return max(1, num_gpus)
    if not gpus.isdecimal() or gpus == "0" or (num_gpus and int(gpus) > num_gpus):
        allowed = f"1 to {num_gpus}" if num_gpus else "numbers from 1 (workers on the CPU)"
        raise BadInput(f"--gpus {gpus} is not possible here; allowed are {allowed}, and all")
    return int(gpus)


class Launcher:
    """The workers of one machine as child processes."""

    def __init__(self, config: ExtractConfig, num_workers: int) -> None:
        self._config = config
        self._num_workers = num_workers
        self._workers: list[subprocess.Popen] = []
        self._stop_at = self._kill_at = float("inf")
        self._has_terminated = self._has_killed = False
        self._stopped_by = ""

    def run(self) -> int:
        """Start the workers, hand on signals, wait; returns the exit code for the command."""
        from torch.distributed import TCPStore

        # In this process, so that a port is chosen without a race and no worker's end closes it.
        meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            self._workers = [self._start(rank, meeting.port) for rank in range(self._num_workers)]
            return self._wait()
        finally:
            for worker in self._workers:
                worker.kill()
                worker.wait()

    def _wait(self) -> int:
        code: int | None = None
        is_running = True
        while is_running:
            try:
                time.sleep(_POLL_S)
                is_running = any(worker.poll() is None for worker in self._workers)
                code = self._watch(code)
            except Stopped as problem:
                self._stopped_by = str(problem)
                # The command's handler lets a second signal end this process at once, and the
                # kernel ends the workers with it.
                self._kill_at = time.monotonic() + _SIGNAL_GRACE_S
                self._terminate()
        return self._workers[0].returncode if code is None else code

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
        environment = os.environ | {name: str(value) for name, value in place.items()}
        worker = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.extract.launch"],
            env=environment,
            stdin=subprocess.PIPE,
            # A Ctrl-C reaches this process alone, which hands it on once.
            start_new_session=True,
        )
        assert worker.stdin is not None
        # Not in the arguments, which every user of the machine can read.
        worker.stdin.write(pickle.dumps(self._config))
        worker.stdin.close()
        return worker

    def _watch(self, code: int | None) -> int | None:
        """Return the command's exit code once a worker ended badly."""
        for rank, worker in enumerate(self._workers):
            ended = worker.poll()
            if code is None and ended not in (None, 0):
                code = self._explain(rank, ended)
            # Whoever ends with 3 has heard of the stop, and so have the others.
            if ended not in (None, 0, Stopped.exit_code):
                self._stop_at = min(self._stop_at, time.monotonic() + _HEARD_S)
                self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_S)
        if time.monotonic() > self._stop_at:
            # They know it from each other, unless it ended before they met.
            self._terminate()
        if time.monotonic() > self._kill_at and not self._has_killed:
            self._has_killed = True
            for worker in self._workers:
                worker.kill()
        return code

    def _terminate(self) -> None:
        # Once: a second signal ends a worker that is still committing.
        if not self._has_terminated:
            self._has_terminated = True
            for worker in self._workers:
                worker.terminate()

    def _explain(self, rank: int, ended: int) -> int | None:
        """Tell the user what a worker could not tell; returns the exit code where that decides."""
        if ended in _OWN_CODES:
            # Of others than the first, rank 0 says what they ended of.
            return ended if rank == 0 else None
        if self._has_killed:
            click.echo("error: workers did not end in time and were killed; " + _SAFE, err=True)
            return Stopped.exit_code
        if ended == -signal.SIGTERM and self._has_terminated:
            # Before it could listen to signals; who ended first, or the first worker, says why.
            if rank:
                return None
            if self._stopped_by:
                click.echo(f"error: {self._stopped_by}", err=True)
            return Stopped.exit_code
        how = f"exit code {ended}" if ended > 0 else signal.Signals(-ended).name
        hint = ", as the kernel does when memory runs out" if ended == -signal.SIGKILL else ""
        place = Place(rank=rank, size=self._num_workers, local_rank=rank, launched=True)
        click.echo(
            f"error: {place.describe(device_name(rank))} was ended by {how}{hint}; {_SAFE}",
            err=True,
        )
        return Stopped.exit_code


def device_name(local_rank: int) -> str:
    """Return the name of a worker's device, for messages."""
    import torch

    return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"


def _worker() -> None:
    die_with_parent(os.environ)
    config = pickle.load(sys.stdin.buffer)
    # Before signals become exceptions: some packages take one during their import for a reason to
    # do without a module, and go on. Until here a signal simply ends the process.
    importlib.import_module("dflash_offline.extract.run")
    command = click.Command("dflash-extract", callback=lambda: extract(config))
    sys.exit(exit_code_of(command, []))


if __name__ == "__main__":
    _worker()
