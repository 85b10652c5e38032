"""The hot loop: a plan's batches through the target, their states handed on to a pipeline.

The loop itself never waits for a disk, nor for a GPU beyond the ring's buffers. A batch that does
not fit the device's memory is split and goes on; its packs say so.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dflash_offline.common.blobs import in_parallel
from dflash_offline.common.device_memory import first_line, has_run_out
from dflash_offline.common.errors import Stopped
from dflash_offline.common.progress import JsonLog, ProgressLine
from dflash_offline.common.store_writer import Store
from dflash_offline.common.topk import predicts
from dflash_offline.extract.best_tokens import BestTokens
from dflash_offline.extract.crew import Crew
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.pipeline import Part, Pipeline
from dflash_offline.extract.state_ring import StateBuffer, StateRing
from dflash_offline.extract.stop_request import StopRequest
from dflash_offline.extract.tally import PROGRESS_FIELDS, Tally, progress_values
from dflash_offline.extract.tensor_parallel import too_large

_REPORT_S, _LOG_S, _WAIT_S = 1.0, 10.0, 0.2


def unfinished_units(store: Store) -> list[int]:
    """Return the units of the plan with a pack that the store does not hold yet."""
    packs, committed = store.plan.column("pack"), store.committed
    return [
        number
        for number, unit in enumerate(store.plan.batches)
        if not {pack for batch in unit for pack in packs[batch].tolist()} <= committed
    ]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one forward.

    Attributes:
        place: (unit, batch) of the plan.
        samples: their indices.
        tokens: int32 [length] of each.
        predicts: bool [length] of each, which rows have best tokens; empty where none have.
        is_split: a part of what the plan has there.
    """

    place: tuple[int, int]
    samples: Sequence[int]
    tokens: Sequence[np.ndarray]
    predicts: Sequence[np.ndarray]
    is_split: bool = False

    def halves(self) -> "list[Batch]":
        """Return two batches of half the samples."""
        middle = len(self.samples) // 2
        return [
            replace(
                self,
                samples=self.samples[half],
                tokens=self.tokens[half],
                predicts=self.predicts[half],
                is_split=True,
            )
            for half in (slice(None, middle), slice(middle, None))
        ]


