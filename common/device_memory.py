"""What running out of memory looks like, of a GPU or of the machine, and how a command tells it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_offline.common.errors import Stopped

# Of a CUDA context, of cuBLAS for its workspace, of PyTorch's allocator on a CPU: these come as
# plain errors where torch.OutOfMemoryError could be expected.
_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def has_run_out(problem: RuntimeError | MemoryError) -> bool:
    """Say whether memory that is not there is what an exception is about."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    own = type(problem) in (RuntimeError, torch.AcceleratorError)
    return own and any(sign in str(problem) for sign in _SIGNS)


def first_line(problem: RuntimeError | MemoryError) -> str:
    """Return what an exception says, without a trace of the library that raised it."""
    return (str(problem).splitlines() or [type(problem).__name__])[0]


@contextmanager
def told_of_memory(where: str, remedy: str) -> Iterator[None]:
    """End a command where memory is wanted that cannot be had, whatever was estimated.

    Args:
        where: whose memory it is.
        remedy: what the sentence ends with.

    Raises:
        Stopped: memory has run out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if not has_run_out(problem):
            raise
        raise Stopped(
            f"the memory of {where} has run out ({first_line(problem)}); {remedy}"
        ) from problem
