"""What a command makes of SIGTERM and SIGINT: an end at once, an end when it suits, or a wait."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_offline.common.errors import Stopped

_HANDLED = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_go_to(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have a function called for both signals inside.

    Handlers belong to the main thread: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(each, handler) for each in _HANDLED]
    try:
        yield
    finally:
        for each, handler_before in zip(_HANDLED, before, strict=True):
            signal.signal(each, handler_before)


@contextmanager
def signals_stop() -> Iterator[None]:
    """Turn the first signal into `Stopped`, and let a second one kill at once."""

    def stop(number: int, _frame: object) -> None:
        _let_kill()
        raise Stopped(stopped_by(number))

    with signals_go_to(stop):
        yield


@contextmanager
def signals_ask() -> Iterator[threading.Event]:
    """Turn the first signal into an event, and let a second one kill at once."""
    asked = threading.Event()

    def ask(_number: int, _frame: object) -> None:
        asked.set()
        _let_kill()

    with signals_go_to(ask):
        yield asked


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold signals back until something that must not end half-way is done."""
    arrived: list[int] = []
    with signals_go_to(lambda number, _frame: arrived.append(number)):
        yield
    if arrived:
        signal.raise_signal(arrived[0])


def stopped_by(number: int) -> str:
    """Return what a run that a signal ends says."""
    return (
        f"stopped by {signal.Signals(number).name}; what is committed is safe, "
        "run the same command to go on"
    )


def _let_kill() -> None:
    for each in _HANDLED:
        signal.signal(each, signal.SIG_DFL)
