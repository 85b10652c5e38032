"""From batches on their way to host memory to committed packs, in threads behind the forward.

One thread takes batches off the device and moves their rows into packs, in the order of the
batches; a few encode, check and write packs that are complete. Every queue is bounded by the memory
it stands for: the ring's buffers and two units of packs. What fails in a thread is raised in the
main thread, where it ends the run.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dflash_offline.common.store_writer import Store
from dflash_offline.extract.pack_buffers import PackBuffer, PackPool
from dflash_offline.extract.row_workers import num_cores
from dflash_offline.extract.state_ring import StateBuffer, StateRing
from dflash_offline.extract.tally import Tally

_MAX_WRITERS = 8
# One core copies 2 GB/s into memory that is not in its caches.
_MOVERS = 4
_POLL_S = 0.01
# What is being written when a run is stopped may still become a pack.
_JOIN_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A batch of the plan, or the part of one that a split left.

    Attributes:
        samples: sample indices, in the order of the rows.
        split: (unit, batch) when an out-of-memory error split the batch.
    """

    samples: Sequence[int]
    split: tuple[int, int] | None = None


def num_writers(workers_here: int) -> int:
    """Return how many threads of each worker of this machine encode, check and write packs."""
    return max(1, min(_MAX_WRITERS, num_cores() // workers_here))


class Pipeline:
    """Use as a context manager; leaving it drops what is not being written yet."""

    def __init__(
        self,
        store: Store,
        ring: StateRing,
        tally: Tally,
        *,
        run_info: Mapping[str, Any],
        writers: int,
    ) -> None:
        self._store = store
        self._ring = ring
        self._pool = PackPool(store)
        self._tally = tally
        self._run_info = run_info
        plan = store.plan
        self._packs, self._starts = plan.column("pack"), plan.column("start")
        self._lengths = plan.column("length")
        self._wanted = set(range(plan.num_packs)) - store.committed
        self._open: dict[int, PackBuffer] = {}
        self._splits: dict[int, list[tuple[int, int]]] = {}
        self._batches: queue.SimpleQueue[tuple[StateBuffer, Part] | None] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[PackBuffer | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._unfinished = 0  # batches and complete packs
        self._problem: BaseException | None = None
        self._is_closed = False
        works = [self._fill_packs, *[self._commit_packs] * writers]
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=work.__name__, daemon=True)
            for work in works
        ]

    def __enter__(self) -> "Pipeline":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_closed = True
        self._batches.put(None)
        for _ in self._threads[1:]:
            self._complete.put(None)
        give_up = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def check(self) -> None:
        """Raise what failed in a thread."""
        if self._problem is not None:
            raise self._problem

    def is_wanted(self, sample: int) -> bool:
        """Return whether a sample's pack was not committed when this run began."""
        return int(self._packs[sample]) in self._wanted

    def buffer(self) -> StateBuffer:
        """Wait for a buffer of the ring; this is where a slow disk holds the forward up."""
        return self._ring.acquire(self.check)

    def submit(self, buffer: StateBuffer, part: Part) -> None:
        """Hand over a batch whose forward has been started."""
        with self._guard:
            self._unfinished += 1
        self._batches.put((buffer, part))

    def drain(self, seconds_left: Callable[[], float]) -> None:
        """Wait until every batch is in its packs and every complete pack is committed.

        Args:
            seconds_left: asked again and again; nothing is waited for once it is 0.
        """
        while self._unfinished and seconds_left() > 0:
            self.check()
            time.sleep(_POLL_S)
        self.check()

    def assert_done(self) -> None:
        """Check that no pack waits for samples."""
        assert not self._open, f"packs {sorted(self._open)} have samples in no batch of their unit"

    def count(self) -> None:
        """Bring the queue depths of the tally up to date."""
        self._tally.copying = self._ring.num_used
        self._tally.queued_packs = self._complete.qsize()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        # Whatever it is, the main thread raises it.
        except BaseException as problem:
            self._problem = self._problem or problem

    def _fill_packs(self) -> None:
        with ThreadPoolExecutor(_MOVERS, thread_name_prefix="rows") as movers:
            while (job := self._batches.get()) is not None:
                buffer, part = job
                states = self._ring.to_host(buffer)
                moves, first = [], 0
                for sample in part.samples:
                    rows = slice(first, first + int(self._lengths[sample]))
                    first = rows.stop
                    if self.is_wanted(sample):
                        pack, start = self._pack_of(sample, part), int(self._starts[sample])
                        moves.append(movers.submit(pack.put, sample, start, states, rows))
                for move in moves:
                    move.result()
                self._ring.release(buffer)
                self._hand_on_complete()
                self._finish_one()

    def _pack_of(self, sample: int, part: Part) -> PackBuffer:
        pack = int(self._packs[sample])
        if pack not in self._open:
            self._open[pack] = self._pool.acquire(pack, self._stay_open)
        if part.split is not None and part.split not in self._splits.setdefault(pack, []):
            self._splits[pack].append(part.split)
        return self._open[pack]

    def _hand_on_complete(self) -> None:
        for pack in [pack for pack, buffer in self._open.items() if not buffer.missing]:
            with self._guard:
                self._unfinished += 1
            self._complete.put(self._open.pop(pack))

    def _stay_open(self) -> None:
        if self._is_closed:
            raise SystemExit

    def _commit_packs(self) -> None:
        while not self._is_closed and (buffer := self._complete.get()) is not None:
            features, final = buffer.states()
            splits = self._splits.pop(buffer.pack, [])
            written = self._store.commit_pack(
                buffer.pack,
                features,
                final,
                topk=buffer.topk(),
                quarantined=buffer.quarantined,
                run_info={**self._run_info, **({"split_batches": splits} if splits else {})},
            )
            with self._guard:
                self._tally.written_bytes += written
                self._tally.quarantined.update(buffer.quarantined)
                self._tally.committed_packs += 1
                self._tally.committed_tokens += buffer.num_tokens
            self._pool.release(buffer)
            self._finish_one()

    def _finish_one(self) -> None:
        with self._guard:
            self._unfinished -= 1
