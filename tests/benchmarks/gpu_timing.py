"""What benchmarks share: the revision they name, and times of single kernels in events."""

import statistics
import subprocess
from importlib.metadata import version

import torch


def revision() -> str:
    """Return the commit, where there is a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def heading(commit: str) -> str:
    """Return what every figure is of: card, versions and commit."""
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, triton {version('triton')}, commit {commit}"


def busy(cycles: int = 2_000_000) -> None:
    """Keep the GPU from starting for about a millisecond, as work of a step that came before.

    What is timed after it finds a queue, so the host's first calls are not in its time.
    """
    torch.cuda._sleep(cycles)


def timed_ms(run) -> float:
    """Time one `run` with events, behind a queue."""
    busy()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def median_ms(run, repeats: int) -> float:
    """Time `run` alone, `repeats` times after two."""
    return statistics.median([timed_ms(run) for _ in range(repeats + 2)][2:])
