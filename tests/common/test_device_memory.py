"""Memory that is not there, as each library says it, and other problems that are none of it."""

import pytest
import torch

from dflash_offline.common.device_memory import has_run_out, told_of_memory
from dflash_offline.common.errors import Stopped


def test_machine_without_room():
    """A real request that no machine can meet."""
    with (
        pytest.raises(Stopped, match=r"memory of this machine has run out \(.*1125899906842624"),
        told_of_memory("this machine", "ask for less"),
    ):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=["allocator", "driver", "cublas", "python"],
)
def test_memory_has_run_out(problem):
    assert has_run_out(problem)
    with pytest.raises(Stopped) as told, told_of_memory("cuda:1", "ask for less"):
        raise problem
    assert "\n" not in str(told.value)
    assert str(told.value).endswith("; ask for less")


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shapes do not match"),
        Stopped("the server said: CUDA error: out of memory"),
    ],
)
def test_another_problem_stays_what_it_is(problem):
    assert not has_run_out(problem)
    with pytest.raises(type(problem)) as raised, told_of_memory("cuda:1", "ask for less"):
        raise problem
    assert raised.value is problem
