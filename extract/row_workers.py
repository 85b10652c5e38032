"""Rows through a function on every core, in order, in processes that end with this one.

Processes, because most of the work is Python: chat templates and spans. They are spawned, never
forked: a fork after an object store was touched hangs. Each hangs on a pipe of its own, whose other
end only this process holds, so that it ends when this process does, however that ends.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dflash_offline.common.errors import BadInput, Stopped

_CHUNK_ROWS = 64
_CHUNKS_AHEAD = 2  # for each process
_JOIN_S = 10.0
# Of a process of multiprocessing whose function raises, once its traceback is printed.
_EXIT_BUG = 1


def num_cores() -> int:
    """Return the cores that this process may use."""
    # macOS has no affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def map_rows(
    function: Callable[[Any], Any], rows: Iterable[Any], *, num_workers: int
) -> Iterator[Any]:
    """Yield `function(row)` of every row in order, computed by processes.

    Only a few rows a process are read ahead of the consumer. Close the generator to end the
    processes early.

    Args:
        function: picklable; rows and results are too.
        rows: any length.
        num_workers: processes.

    Raises:
        BadInput: as the function raised it, after the results of the rows before.
        RuntimeError: it raised something else, whose traceback is on standard error.
        Stopped: a process ended by itself.
    """
    if num_workers <= 1:
        yield from map(function, rows)
        return
    iterator = iter(rows)
    with _workers(function, num_workers) as idle, ThreadPoolExecutor(num_workers) as threads:
        pending: deque[Future[_Answer]] = deque()
        try:
            while True:
                chunk = list(islice(iterator, _CHUNK_ROWS))
                if chunk:
                    pending.append(threads.submit(_ask, idle, chunk))
                if len(pending) >= num_workers * _CHUNKS_AHEAD or not chunk:
                    if not pending:
                        return
                    answer = pending.popleft().result()
                    yield from answer.results
                    if answer.problem is not None:
                        raise answer.problem
        finally:
            threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Answer:
    results: list[Any]
    problem: BadInput | None  # of the row after the results


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


@contextlib.contextmanager
def _workers(function: Callable[[Any], Any], count: int) -> Iterator["queue.SimpleQueue[_Worker]"]:
    """Start processes and yield the queue of those that wait for rows."""
    context = multiprocessing.get_context("spawn")
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers = []
    try:
        for number in range(count):
            pipe, far_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(far_end,), name=f"rows-{number}", daemon=True
            )
            process.start()
            far_end.close()
            workers.append(_Worker(process, pipe))
        # Not as an argument: starting a process waits until it has unpickled those, for which it
        # imports what the function needs, seconds each, and the next would start only then.
        packed = ForkingPickler.dumps(function)
        for worker in workers:
            # One that has ended is found when it is given rows.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send_bytes(packed)
            idle.put(worker)
        yield idle
    finally:
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            worker.process.join(_JOIN_S)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join()


def _ask(idle: "queue.SimpleQueue[_Worker]", chunk: Sequence[Any]) -> _Answer:
    worker = idle.get()
    try:
        worker.pipe.send(chunk)
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(_JOIN_S)
        code = worker.process.exitcode
        if code == _EXIT_BUG:
            raise RuntimeError("a process that tokenises rows failed; see its traceback") from None
        raise Stopped(
            f"a process that tokenises rows ended with exit code {code}; was it killed for memory? "
            "The same command starts again"
        ) from None
    finally:
        idle.put(worker)


def _serve(pipe: Connection) -> None:
    # Ctrl-C reaches every process of the terminal; the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    function = _received(pipe)
    while (rows := _received(pipe)) is not None:
        answer = _answer(function, rows)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            pipe.send(answer)


def _received(pipe: Connection) -> Any:
    """Return what the first process sends; None once it is gone."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def _answer(function: Callable[[Any], Any], rows: Sequence[Any]) -> _Answer:
    results: list[Any] = []
    try:
        for row in rows:
            results.append(function(row))
    except BadInput as problem:
        return _Answer(results, problem)
    except MemoryError as problem:
        raise SystemExit(Stopped.exit_code) from problem
    return _Answer(results, None)
