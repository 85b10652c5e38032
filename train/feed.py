"""Passes on their way to the device: the states of the next are copied while one trains.

The copy runs on a stream of its own, into one buffer that is free again as soon as the pass before
has been decoded. So no more than two packs are on the device, one decoded and one as codes, however
far the host is ahead, and nothing here waits for the device.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_offline.train.coded_context import CodedContext, rows_of
from dflash_offline.train.stream import PassInput

# Buffers start at multiples of this, which every vector load and copy is content with.
_ALIGNMENT = 512


@dataclass(frozen=True, kw_only=True)
class _Moving:
    """A pass whose states are being copied."""

    given: PassInput
    context: CodedContext  # on the device, valid until the next pass is copied
    final: Tensor | None
    arrived: torch.cuda.Event


class Feed:
    """Hands over passes on one device; kept between steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._is_free = torch.cuda.Event()  # recorded when the buffer has been read
            self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def passes(self, given: Sequence[PassInput], dtype: torch.dtype) -> Iterator[PassInput]:
        """Yield passes on the device, their states in the compute dtype."""
        if self._device.type != "cuda":
            yield from (each.to(self._device, dtype) for each in given)
            return
        moving = self._start(given[0]) if given else None
        for following in [*given[1:], None]:
            if moving is None:
                return
            here = self._take(moving, dtype)
            moving = None if following is None else self._start(following)
            yield here

    def _start(self, given: PassInput) -> _Moving:
        """Copy a pass's states as they are, once those of the pass before have been decoded."""
        context, final = given.features, given.final
        assert isinstance(context, CodedContext), "states are on a device already"
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._is_free)
            sizes: list[int] = []
            context.moved(lambda each: _counted(each, sizes))
            if final is not None:
                _counted(final, sizes)
            self._grow(sum(sizes), compute)
            room = iter(self._buffer[: sum(sizes)].split(sizes))
            context = context.moved(lambda each: _placed(each, next(room)))
            final = None if final is None else _placed(final, next(room))
            arrived = self._stream.record_event()
        return _Moving(given=given, context=context, final=final, arrived=arrived)

    def _take(self, moving: _Moving, dtype: torch.dtype) -> PassInput:
        """Decode a pass's states, after which the buffer is free."""
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(moving.arrived)
        features = rows_of(moving.context.parts, dtype)
        # Also where the dtype is right: the buffer is about to be written again.
        final = None if moving.final is None else moving.final.to(dtype, copy=True)
        self._is_free.record(compute)
        tables = moving.given.tables.to(self._device)
        return replace(moving.given, tables=tables, features=features, final=final)

    def _grow(self, num_bytes: int, compute: torch.cuda.Stream) -> None:
        if self._buffer.numel() < num_bytes:
            # What still reads the old buffer was launched on the stream that trains.
            self._buffer.record_stream(compute)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


@functools.cache
def feed_of(device: torch.device) -> Feed:
    """Return the process's feed of a device."""
    return Feed(device)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _counted(tensor: Tensor, sizes: list[int]) -> Tensor:
    sizes.append(_room(tensor))
    return tensor


def _placed(tensor: Tensor, room: Tensor) -> Tensor:
    """Copy a page-locked tensor into bytes of the buffer, without a host wait."""
    place = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor, non_blocking=True)
