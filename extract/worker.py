"""The hot loop: a plan's batches through the target, rows into packs, packs into the store.

A unit's packs are filled side by side, because its batches are sorted by length across them. A
pack is committed as soon as its last row is there. Letters: K captured layers, T tokens of a
pack, H hidden.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_offline.common.progress import ProgressLine
from dflash_offline.common.store_writer import Store
from dflash_offline.extract.coded_pack import CodedPack
from dflash_offline.extract.forward import BatchStates, StateForward

PROGRESS_FIELDS = ("packs", "tokens", "tok/s", "padded", "written", "bad")


@dataclass(kw_only=True)
class Outcome:
    """What a run did.

    Attributes:
        quarantined: sample index to reason.
        tokens: rows written, in tokens.
        padded_tokens: tokens forwarded, padding included.
        written_bytes: bytes of state shards.
        seconds: time in the loop.
    """

    quarantined: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    written_bytes: int = 0
    seconds: float = 0.0

    def padded_frac(self) -> float:
        """Return the share of forwarded tokens that was padding."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0


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


def extract_packs(
    store: Store, forward: StateForward, *, run_info: Mapping[str, Any], outcome: Outcome
) -> None:
    """Compute and commit every pack that the store does not hold yet.

    Args:
        store: owned by this run.
        forward: target with hooks on the store's layers.
        run_info: what goes into commit records: device, software.
        outcome: updated as packs are committed, so that it holds when a signal ends the run.

    Raises:
        Stopped: a signal, or a disk that is full.
    """
    starts, lengths = store.plan.column("start"), store.plan.column("length")
    packs = store.plan.column("pack")
    total = int(lengths.sum())
    done = int(lengths[np.isin(packs, sorted(store.committed))].sum())
    began = time.monotonic()
    with ProgressLine(total, PROGRESS_FIELDS, done=done) as progress:
        for unit in store.plan.batches:
            open_packs = {pack for batch in unit for pack in packs[batch].tolist()}
            buffers = {p: PackBuffer(store, p) for p in sorted(open_packs - store.committed)}
            tokens: dict[int, np.ndarray] = {}
            for batch in unit:
                # A batch with any uncommitted sample runs whole: its shape decides its rounding.
                if not any(int(packs[sample]) in buffers for sample in batch):
                    continue
                samples = [
                    _sample_tokens(store, tokens, int(packs[i]))[starts[i] :][: lengths[i]]
                    for i in batch
                ]
                states = forward(samples)
                outcome.padded_tokens += len(samples) * max(map(len, samples))
                outcome.tokens += sum(map(len, samples))
                for sample, rows in _rows_of(batch, lengths):
                    if (buffer := buffers.get(int(packs[sample]))) is not None:
                        buffer.put(sample, int(starts[sample]), states, rows)
                del states
                for pack in [p for p, buffer in buffers.items() if not buffer.missing]:
                    _commit(store, buffers.pop(pack), run_info=run_info, outcome=outcome)
                    done += store.pack_length(pack)
                outcome.seconds = time.monotonic() - began
                progress.update(done, _progress_values(store, outcome, done))
            assert not buffers, f"packs {sorted(buffers)} have samples in no batch of their unit"


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


def _commit(
    store: Store, buffer: PackBuffer, *, run_info: Mapping[str, Any], outcome: Outcome
) -> None:
    outcome.written_bytes += store.commit_pack(
        buffer.pack,
        buffer.features if buffer.coded is None else buffer.coded.joined(),
        buffer.final if buffer.coded is None else None,
        quarantined=buffer.quarantined,
        run_info=run_info,
    )
    outcome.quarantined.update(buffer.quarantined)


def _progress_values(store: Store, outcome: Outcome, done: int) -> dict[str, str]:
    return {
        "packs": f"{len(store.committed)}/{store.plan.num_packs}",
        "tokens": f"{done:,}",
        "tok/s": f"{outcome.tokens / max(outcome.seconds, 1e-9):,.0f}",
        "padded": f"{outcome.padded_frac():.0%}",
        "written": f"{outcome.written_bytes / 1e6:,.1f} MB",
        "bad": str(len(outcome.quarantined)),
    }
