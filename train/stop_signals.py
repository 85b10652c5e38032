"""A first SIGTERM or SIGINT asks a run to stop, a second one ends it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turn the first SIGTERM or SIGINT into an event, and let a second one kill at once."""
    stop = threading.Event()

    def request(_number: int, _frame: object) -> None:
        stop.set()
        for each in handled:
            signal.signal(each, signal.SIG_DFL)

    handled = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        # Handlers belong to the main thread; a caller elsewhere keeps its own.
        yield stop
        return
    before = [signal.signal(each, request) for each in handled]
    try:
        yield stop
    finally:
        for each, handler in zip(handled, before, strict=True):
            signal.signal(each, handler)
