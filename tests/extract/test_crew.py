"""Workers that meet: what the first one learns of the others before the run begins."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from dflash_offline.common.errors import Stopped
from dflash_offline.extract import crew as crew_module
from dflash_offline.extract.crew import Crew
from dflash_offline.extract.memory_model import FreeMemory
from dflash_offline.extract.place import Place
from dflash_offline.extract.stop_request import StopRequest


@pytest.fixture(autouse=True)
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Host the store where workers meet, as a launcher does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store


def come(rank: int, size: int, free_bytes: int | None, leave: threading.Event) -> threading.Thread:
    """Be another worker until it is told to leave."""

    def work() -> None:
        place = Place(rank=rank, size=size)
        stop = StopRequest()
        with stop, Crew(place, stop, device=f"cuda:{rank}", free_bytes=free_bytes) as crew:
            leave.wait(60)
            crew._is_leaving = True

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("free", "least"),
    [((5, 7, 3), 2), ((2, 7, 3), 0), ((None, None, None), None)],
    ids=["last", "first", "no GPU"],
)
def test_gpu_with_least_free_memory_decides(free, least):
    leave = threading.Event()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        place = Place(rank=0, size=3)
        crew = stack.enter_context(Crew(place, stop, device="cuda:0", free_bytes=free[0]))
        others = [come(rank, 3, free[rank], leave) for rank in (1, 2)]
        found = crew.least_free()
        crew._is_leaving = True
        leave.set()
        for thread in others:
            thread.join()
    if least is None:
        assert found.num_bytes is None
    else:
        assert found.num_bytes == free[least]
        assert found.where.startswith(f"worker {least} (rank {least} of 3 on ")
        assert found.where.endswith(f"cuda:{least})")


def test_worker_by_itself():
    with StopRequest() as stop, Crew(Place(), stop, device="cuda:0", free_bytes=9) as crew:
        assert crew.least_free() == FreeMemory(9, "the GPU")


def test_worker_that_does_not_come(monkeypatch):
    monkeypatch.setattr(crew_module, "_MEETING_S", 3.0)
    leave = threading.Event()
    with StopRequest() as stop, Crew(Place(rank=0, size=3), stop, device="cpu") as crew:
        other = come(1, 3, None, leave)
        with pytest.raises(Stopped, match="workers 2 of 3 have not come within 3 s"):
            crew.least_free()
        crew._is_leaving = True
        leave.set()
        other.join()
