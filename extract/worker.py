"""The hot loop: a plan's batches through the target, rows into packs, packs into the store.

A unit's packs are filled side by side, because its batches are sorted by length across them. A
pack is committed as soon as its last row is there. Letters: K captured layers, T tokens of a
pack, H hidden.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_offline.common.progress import JsonLog, ProgressLine
from dflash_offline.common.store_writer import Store
from dflash_offline.extract.coded_pack import CodedPack
from dflash_offline.extract.crew import Crew
from dflash_offline.extract.forward import BatchStates, StateForward
from dflash_offline.extract.stop_request import StopRequest
from dflash_offline.extract.tally import PROGRESS_FIELDS, Tally, progress_values

_REPORT_S, _LOG_S, _WAIT_S = 1.0, 10.0, 0.2


class PackBuffer:
    """The states of one pack while its samples arrive in any order."""

    def __init__(self, store: Store, pack: int) -> None:
        schema, length = store.schema, store.pack_length(pack)
        self.pack = pack
        self.layers = schema.layers
        self.coded = CodedPack(store) if schema.is_coded else None
        # Zeros, because a quarantined sample keeps its place with zero states.
        length = 0 if schema.is_coded else length
        self.features = np.zeros((len(schema.layers), length, schema.hidden), np.uint16)
        has_final = schema.teacher == "final"
        self.final = np.zeros((length, schema.hidden), np.uint16) if has_final else None
        self.missing = set(store.pack_samples(pack))
        self.quarantined: dict[int, str] = {}

    def put(self, sample: int, start: int, states: BatchStates, rows: slice) -> None:
        """Copy one sample's rows of a batch to its place, or quarantine it."""
        reason = _problem(states.is_finite[:, rows], self.layers)
        if self.coded is not None:
            self._put_codes(self.coded, start, states, rows, is_good=reason is None)
        elif reason is None:
            assert states.features is not None
            place = slice(start, start + rows.stop - rows.start)
            self.features[:, place] = states.features[:, rows]
            if self.final is not None:
                assert states.final is not None
                self.final[place] = states.final[rows]
        if reason is not None:
            self.quarantined[sample] = reason
        self.missing.remove(sample)

    @staticmethod
    def _put_codes(
        coded: CodedPack, start: int, states: BatchStates, rows: slice, *, is_good: bool
    ) -> None:
        if is_good:
            assert states.encoded is not None
            coded.put(start, states.encoded, rows)
        else:
            coded.put_zeros(start, rows.stop - rows.start)


def _problem(is_finite: np.ndarray, layers: Sequence[int]) -> str | None:
    if is_finite.all():
        return None
    at, position = np.argwhere(~is_finite)[0]
    where = f"layer {layers[at]}" if at < len(layers) else "final state"
    return f"not finite in {where} at position {position}"


def unfinished_units(store: Store) -> list[int]:
    """Return the units of the plan with a pack that the store does not hold yet."""
    packs, committed = store.plan.column("pack"), store.committed
    return [
        number
        for number, unit in enumerate(store.plan.batches)
        if not {pack for batch in unit for pack in packs[batch].tolist()} <= committed
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
    ) -> None:
        self._store = store
        self._forward = forward
        self._crew = crew
        self._stop = stop
        self._log = log
        self._run_info = run_info
        self._tally = Tally()
        self._began = time.monotonic()
        self._next_report = self._next_log = self._began
        plan = store.plan
        self._packs, self._starts = plan.column("pack"), plan.column("start")
        self._lengths = plan.column("length")

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
            while not self._crew.is_done:
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
        with self._stop.deferred():
            for unit in units:
                for _ in self._work_unit(unit):
                    if self._report():
                        yield
                    self._stop.check()
        self._crew.report(self._tally, is_done=True)

    def _work_unit(self, unit: int) -> Iterator[None]:
        """Yield after every batch."""
        store, packs = self._store, self._packs
        batches = store.plan.batches[unit]
        open_packs = {pack for batch in batches for pack in packs[batch].tolist()}
        buffers = {p: PackBuffer(store, p) for p in sorted(open_packs - store.committed)}
        tokens: dict[int, np.ndarray] = {}
        for batch in batches:
            # A batch with any uncommitted sample runs whole: its shape decides its rounding.
            if not any(int(packs[sample]) in buffers for sample in batch):
                continue
            samples = [
                _sample_tokens(store, tokens, int(packs[i]))[self._starts[i] :][: self._lengths[i]]
                for i in batch
            ]
            states = self._forward(samples)
            self._tally.padded_tokens += len(samples) * max(map(len, samples))
            self._tally.tokens += sum(map(len, samples))
            for sample, rows in _rows_of(batch, self._lengths):
                if (buffer := buffers.get(int(packs[sample]))) is not None:
                    buffer.put(sample, int(self._starts[sample]), states, rows)
            del states
            for pack in [p for p, buffer in buffers.items() if not buffer.missing]:
                self._commit(buffers.pop(pack))
            yield
        assert not buffers, f"packs {sorted(buffers)} have samples in no batch of their unit"

    def _commit(self, buffer: PackBuffer) -> None:
        self._tally.written_bytes += self._store.commit_pack(
            buffer.pack,
            buffer.features if buffer.coded is None else buffer.coded.joined(),
            buffer.final if buffer.coded is None else None,
            quarantined=buffer.quarantined,
            run_info=self._run_info,
        )
        self._tally.quarantined.update(buffer.quarantined)
        self._tally.committed_packs += 1
        self._tally.committed_tokens += self._store.pack_length(buffer.pack)

    def _report(self) -> bool:
        """Tell the first worker and the log, not too often; returns whether it did."""
        now = time.monotonic()
        self._tally.seconds = now - self._began
        if now < self._next_report:
            return False
        self._next_report = now + _REPORT_S
        self._crew.report(self._tally)
        if now >= self._next_log:
            self._next_log = now + _LOG_S
            self._log.write({"kind": "progress", "time": time.time(), **self._tally.as_record()})
        return True


def _sample_tokens(store: Store, tokens: dict[int, np.ndarray], pack: int) -> np.ndarray:
    """Return a pack's tokens, read once a unit."""
    if pack not in tokens:
        tokens[pack] = store.read_tokens(pack)
    return tokens[pack]


def _rows_of(batch: Sequence[int], lengths: np.ndarray) -> Iterator[tuple[int, slice]]:
    first = 0
    for sample in batch:
        yield sample, slice(first, first + int(lengths[sample]))
        first += int(lengths[sample])
