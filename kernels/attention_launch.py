"""What the kernels of `block_attention` are launched with, and how blocks are laid into tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_offline.kernels.optional_triton import is_interpreted


@dataclass(frozen=True)
class Launch:
    """Tile of one kernel, rows of queries by tokens of context; `tma`: loads by the copy engine."""

    rows: int
    tokens: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True)
class Launches:
    """What the three kernels are launched with."""

    fwd: Launch
    dq: Launch
    dkv: Launch


# By device and head dimension rounded up to a power of two, for elements of 2 bytes.
LAUNCHES: dict[tuple[str, int], Launches] = {
    ("hopper", 64): Launches(
        Launch(128, 128, 8, 3, True), Launch(128, 64, 8, 3, True), Launch(64, 64, 4, 3, True)
    ),
    ("hopper", 128): Launches(
        Launch(128, 64, 8, 3, True), Launch(128, 64, 8, 3, True), Launch(64, 64, 4, 2, True)
    ),
    ("hopper", 256): Launches(
        Launch(64, 64, 4, 2, True), Launch(64, 32, 8, 2, True), Launch(32, 64, 8, 2, True)
    ),
    # Small enough for 99 kB of shared memory.
    ("other", 64): Launches(Launch(128, 64, 4, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 2)),
    ("other", 128): Launches(Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 64, 4, 2)),
    ("other", 256): Launches(Launch(64, 32, 8, 1), Launch(32, 16, 4, 1), Launch(16, 32, 4, 1)),
}
# Elements of 4 bytes are for checks, not for speed.
LAUNCH_4_BYTES = Launches(Launch(32, 32, 4, 1), Launch(32, 16, 4, 1), Launch(16, 32, 4, 1))
# dQ of larger blocks, which take several tiles while own keys and values stay; at dimension 256
# nothing is small enough for 99 kB then.
LARGE_BLOCK = 32
DQ_LARGE_BLOCKS = {128: Launch(64, 32, 4, 1)}
DQ_LARGE_BLOCKS_4_BYTES = Launch(16, 16, 4, 1)
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
LAUNCH_INTERPRETED = Launches(Launch(32, 16, 1, 1), Launch(32, 16, 1, 1), Launch(16, 16, 1, 1))


def launches_of(q: Tensor, block_size: int) -> Launches:
    """Return the launches for queries [N, Hq, D].

    Raises:
        ValueError: blocks of this size do not fit the GPU's shared memory.
    """
    if is_interpreted():
        return LAUNCH_INTERPRETED
    is_large = block_size > LARGE_BLOCK
    if q.element_size() == 4:
        dq = DQ_LARGE_BLOCKS_4_BYTES if is_large else LAUNCH_4_BYTES.dq
        return replace(LAUNCH_4_BYTES, dq=dq)
    capability = torch.cuda.get_device_capability(q.device)
    width = power_of_two(q.shape[-1])
    if capability[0] == 9:
        return LAUNCHES["hopper", width]
    if is_large and width == 256 and capability in SMALL_MEMORY:
        raise ValueError(
            f"block_size is {block_size} and the head dimension {q.shape[-1]}; this GPU's shared "
            f"memory takes blocks of at most {LARGE_BLOCK} then; pass implementation='reference'"
        )
    launches = LAUNCHES["other", width]
    return replace(launches, dq=DQ_LARGE_BLOCKS.get(width, launches.dq)) if is_large else launches


def power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


@dataclass(frozen=True)
class RowTile:
    """How blocks of `block_size` slots with `ratio` rows each are laid into tiles of rows."""

    anchors: int  # in a group
    slots: int  # of a group in one tile
    chunks: int  # tiles that a group takes

    @classmethod
    def of(cls, rows: int, ratio: int, block_size: int) -> RowTile:
        slots = rows // ratio
        if slots >= block_size:
            return cls(slots // block_size, slots // block_size * block_size, 1)
        return cls(1, slots, -(-block_size // slots))
