"""Why a run should end before its end: a signal, a worker that died, a thread that failed.

In the hot loop a request is looked at between batches, so that packs whose states are complete can
still be committed. Everywhere else it raises at once, in the main thread. A run that has not ended
some seconds after the first request is ended the hard way.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from dflash_offline.common.errors import Stopped
from dflash_offline.common.signals import signals_go_to, stopped_by

COMMIT_S = 12.0
_UNWIND_S = 4.0
# torchrun and a terminal both hand on the same Ctrl-C; a person's second one comes later.
_SAME_SIGNAL_S = 0.5


class StopRequest:
    """The first reason counts. Use as a context manager, in the main thread.

    Attributes:
        reason: for the user, once there is a request.
        is_said: somebody else tells the user.
        on_request: called once, in a thread, to tell other processes.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_said = False
        self.on_request: Callable[[], None] = lambda: None
        self._signalled = self._deadline = float("inf")
        # A signal's handler may come while the main thread holds it.
        self._guard = threading.RLock()
        self._event = threading.Event()
        self._is_deferred = False
        self._timer: threading.Timer | None = None
        self._main = threading.main_thread()
        self._before = signal.SIG_DFL

    def __enter__(self) -> "StopRequest":
        if self._has_signals():
            self._before = signal.signal(signal.SIGUSR1, self._on_wake)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._has_signals():
            # A thread may still wake the main thread, which must not end the process.
            is_default = self._before == signal.SIG_DFL
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if is_default else self._before)
        if self._timer is not None:
            self._timer.cancel()

    def request(self, reason: str, *, is_said: bool = False, commit_s: float = COMMIT_S) -> None:
        """Ask the run to end; from any thread.

        Args:
            reason: for the user.
            is_said: somebody else tells the user, so this process ends without a word.
            commit_s: for how long complete packs may still be committed, in seconds.
        """
        with self._guard:
            if self.reason is not None:
                return
            self.reason, self.is_said = reason, is_said
            self._deadline = time.monotonic() + commit_s
        self._timer = threading.Timer(commit_s + _UNWIND_S, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        self._event.set()
        threading.Thread(target=self.on_request, name="stop", daemon=True).start()
        if threading.current_thread() is not self._main and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGUSR1)

    @property
    def is_set(self) -> bool:
        """Whether the run should end."""
        return self._event.is_set()

    def seconds_left(self) -> float:
        """Return for how long complete packs may still be committed; infinite without a request."""
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise `Stopped`, or `SystemExit` where somebody else has told the user, if requested."""
        if self.is_set:
            assert self.reason is not None
            if self.is_said:
                raise SystemExit(Stopped.exit_code)
            raise Stopped(self.reason)

    def wait(self, seconds: float) -> None:
        """Sleep, and `check`."""
        self._event.wait(seconds)
        self.check()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note requests inside, SIGTERM and SIGINT among them; a second signal kills."""
        if not self._has_signals():
            yield
            return
        with signals_go_to(self._on_stop):
            self._is_deferred = True
            try:
                yield
            finally:
                self._is_deferred = False

    def _on_stop(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        self._signalled = min(self._signalled, now)
        if now - self._signalled > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.request(stopped_by(number))

    def _on_wake(self, _number: int, _frame: object) -> None:
        if not self._is_deferred:
            self.check()

    def _give_up(self) -> None:
        if not self.is_said:
            click.echo(f"error: {self.reason} (packs under way were given up)", err=True)
        sys.stderr.flush()
        os._exit(Stopped.exit_code)

    def _has_signals(self) -> bool:
        return threading.current_thread() is self._main
