"""Work of a benchmark in several processes, and a JSON line in a file as each piece of it ends."""

import json
import os
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

# For what a worker has in hand when no time is left.
_GRACE_S = 10


def written_records(
    workers: Sequence[SpawnProcess], results: Any, *, out: Path, until: float
) -> Iterator[dict[str, Any]]:
    """Start workers, and yield each record that they make, once it is in the file.

    Args:
        workers: not started; they end by themselves, or are ended soon after `until`.
        results: queue on which they put records, and texts for the user.
        out: records are appended, so that what is there when a run is cut off stays.
        until: in seconds of `time.time`.
    """
    _start(workers)
    with out.open("a") as lines:
        while any(worker.is_alive() for worker in workers) or not results.empty():
            try:
                record = results.get(timeout=1)
            except queue.Empty:
                if time.time() > until + _GRACE_S:
                    break
                continue
            if isinstance(record, str):
                print(record, file=sys.stderr, flush=True)
                continue
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            yield record
    for worker in workers:
        worker.terminate()


def _start(workers: Sequence[SpawnProcess]) -> None:
    """Start workers, one after another on each of the GPUs that this process may use."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    gpus = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    for number, worker in enumerate(workers):
        if gpus:
            os.environ[name] = gpus[number % len(gpus)]
        worker.start()
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return what earlier calls have written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
