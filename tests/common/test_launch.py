"""Workers of a job: what becomes of them, and what the user hears when one is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.common.launch import Job, count_workers, launch

# What workers do; they import nothing heavy and start at once.
WORK = """
import os, signal, sys, time
from pathlib import Path
from dflash_offline.common.errors import BadInput, Stopped

def work(config):
    what, folder = config
    rank = int(os.environ["RANK"])
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))
    if what == "finish":
        size, port = os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
        (Path(folder) / f"{rank}.place").write_text(f"{rank} of {size} at {port}")
    elif what in ("bad", "late"):
        first, last = (0, 1) if what == "bad" else (1, 0)
        while rank == last and not (Path(folder) / f"{first}.pid").exists():
            time.sleep(0.05)
        time.sleep(0.3 if rank == last else 0.0)
        raise BadInput("--lr: no good") if rank == 0 else SystemExit(2)
    elif rank == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and what == "bug":
        raise ValueError("never thought of")
    elif rank == 1 and what == "odd":
        os._exit(17)
    else:
        time.sleep(60)
"""
LAUNCH = """
import sys
from dflash_offline.common.launch import Job, launch
from dflash_offline.common.options import exit_code_of
import click
job = Job(command="test", run="work:work", config=sys.argv[1:], safe="go on", stop_s=5.0)
command = click.Command("test", callback=lambda: sys.exit(launch(job, 2)))
sys.exit(exit_code_of(command, []))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def make(what: str) -> Job:
        config = (what, str(tmp_path))
        return Job(command="test", run="work:work", config=config, safe="go on", stop_s=5.0)

    return make


def pids(folder: Path, *, deadline_s: float = 60.0) -> list[int]:
    """Wait for both workers, and return their process numbers."""
    files = [folder / "0.pid", folder / "1.pid"]
    end = time.monotonic() + deadline_s
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, "no workers"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def test_workers_have_places_and_meet_at_one_port(job, tmp_path):
    assert launch(job("finish"), 3) == 0
    places = [(tmp_path / f"{rank}.place").read_text() for rank in range(3)]
    assert [each.split(" at ")[0] for each in places] == ["0 of 3", "1 of 3", "2 of 3"]
    assert len({each.split(" at ")[1] for each in places}) == 1


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("killed", 3, "worker 1 (rank 1 of 2 on vm, cpu) was ended by SIGKILL, as the kernel does"),
        ("odd", 3, "worker 1 (rank 1 of 2 on vm, cpu) was ended by exit code 17; go on"),
        ("bug", 70, "ValueError: never thought of"),
        ("bad", 2, "error: --lr: no good"),
        ("late", 2, "error: --lr: no good"),
    ],
)
def test_the_worker_that_ended_badly_is_named(
    job, is_running, tmp_path, capfd, monkeypatch, what, code, words
):
    monkeypatch.setattr("dflash_offline.common.launch.device_name", lambda rank: "cpu")
    monkeypatch.setattr("platform.node", lambda: "vm")
    assert launch(job(what), 2) == code
    shown = capfd.readouterr().err
    assert words in shown
    assert shown.count("was ended by") == (what in ("killed", "odd"))
    assert what not in ("bad", "late") or shown.count("error: ") == 1
    assert not any(is_running(pid) for pid in pids(tmp_path))


def start(tmp_path: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", LAUNCH, "sleep", str(tmp_path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_workers_die_with_a_killed_launcher(job, is_running, tmp_path):
    job("sleep")
    launcher = start(tmp_path)
    workers = pids(tmp_path)
    launcher.kill()
    launcher.communicate()
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < end, "workers outlived their launcher"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_is_handed_on(job, is_running, tmp_path):
    job("sleep")
    launcher = start(tmp_path)
    workers = pids(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    _, shown = launcher.communicate(timeout=30)
    assert launcher.returncode == 3
    assert "stopped by SIGTERM" in shown
    assert not any(is_running(pid) for pid in workers)


@pytest.mark.parametrize(
    ("num_gpus", "on_cpu", "gpus", "expected"),
    [(0, False, "all", 1), (0, False, "3", 3), (8, False, "all", 8), (8, True, "all", 1)],
)
def test_number_of_workers(num_gpus, on_cpu, gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert count_workers(gpus, on_cpu=on_cpu) == expected


@pytest.mark.parametrize(("num_gpus", "gpus"), [(0, "0"), (0, "some"), (2, "3"), (2, "-1")])
def test_impossible_number_of_workers(num_gpus, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(BadInput, match=f"--gpus {gpus} is not possible here; allowed are"):
        count_workers(gpus, on_cpu=False)
