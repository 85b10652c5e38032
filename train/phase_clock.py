"""Where the time of a step goes, phase by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward", "backward", "optimizer", "eval")


class PhaseClock:
    """Time by phase; on CUDA from events that are read when `take` is called, without a wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside for a phase."""
        if self._on_device and name not in ("data", "eval"):
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
        for name, start, stop in self._events:
            self._seconds[name] += start.elapsed_time(stop) / 1000
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        self._events = []
        return taken
