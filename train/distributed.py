"""The processes of a job: who this one is, and sums over all of them.

A job of one process needs no process group; every function is then the identity.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dflash_offline.common.errors import Stopped

# torch 2.13 renamed these two and warns of the old names, which earlier ones have alone.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gradients are reduced in buckets of about this many elements.
_BUCKET_ELEMENTS = 16 << 20


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place in the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0


@contextmanager
def with_the_others(*, computing: bool = False) -> Iterator[None]:
    """Turn what a collective raises when another process is gone into `Stopped`.

    Args:
        computing: other things happen inside too, whose errors are theirs.
    """
    try:
        yield
    except RuntimeError as problem:
        # gloo has no error of its own.
        if computing and not isinstance(problem, dist.DistError) and "gloo" not in str(problem):
            raise
        raise Stopped(
            f"another process of the job is gone ({str(problem).splitlines()[0]}); the same "
            "command goes on from the newest checkpoint"
        ) from problem


def join_world(device_type: str) -> World:
    """Join the group that torchrun describes in the environment, if it does."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local_rank)


def leave_world() -> None:
    """Leave the group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Replace every tensor by its sum over the job, in place, in buckets of one dtype."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    bucket: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        changes = bool(bucket) and bucket[0].dtype != tensor.dtype
        if changes or elements + tensor.numel() > _BUCKET_ELEMENTS:
            _reduce(bucket)
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    _reduce(bucket)


def sum_to_owners(flat: torch.Tensor, mine: torch.Tensor) -> None:
    """Sum a tensor over the job; each process gets its part of the sum, `mine`, in place.

    Args:
        flat: one part for each process, in the order of ranks; undefined afterwards but for mine.
        mine: view of this process's part.
    """
    with with_the_others():
        _reduce_scatter(mine, flat)


def gather_from_owners(flat: torch.Tensor, mine: torch.Tensor) -> None:
    """Fill every process's part of `flat` with what that process has there; see `sum_to_owners`."""
    with with_the_others():
        _all_gather(flat, mine)


def from_rank(tensor: torch.Tensor, rank: int) -> None:
    """Fill a tensor with what one process has there."""
    with with_the_others():
        dist.broadcast(tensor, src=rank)


def gather_rows(mine: torch.Tensor, world: World, *, rows: int, to: int) -> torch.Tensor | None:
    """Bring every process's rows together on process `to`; the others get None.

    Args:
        mine: at most `rows` rows.

    Returns:
        `rows` rows of each process, those that it has not are zero.
    """
    whole = mine.new_empty(world.size * rows, *mine.shape[1:]) if world.rank == to else None
    with with_the_others():
        dist.gather(_padded(mine, rows), None if whole is None else list(whole.split(rows)), dst=to)
    return whole


def scatter_rows(
    whole: torch.Tensor | None, like: torch.Tensor, world: World, *, rows: int, source: int
) -> torch.Tensor:
    """Undo `gather_rows`.

    Args:
        whole: on process `source` only.
        like: of the shape and dtype of what this process gets.
    """
    given = like.new_empty(rows, *like.shape[1:])
    parts = None if whole is None else list(_padded(whole, world.size * rows).split(rows))
    with with_the_others():
        dist.scatter(given, parts, src=source)
    return given[: len(like)]


def gather_objects(value: object, world: World) -> list[object]:
    """Return every process's small value, in the order of ranks."""
    if world.size == 1:
        return [value]
    values: list[object] = [None] * world.size
    with with_the_others():
        dist.all_gather_object(values, value)
    return values


def sum_numbers(values: Sequence[float], world: World, device: torch.device) -> list[float]:
    """Return the sums of every process's numbers; waits for the device."""
    if world.size == 1:
        return list(values)
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    with with_the_others():
        dist.all_reduce(shared)
        return shared.tolist()


def largest(value: float, world: World, device: torch.device) -> float:
    """Return the largest value of all processes; waits for the device."""
    if world.size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    with with_the_others():
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with rows of zeros up to so many."""
    if len(tensor) == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def _reduce(bucket: list[torch.Tensor]) -> None:
    if not bucket:
        return
    if len(bucket) == 1:
        with with_the_others():
            dist.all_reduce(bucket[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    with with_the_others():
        dist.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
