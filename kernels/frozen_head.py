"""What every loss through a frozen head does: chunks of rows, dX made in forward and kept.

A loss is three stages of a chunk: products to logits, the row pass that turns them into their own
gradient, and the product back to dX. On a GPU the row pass of one chunk, which waits for memory,
runs on a stream of its own beside products of another, which do not. Letters: N rows, C rows of a
chunk, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_offline.kernels.head_rows import empty_results, scale_rows
from dflash_offline.kernels.logit_chunks import chunk_bounds, chunk_buffer, full_precision_sums

# Chunks of so few rows are asked for to save memory: there is one at a time.
SMALL_CHUNK_ROWS = 1024
# Row passes run on these, one a device; above all else, since they let products go on.
_row_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True)
class Chunk:
    """Rows of a batch that are worked on together, and where their buffers are."""

    rows: slice
    slot: int  # chunks that are worked on at once have different ones
    capacity: int  # rows of the largest chunk
    device: torch.device
    stream: torch.cuda.Stream | None

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start

    def buffer(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        """Return [C, columns] that keeps its contents through the three stages."""
        kept = chunk_buffer(
            f"{name} {self.slot}", self.capacity, columns,
            dtype=dtype, device=self.device, stream=self.stream,
        )  # fmt: skip
        return kept[: self.size]

    def vector(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [C], as `buffer`."""
        kept = chunk_buffer(
            f"{name} {self.slot}", 1, self.capacity,
            dtype=dtype, device=self.device, stream=self.stream,
        )  # fmt: skip
        return kept[0, : self.size]


@dataclass(kw_only=True)
class FrozenHeadLoss(ABC):
    """One call of a loss: its inputs, its results per row and dX for an upstream gradient of one.

    `kind` is the NamedTuple of results; its first field is the loss, and alone differentiable.
    """

    x: Tensor  # [N, H]
    options: Any  # of the row pass; says with_grad
    as_triton: bool
    kind: type
    out: Any = field(init=False, default=None)
    dx: Tensor | None = field(init=False, default=None)

    def take_memory(self) -> None:
        """Take memory for results and dX."""
        self.out = empty_results(self.kind, self.x)
        self.dx = torch.empty_like(self.x) if self.options.with_grad else None

    def results(self, chunk: Chunk):
        """Return the chunk's part of the results."""
        return self.kind(*(each[chunk.rows] for each in self.out))

    @abstractmethod
    def logits(self, chunk: Chunk) -> None:
        """Fill the chunk's buffer of logits."""

    @abstractmethod
    def row_pass(self, chunk: Chunk) -> None:
        """Fill the chunk's results; with_grad, leave the gradient in the logits' place."""

    @abstractmethod
    def gradient(self, chunk: Chunk) -> None:
        """Fill the chunk's dX; called with_grad alone."""


def _run(loss: FrozenHeadLoss, chunk_rows: int) -> None:
    """Take all chunks through their stages; with two slots, a chunk's products go beside the row
    pass of the one before."""
    device = loss.x.device
    bounds = chunk_bounds(loss.x.shape[0], chunk_rows)
    is_large = len(bounds) > 1 and bounds[0][1] > SMALL_CHUNK_ROWS
    slots = 2 if device.type == "cuda" and is_large else 1
    main = torch.cuda.current_stream(device) if device.type == "cuda" else None
    side = _row_stream(device) if slots == 2 else None
    unfinished: list[tuple[Chunk, torch.cuda.Event | None]] = []

    def finish() -> None:
        chunk, done = unfinished.pop(0)
        if done is not None:
            main.wait_event(done)
        if loss.dx is not None:
            loss.gradient(chunk)

    for index, (start, end) in enumerate(bounds):
        chunk = Chunk(slice(start, end), index % slots, bounds[0][1], device, main)
        loss.logits(chunk)
        if index == 0:
            # Not before, so that a GPU that has nothing to do gets its first product soon.
            loss.take_memory()
        unfinished.append((chunk, _row_pass(loss, chunk, side)))
        if len(unfinished) == slots:
            finish()
    while unfinished:
        finish()
    if not bounds:
        loss.take_memory()


def _row_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _row_streams:
        _row_streams[device] = torch.cuda.Stream(device, priority=-1)
    return _row_streams[device]


def _row_pass(loss: FrozenHeadLoss, chunk: Chunk, side) -> torch.cuda.Event | None:
    """Run the row pass, on `side` if there is one; return what to wait for."""
    if side is None:
        loss.row_pass(chunk)
        return None
    side.wait_stream(chunk.stream)
    with torch.cuda.stream(side):
        loss.row_pass(chunk)
        return side.record_event()


class _FrozenHead(torch.autograd.Function):
    """Saves dX [N, H]; W gets no gradient, so a row's upstream factor may come afterwards."""

    @staticmethod
    def forward(ctx, x, loss, chunk_rows):
        with full_precision_sums(), torch.cuda.device_of(x):
            _run(loss, chunk_rows)
        ctx.mark_non_differentiable(*loss.out[1:])
        ctx.save_for_backward(loss.dx)
        ctx.as_triton = loss.as_triton
        return tuple(loss.out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_unused):
        (dx,) = ctx.saved_tensors
        with torch.cuda.device_of(dx):
            return scale_rows(dx, grad_loss, as_triton=ctx.as_triton), None, None


def run_loss(loss: FrozenHeadLoss, *, chunk_rows: int):
    """Return the results of `loss`, differentiable with respect to its x."""
    return loss.kind(*_FrozenHead.apply(loss.x, loss, chunk_rows))
