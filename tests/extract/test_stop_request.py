"""Requests to stop: noted in the hot loop, raised elsewhere, and never without an end."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dflash_offline.common.errors import Stopped
from dflash_offline.extract.stop_request import COMMIT_S, StopRequest

PROGRAM = """
import time
from dflash_offline.extract import stop_request
stop_request.COMMIT_S, stop_request._UNWIND_S = {limits}
with stop_request.StopRequest() as stop, stop.deferred():
    print("ready", flush=True)
    {then}
    time.sleep(60)
"""


@pytest.fixture
def program():
    started = []

    def start(then: str = "pass", limits: str = "14.0, 4.0") -> subprocess.Popen:
        code = PROGRAM.format(then=then, limits=limits)
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_noted_in_the_hot_loop(number):
    with StopRequest() as stop:
        with stop.deferred():
            assert stop.seconds_left() == float("inf")
            os.kill(os.getpid(), number)
            # torchrun and a terminal send the same one twice.
            os.kill(os.getpid(), number)
            assert stop.is_set
            assert 0 < stop.seconds_left() <= COMMIT_S
        with pytest.raises(Stopped, match=f"stopped by {number.name}"):
            stop.check()


def test_request_of_a_thread_wakes_the_main_thread():
    told = threading.Event()
    with StopRequest() as stop:
        stop.on_request = told.set
        threading.Timer(0.05, stop.request, ["worker 3 is gone"]).start()
        with pytest.raises(Stopped, match="worker 3 is gone"):
            time.sleep(30)
    assert told.wait(5)


def test_first_reason_counts_and_is_said_once():
    with StopRequest() as stop, stop.deferred():
        stop.request("said elsewhere", is_said=True)
        stop.request("later")
        assert stop.reason == "said elsewhere"
        with pytest.raises(SystemExit) as end:
            stop.check()
    assert end.value.code == 3


def test_second_signal_ends_at_once(program):
    process = program()
    process.terminate()
    time.sleep(0.7)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM


def test_run_that_does_not_end_is_ended(program):
    process = program("stop.request('the disk is stuck', commit_s=0.1)", "0.1, 0.1")
    assert process.wait(timeout=20) == 3
    assert process.stderr.read() == "error: the disk is stuck (packs under way were given up)\n"
