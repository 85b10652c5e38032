"""The states of packs while their samples arrive in any order, in memory that is used again.

Letters: K captured layers, S slots (the K layers, then the final state where there is one),
T tokens of a pack, R rows of a batch, H hidden.
"""

import queue
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dflash_offline.common.direct_io import empty_aligned
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.quantize import Calibration, EncodedStates, encode_states
from dflash_offline.common.store import (
    EXACT,
    EXACT_ROWS,
    FEATURES,
    FINAL,
    FINAL_SCALES,
    SCALES,
    TOPK_IDS,
    TOPK_LOGPROBS,
    Schema,
)
from dflash_offline.common.store_writer import Store
from dflash_offline.common.topk import TopK
from dflash_offline.extract.state_ring import HostStates

# One is filled while one is written.
POOL_UNITS = 2
_POLL_S = 0.1


class PackBuffer:
    """One pack; all arrays but those of the rows that are stored exactly have their final shape."""

    def __init__(self, schema: Schema, calibration: Calibration | None) -> None:
        self._schema = schema
        self._calibration = calibration
        # Page-aligned, so that direct I/O writes from here.
        self.memory = {
            name: empty_aligned(schema.arrays[name].shard, schema.arrays[name].dtype)
            for name in schema.state_arrays
            if name not in (EXACT, EXACT_ROWS)
        }
        self.pack = -1
        self.num_tokens = 0
        self.missing: set[int] = set()
        self.quarantined: dict[int, str] = {}
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, pack: int, *, samples: Sequence[int], num_tokens: int) -> None:
        """Become another pack, whatever the memory holds."""
        self.pack, self.num_tokens = pack, num_tokens
        self.missing = set(samples)
        self.quarantined = {}
        self._exact = []

    def put(self, sample: int, start: int, states: HostStates, rows: slice) -> None:
        """Copy one sample's rows of a batch to its place, or quarantine it.

        Several threads may put different samples at once.
        """
        reason = _problem(states.is_finite[:, rows].numpy(), self._schema.layers)
        length = rows.stop - rows.start
        if reason is not None:
            self.quarantined[sample] = reason
            self._put_zeros(start, length)
        elif states.encoded is not None:
            self._put_codes(start, states.encoded, rows)
        else:
            assert states.rows is not None, "neither rows nor codes"
            self._put_arrays(slice(start, start + length), _bits(states.rows[:, rows]))
        self.missing.remove(sample)
        if self._schema.num_topk:
            best = None if reason is not None or states.topk is None else states.topk[rows]
            best = best or TopK.zeros(length, self._schema.num_topk)
            self.memory[TOPK_IDS][start : start + length] = best.ids
            self.memory[TOPK_LOGPROBS][start : start + length] = best.logprobs

    def topk(self) -> TopK | None:
        """Return the best tokens that `Store.commit_pack` takes, views of the memory."""
        if not self._schema.num_topk:
            return None
        rows = slice(0, self.num_tokens)
        return TopK(ids=self.memory[TOPK_IDS][rows], logprobs=self.memory[TOPK_LOGPROBS][rows])

    def states(self) -> tuple["np.ndarray | EncodedStates", np.ndarray | None]:
        """Return what `Store.commit_pack` takes, views of the memory."""
        parts = {name: values[..., : self.num_tokens, :] for name, values in self.memory.items()}
        if not self._schema.is_coded:
            return parts[FEATURES], parts.get(FINAL)
        slot_token, exact = (torch.cat(each) for each in zip(*self._exact, strict=True))
        order = torch.argsort(slot_token[:, 0].long() * self.num_tokens + slot_token[:, 1])
        has_final = FINAL in parts
        encoded = EncodedStates(
            codes=torch.from_numpy(parts[FEATURES]),
            scales=as_bfloat16(parts[SCALES]),
            final_codes=torch.from_numpy(parts[FINAL]) if has_final else None,
            final_scales=as_bfloat16(parts[FINAL_SCALES]) if has_final else None,
            exact_rows=slot_token[order],
            exact=exact[order],
        )
        return encoded, None

    def _put_arrays(self, place: slice, bits: np.ndarray) -> None:
        num_layers = len(self._schema.layers)
        self.memory[FEATURES][:, place] = bits[:num_layers]
        if FINAL in self.memory:
            self.memory[FINAL][place] = bits[num_layers]

    def _put_codes(self, start: int, encoded: EncodedStates, rows: slice) -> None:
        place = slice(start, start + rows.stop - rows.start)
        self.memory[FEATURES][:, place] = encoded.codes[:, rows].numpy()
        self.memory[SCALES][:, place] = _bits(encoded.scales[:, rows])
        if encoded.final_codes is not None and encoded.final_scales is not None:
            self.memory[FINAL][place] = encoded.final_codes[rows].numpy()
            self.memory[FINAL_SCALES][place] = _bits(encoded.final_scales[rows])
        token = encoded.exact_rows[:, 1]
        mine = (token >= rows.start) & (token < rows.stop)
        shift = encoded.exact_rows.new_tensor([0, start - rows.start])
        # Indexing copies: the batch's memory goes back to the ring.
        self._exact.append((encoded.exact_rows[mine] + shift, encoded.exact[mine]))

    def _put_zeros(self, start: int, length: int) -> None:
        schema = self._schema
        zeros = torch.zeros(schema.num_slots, length, schema.hidden, dtype=torch.bfloat16)
        if self._calibration is None:
            self._put_arrays(slice(start, start + length), _bits(zeros))
            return
        num_layers = len(schema.layers)
        final = zeros[num_layers] if schema.num_slots > num_layers else None
        is_first = torch.arange(length) == 0
        encoded = encode_states(zeros[:num_layers], final, is_first, self._calibration)
        self._put_codes(start, encoded, slice(0, length))


class PackPool:
    """At most `POOL_UNITS` units of packs in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left = self.limit = POOL_UNITS * store.plan.unit_packs
        self._free: queue.SimpleQueue[PackBuffer] = queue.SimpleQueue()

    def acquire(self, pack: int, check: Callable[[], None]) -> PackBuffer:
        """Wait for memory for a pack; `check` is called now and then, and may raise."""
        buffer = None
        while buffer is None:
            check()
            try:
                buffer = self._free.get(timeout=0 if self._left else _POLL_S)
            except queue.Empty:
                if self._left:
                    self._left -= 1
                    buffer = PackBuffer(self._store.schema, self._store.calibration)
        buffer.begin(
            pack, samples=self._store.pack_samples(pack), num_tokens=self._store.pack_length(pack)
        )
        return buffer

    def release(self, buffer: PackBuffer) -> None:
        """Let another pack have the memory."""
        self._free.put(buffer)


def _bits(values: torch.Tensor) -> np.ndarray:
    """View bfloat16 as uint16 bit patterns, whatever the strides are: nothing is copied."""
    return values.view(torch.int16).numpy().view(np.uint16)


def _problem(is_finite: np.ndarray, layers: Sequence[int]) -> str | None:
    if is_finite.all():
        return None
    at, position = np.argwhere(~is_finite)[0]
    where = f"layer {layers[at]}" if at < len(layers) else "final state"
    return f"not finite in {where} at position {position}"