class Worker:
    """Compute and commit the packs of the units that this process gets."""

    def __init__(
        self,
        store: Store,
        forward: StateForward,
        crew: Crew,
        stop: StopRequest,
        *,
        log: JsonLog,
        run_info: Mapping[str, Any],
        writers: int,
        best_tokens: BestTokens | None = None,
    ) -> None:
        self._store = store
        self._forward = forward
        self._crew = crew
        self._stop = stop
        self._log = log
        self._tally = Tally()
        plan = store.plan
        self._packs, self._starts = plan.column("pack"), plan.column("start")
        self._lengths = plan.column("length")
        batches = [batch for unit in plan.batches for batch in unit]
        num_rows = max(int(self._lengths[batch].sum()) for batch in batches)
        self._ring = StateRing(
            forward, store.calibration, num_rows=num_rows, best_tokens=best_tokens
        )
        self._pipeline = Pipeline(
            store, self._ring, self._tally, run_info=run_info, writers=writers
        )
        self._began = time.monotonic()
        self._next_report = self._next_log = self._began

    def lead(self, units: Iterable[int]) -> Tally:
        """Work, show everybody's progress, wait for the others; returns the sum of all.

        Raises:
            Stopped: a signal, a full disk or a lost worker.
        """
        store, total = self._store, int(self._lengths.sum())
        committed = store.committed
        done = int(self._lengths[np.isin(self._packs, sorted(committed))].sum())
        with ProgressLine(total, PROGRESS_FIELDS, done=done) as line:

            def show() -> None:
                tallies = self._crew.tallies()
                values = progress_values(
                    tallies,
                    num_packs=store.plan.num_packs,
                    done_packs=len(committed),
                    done_tokens=done,
                )
                line.update(done + Tally.total(tallies.values()).committed_tokens, values)

            for _ in self._work(units):
                show()
            while not self._crew.are_done(every=self._forward.shared_by):
                self._stop.wait(_WAIT_S)
                show()
            show()
        return Tally.total(self._crew.tallies().values())

    def follow(self, units: Iterable[int]) -> None:
        """Work, and let the first worker know of it."""
        for _ in self._work(units):
            pass

    def _work(self, units: Iterable[int]) -> Iterator[None]:
        """Yield now and then, whenever progress has been reported."""
        with self._stop.deferred(), self._pipeline, ThreadPoolExecutor(1) as ahead:
            for batch in self._batches(iter(units), ahead):
                if self._stop.is_set:
                    break
                self._run(batch)
                if self._report():
                    yield
            self._pipeline.drain(self._stop.seconds_left)
            self._stop.check()
            self._pipeline.assert_done()
        self._pipeline.count()
        self._tally.seconds = time.monotonic() - self._began
        self._crew.report(self._tally, is_done=True)

    def _batches(self, units: Iterator[int], ahead: ThreadPoolExecutor) -> Iterator["Batch"]:
        """Yield the batches of units.

        A unit is taken and its tokens are read during the last batch of the one before: no sooner,
        because another worker may be the first to need it.
        """
        future = ahead.submit(self._next_unit, units)
        while (batches := future.result()) is not None:
            for at, batch in enumerate(batches):
                if at == len(batches) - 1:
                    future = ahead.submit(self._next_unit, units)
                yield batch

    def _next_unit(self, units: Iterator[int]) -> "list[Batch] | None":
        unit = next(units, None)
        if unit is None:
            return None
        # A batch with any uncommitted sample runs whole: its shape decides its rounding.
        batches = [
            (at, batch)
            for at, batch in enumerate(self._store.plan.batches[unit])
            if any(map(self._pipeline.is_wanted, batch))
        ]
        assert batches, f"unit {unit} has nothing left to do"
        packs = sorted({int(self._packs[i]) for _, batch in batches for i in batch})
        tokens = self._samples_of(packs, self._store.read_tokens)
        has_best = self._store.schema.num_topk > 0
        masks = self._samples_of(packs if has_best else [], self._store.read_loss_mask)
        return [
            Batch(
                place=(unit, at),
                samples=batch,
                tokens=[tokens(i) for i in batch],
                predicts=[predicts(masks(i)) for i in batch] if has_best else (),
            )
            for at, batch in batches
        ]

    def _samples_of(
        self, packs: Sequence[int], read: Callable[[int], np.ndarray]
    ) -> Callable[[int], np.ndarray]:
        """Read packs, and return what gives one sample's part of them."""
        values = dict(zip(packs, in_parallel(self._store.blobs, read, packs), strict=True))

        def of(sample: int) -> np.ndarray:
            return values[int(self._packs[sample])][self._starts[sample] :][: self._lengths[sample]]

        return of

    def _run(self, batch: "Batch") -> None:
        """Start the forward of samples, in halves where they do not fit, and hand it on."""
        buffer = self._pipeline.buffer()
        if not self._fits(batch, buffer):
            self._ring.release(buffer)
            self._tally.splits += 1
            for half in batch.halves():
                self._run(half)
            return
        split = batch.place if batch.is_split else None
        self._pipeline.submit(buffer, Part(samples=batch.samples, split=split))
        self._tally.padded_tokens += len(batch.tokens) * max(map(len, batch.tokens))
        self._tally.tokens += sum(map(len, batch.tokens))

    def _fits(self, batch: "Batch", buffer: StateBuffer) -> bool:
        """Start a forward; returns whether the device's memory holds it."""
        try:
            self._ring.compute(batch.tokens, buffer, predicts=batch.predicts)
            return True
        except RuntimeError as problem:
            if not has_run_out(problem):
                raise
            if self._forward.shared_by > 1:
                size = len(batch.tokens), max(map(len, batch.tokens))
                raise too_large(*size, self._forward.device, problem) from problem
            if len(batch.samples) == 1:
                raise Stopped(
                    f"the memory of {self._forward.device} does not hold the forward of one sample "
                    f"of {len(batch.tokens[0])} tokens ({first_line(problem)}); lower "
                    "--max-length for a new store, or go on where more memory is free"
                ) from problem
        # Outside of the handler: the exception keeps the failed forward's tensors alive.
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _report(self) -> bool:
        """Tell the first worker and the log, not too often; returns whether it did."""
        now = time.monotonic()
        self._tally.seconds = now - self._began
        if now < self._next_report:
            return False
        self._next_report = now + _REPORT_S
        self._pipeline.count()
        self._crew.report(self._tally)
        if now >= self._next_log:
            self._next_log = now + _LOG_S
            self._log.write({"kind": "progress", "time": time.time(), **self._tally.as_record()})
        return True
