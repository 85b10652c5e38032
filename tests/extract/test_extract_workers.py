"""Several worker processes: the same bytes as one, and no worker that dies or stays unnoticed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.extract.cli import main as extract_command

pytestmark = pytest.mark.slow

SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--codec", "raw")
MAIN = "from dflash_offline.extract.cli import main; main()"


class Command:
    """`dflash-extract` as a shell starts it."""

    def __init__(self, *args: object, launcher: tuple[str, ...] = ("-c", MAIN)) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *map(str, args)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, within_s: float = 300) -> tuple[int, list[str]]:
        """Wait for it; returns the exit code and the lines that say what went wrong."""
        try:
            _, said = self.process.communicate(timeout=within_s)
        finally:
            self.process.kill()
        lines = said.splitlines()
        assert not any("Traceback" in line for line in lines), said
        return self.process.returncode, [line for line in lines if line.startswith("error:")]

    def workers(self) -> list[int]:
        """Process numbers of the workers, by rank."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def await_commits(self, store: Path, count: int) -> None:
        give_up = time.monotonic() + 300
        while len(list((store / "commit").glob("*.json"))) < count:
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.process.kill()
                raise AssertionError(self.process.communicate()[1])
            time.sleep(0.01)


@pytest.fixture
def arguments(make_target, write_corpus):
    """Options of a run of several units; `arguments(count, out)`."""

    def make(count: int, out: Path) -> tuple[object, ...]:
        data = write_corpus(count, f"chat-{count}.jsonl")
        return ("--target", make_target("qwen3"), "--data", data, "--out", out, *SMALL)

    return make


def test_content_is_the_same_at_any_number_of_workers(arguments, run, state_files, tmp_path):
    expected = None
    for count in (1, 2, 3):
        out = tmp_path / f"workers-{count}"
        args = (*arguments(150, out), "--teacher", "final", "--gpus", count)
        code, errors = Command(*args).end()
        assert (code, errors) == (0, [])
        expected = expected or state_files(out)
        assert state_files(out) == expected
        assert open_cache(str(out)).is_complete
        assert run(cache_command, "verify", "--deep", out) == 0
        assert len(list((out / "logs").glob("extract*.jsonl"))) == count


def test_torchrun_starts_workers_too_on_several_nodes(arguments, run, state_files, tmp_path):
    """Two groups that meet at an address, as the torchruns of two nodes do."""
    args = arguments(60, tmp_path / "here")
    assert run(extract_command, *args) == 0
    main = tmp_path / "main.py"
    main.write_text(MAIN)
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}")
    args = arguments(60, tmp_path / "there")
    nodes = [Command(*args, launcher=(*torchrun, *meeting, str(main))) for _ in range(2)]
    assert [node.end() for node in nodes] == 2 * [(0, [])]
    assert state_files(tmp_path / "there") == state_files(tmp_path / "here")
    assert len(list((tmp_path / "there/logs").glob("extract*.jsonl"))) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_worker_stops_the_run_which_goes_on_later(
    rank, arguments, run, is_running, state_files, tmp_path
):
    """And the rerun, with another number of workers, finishes to the same bytes."""
    store = tmp_path / "store"
    command = Command(*arguments(500, store), "--gpus", 2)
    command.await_commits(store, 3)
    workers = command.workers()
    os.kill(workers[rank], signal.SIGKILL)
    killed = time.monotonic()
    code, errors = command.end(within_s=10)
    assert time.monotonic() - killed < 10
    assert code == 3
    assert len(errors) == 1, errors
    error = errors[0]
    assert f"worker {rank} (rank {rank} of 2 on " in error
    assert "SIGKILL" in error
    assert not any(map(is_running, workers))
    partial = open_cache(str(store), partial=True)
    assert len(partial.packs) < partial.plan.num_packs
    code, errors = Command(*arguments(500, store), "--gpus", 1).end()
    assert (code, errors) == (0, [])
    assert run(extract_command, *arguments(500, tmp_path / "whole")) == 0
    assert state_files(store) == state_files(tmp_path / "whole")


def test_killed_worker_of_a_shared_target_is_named(arguments, tmp_path):
    """The leader waits for it inside a collective, from which no signal wakes it."""
    store = tmp_path / "store"
    command = Command(*arguments(500, store), "--gpus", 2, "--tp", 2)
    command.await_commits(store, 2)
    os.kill(command.workers()[1], signal.SIGKILL)
    code, errors = command.end(within_s=12)
    assert code == 3
    assert ["worker 1 (rank 1 of 2 on " in error for error in errors] == [True]


def test_workers_die_with_a_killed_launcher(arguments, is_running, tmp_path):
    store = tmp_path / "store"
    command = Command(*arguments(500, store), "--gpus", 2)
    command.await_commits(store, 1)
    workers = command.workers()
    assert len(workers) == 2
    command.process.kill()
    command.process.communicate()
    give_up = time.monotonic() + 5
    while any(map(is_running, workers)):
        assert time.monotonic() < give_up, "a worker outlives its launcher"
        time.sleep(0.05)


def test_signal_commits_what_is_complete(arguments, tmp_path):
    store = tmp_path / "store"
    command = Command(*arguments(500, store), "--gpus", 2)
    command.await_commits(store, 3)
    command.process.send_signal(signal.SIGINT)
    code, errors = command.end(within_s=20)
    assert code == 3
    assert len(errors) == 1, errors
    error = errors[0]
    assert "SIGTERM" in error
    partial = open_cache(str(store), partial=True)
    assert 3 <= len(partial.packs) < partial.plan.num_packs


def test_second_signal_ends_at_once(arguments, is_running, tmp_path):
    store = tmp_path / "store"
    command = Command(*arguments(500, store), "--gpus", 2)
    command.await_commits(store, 1)
    workers = command.workers()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # as if they could not end by themselves
    command.process.terminate()
    time.sleep(1)
    command.process.terminate()
    assert command.process.wait(timeout=3) == -signal.SIGTERM
    command.process.communicate()
    time.sleep(0.5)
    assert not any(map(is_running, workers))


def test_bad_input_is_said_once(arguments, tmp_path):
    code, errors = Command(*arguments(5, tmp_path / "s"), "--layers", "99", "--gpus", 2).end()
    assert code == 2
    assert len(errors) == 1
    code, errors = Command(*arguments(5, tmp_path / "s"), "--gpus", "none").end()
    assert code == 2
    assert "--gpus none is not possible here" in errors[0]
