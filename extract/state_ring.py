"""States on their way from a batch's forward to host memory: a ring of a few buffers.

A buffer belongs to one batch from its forward until its rows are in their packs, so nothing that is
still read can be overwritten. Encoding and the copy run in another thread and on another stream
than the forward, behind an event. On a CPU the same happens in plain memory. Letters as in
extract/forward.py.
"""

import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_offline.common.quantize import Calibration, EncodedStates, encode_slots
from dflash_offline.common.topk import TopK
from dflash_offline.extract.best_tokens import BestTokens
from dflash_offline.extract.forward import StateForward

# One is filled while the other is emptied.
NUM_BUFFERS = 2
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """One batch's states in host memory, valid until its buffer goes back to the ring.

    Attributes:
        rows: bfloat16 [S, R, H], or None when there are codes.
        is_finite: bool [S, R].
        encoded: codes of all states, or None.
        topk: best tokens of R rows, or None.
    """

    rows: Tensor | None
    is_finite: Tensor
    encoded: EncodedStates | None
    topk: TopK | None = None


class StateBuffer:
    """The memory of one batch: rows on the device, and what becomes of them on the host."""

    def __init__(self, forward: StateForward, num_rows: int) -> None:
        self.rows = forward.new_rows(num_rows)  # [S, num_rows, H]
        self.num_rows = num_rows
        self.lengths: list[int] = []
        self.is_finite = torch.empty(0)
        self.best: tuple[Tensor, Tensor] | None = None
        self.computed: torch.cuda.Event | None = None
        self.is_pinned = forward.device.type == "cuda"
        self.host: dict[str, Tensor] = {}

    def copied(self, name: str, source: Tensor) -> Tensor:
        """Start a copy of a tensor into page-locked memory, made once for the largest batch."""
        num_bytes = math.prod(source.shape) * source.element_size()
        if name not in self.host or len(self.host[name]) < num_bytes:
            self.host.pop(name, None)
            # Locking pages takes a third of a second a gigabyte: not anew for each longer batch.
            size = max(1, math.ceil(num_bytes * self.num_rows / max(1, sum(self.lengths))))
            self.host[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self.is_pinned)
        host = self.host[name][:num_bytes].view(source.dtype).view(source.shape)
        # Slot by slot where rows are left out: a strided copy takes memory on the device.
        whole = source.is_contiguous()
        for to, part in [(host, source)] if whole else zip(host, source, strict=True):
            to.copy_(part, non_blocking=True)
        return host


class StateRing:
    """A fixed number of buffers: a forward that is too fast for the disk waits for one."""

    def __init__(
        self,
        forward: StateForward,
        calibration: Calibration | None,
        *,
        num_rows: int,
        best_tokens: BestTokens | None = None,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """Allocate the device's part of all buffers.

        Args:
            calibration: of an int store, whose states are encoded before they are copied.
            num_rows: of the largest batch.
            best_tokens: makes them of the forward's final state, which is not copied then.
        """
        device = forward.device
        self._forward = forward
        self._best_tokens = best_tokens
        self._calibration = calibration
        self._on_device = calibration and calibration.to(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._num_buffers = num_buffers
        self._free: queue.SimpleQueue[StateBuffer] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(StateBuffer(forward, num_rows))

    @property
    def num_used(self) -> int:
        """Buffers that hold a batch."""
        return self._num_buffers - self._free.qsize()

    def acquire(self, check: Callable[[], None]) -> StateBuffer:
        """Wait for a buffer; `check` is called now and then, and may raise."""
        while True:
            check()
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def release(self, buffer: StateBuffer) -> None:
        """Let another batch have a buffer."""
        self._free.put(buffer)

    def compute(
        self,
        samples: Sequence[np.ndarray],
        buffer: StateBuffer,
        *,
        predicts: Sequence[np.ndarray] = (),
    ) -> None:
        """Run the forward of samples, each int32 [length]; does not wait for a GPU.

        Args:
            predicts: bool [length] of each sample, which rows have best tokens.
        """
        buffer.is_finite = self._forward.states(samples, buffer.rows)
        buffer.lengths = [len(sample) for sample in samples]
        if self._best_tokens is not None:
            # Here, where running out of memory splits the batch.
            final = buffer.rows[-1, : sum(buffer.lengths)]
            buffer.best = self._best_tokens(final, torch.from_numpy(np.concatenate(predicts)))
        if self._stream is not None:
            # Blocking: a thread that waits spins otherwise.
            buffer.computed = torch.cuda.Event(blocking=True)
            buffer.computed.record(torch.cuda.current_stream(self._forward.device))

    @torch.inference_mode()
    def to_host(self, buffer: StateBuffer) -> HostStates:
        """Wait for a batch, encode its states if the store wants codes, and copy them."""
        if self._stream is None:
            return self._to_host(buffer)
        assert buffer.computed is not None, "no forward has filled the buffer"
        buffer.computed.synchronize()
        with torch.cuda.stream(self._stream):
            states = self._to_host(buffer)
        self._stream.synchronize()
        return states

    def _to_host(self, buffer: StateBuffer) -> HostStates:
        rows = buffer.rows[:, : sum(buffer.lengths)]
        is_finite = buffer.copied("is_finite", buffer.is_finite)
        topk = None
        if buffer.best is not None:
            rows = rows[:-1]
            ids, logprobs = map(buffer.copied, ("topk_ids", "topk_logprobs"), buffer.best)
            topk = TopK(ids=ids.numpy(), logprobs=logprobs.numpy())
        if self._calibration is None:
            host = rows if self._stream is None else buffer.copied("rows", rows)
            return HostStates(rows=host, is_finite=is_finite, encoded=None, topk=topk)
        is_first = torch.zeros(rows.shape[1], dtype=torch.bool)
        is_first[np.cumsum([0, *buffer.lengths[:-1]])] = True
        encoded = self._encoded(rows, is_first)
        parts = {
            name: None if part is None else buffer.copied(name, part)
            for name, part in vars(encoded).items()
        }
        encoded = EncodedStates(**parts)
        return HostStates(rows=None, is_finite=is_finite, encoded=encoded, topk=topk)

    def _encoded(self, rows: Tensor, is_first: Tensor) -> EncodedStates:
        assert self._calibration is not None, "checked by the caller"
        assert self._on_device is not None, "checked by the caller"
        has_final = self._forward.has_final and self._best_tokens is None
        try:
            return encode_slots(
                rows, is_first.to(rows.device), self._on_device, has_final=has_final
            )
        except torch.OutOfMemoryError:
            pass
        # The forward took the rest of the device's memory; codes made here are the same bits.
        torch.cuda.empty_cache()
        slots = (slot.cpu() for slot in rows)
        return encode_slots(slots, is_first, self._calibration, has_final=has_final)
