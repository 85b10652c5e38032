"""kill -9 of `dflash-extract`: while it plans, and while two workers commit packs.

`--kills N` sets the number of each; by default two or three. With workers the launcher is hit, or
either of them, or all at once, and the last run of a store has another number of workers.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.store import shard_key

pytestmark = pytest.mark.slow

SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--teacher", "final")
PROGRAM = Path(__file__).parent / "fork_extract.py"
# The program imports tests/forking.py.
PATH = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
VICTIMS = ("launcher", "worker 0", "worker 1", "all")


class Commands:
    """Runs of the command, one after another."""

    def __init__(self, log: Path, is_running: Callable[[int], bool]) -> None:
        self.log = log
        self.is_running = is_running
        self.pid = 0
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
            text=True,
        )

    def start(self, *args: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([*map(str, args), str(self.log)]) + "\n")
        self.process.stdin.flush()
        self.pid = self.answer()

    def answer(self) -> int:
        """Return the process number of a run, or its exit code once it ends."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def workers(self) -> list[int]:
        """Process numbers of the workers, by rank."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def kill(self, victim: str) -> None:
        """Kill one process or all, and wait until every one of them is gone."""
        workers = self.workers()
        pids = {"launcher": [self.pid], "all": [self.pid, *workers]}
        pids |= {f"worker {rank}": [pid] for rank, pid in enumerate(workers)}
        for pid in pids[victim]:
            os.kill(pid, signal.SIGKILL)
        code = self.answer()
        assert code == (3 if victim.startswith("worker") else -signal.SIGKILL), self.log.read_text()
        give_up = time.monotonic() + 10
        while any(map(self.is_running, workers)):
            assert time.monotonic() < give_up, f"a worker outlives the {victim}"
            time.sleep(0.01)


@pytest.fixture
def commands(tmp_path: Path, is_running, monkeypatch) -> Iterator[Commands]:
    """What is kept of rows lies in `cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started = Commands(tmp_path / "log", is_running)
    yield started
    started.process.communicate()


def num_commits(store: Path) -> int:
    return len(list((store / "commit").glob("*.json")))


def check_same(store: Path, whole: Path) -> set[int]:
    """Compare every committed pack with an undisturbed run; returns which there are."""
    cache, expected = open_cache(str(store), partial=True), open_cache(str(whole))
    for pack in cache.packs:
        arrays = cache.record(pack)["arrays"]
        assert arrays == expected.record(pack)["arrays"], pack
        for name in arrays:
            key = shard_key(name, pack)
            assert (store / key).read_bytes() == (whole / key).read_bytes(), key
    read_some(cache, expected)
    return set(cache.packs)


def read_some(cache: Cache, expected: Cache) -> None:
    for index in cache.samples[:: max(1, len(cache.samples) // 20)]:
        found, wanted = cache.read(index), expected.read(index)
        assert found.features.tobytes() == wanted.features.tobytes()
        assert found.tokens.tobytes() == wanted.tokens.tobytes()


def test_killed_extractions_go_on(make_target, write_corpus, request, run, tmp_path, commands):
    kills = request.config.getoption("--kills") or 2
    args = ("--target", make_target("qwen3"), "--data", write_corpus(600), *SMALL)
    whole = tmp_path / "whole"
    commands.start(*args, "--out", whole, "--gpus", 1)
    assert commands.answer() == 0, commands.log.read_text()
    num_packs = open_cache(str(whole)).plan.num_packs
    rng, done, rounds = random.Random(kills), Counter(), 0
    while done.total() < kills:
        store, rounds, committed = tmp_path / f"round-{rounds}", rounds + 1, set()
        ends_at = rng.randrange(num_packs // 2, num_packs)
        while done.total() < kills and len(committed) < ends_at:
            commands.start(*args, "--out", store, "--gpus", 2)
            target = len(committed) + rng.randrange(1, 12)
            while num_commits(store) < target and commands.is_running(commands.pid):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            assert num_commits(store) < num_packs, "killed before the last commit"
            victim = rng.choice(VICTIMS)
            commands.kill(victim)
            done[victim] += 1
            found = check_same(store, whole)
            assert found >= committed, "a committed pack was lost"
            assert len(found) >= target
            committed = found
            click.echo(
                f"{done.total()}: {victim} killed, {len(found)} of {num_packs} packs", err=True
            )
        commands.start(*args, "--out", store, "--gpus", rng.choice([1, 3]))
        assert commands.answer() == 0, commands.log.read_text()
        assert len(check_same(store, whole)) == num_packs
        assert run(cache_command, "verify", "--deep", store) == 0
    click.echo(f"kills of {dict(done)} in {rounds} stores of {num_packs} packs")


def segments(cache: Path) -> dict[str, int]:
    """Tokens that planning has kept: a segment's path and when it was written."""
    found = {}
    for path in cache.rglob("planning/*/*/0*"):
        with suppress(FileNotFoundError):
            found[str(path)] = path.stat().st_mtime_ns
    return found


def planned(store: Path) -> dict[str, bytes]:
    """Everything of a store but its log, its lock and what names its own address."""
    files = {p.relative_to(store).as_posix(): p for p in store.rglob("*") if p.is_file()}
    own = ("logs/", ".owner", "zarr.json", "manifest.json")
    return {name: p.read_bytes() for name, p in files.items() if not name.startswith(own)}


def test_killed_plans_are_those_of_one_run(make_target, write_corpus, request, tmp_path, commands):
    """Killed while rows are tokenised, or when the plan is being written."""
    kills = request.config.getoption("--kills") or 3
    cache = tmp_path / "cache"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(600), *SMALL, "--plan-only")
    commands.start(*args, "--out", tmp_path / "whole", "--gpus", 1)
    assert commands.answer() == 0, commands.log.read_text()
    wanted = planned(tmp_path / "whole")
    rng, done, rounds, went_on = random.Random(kills), 0, 0, 0
    while done < kills:
        store, rounds, code = tmp_path / f"round-{rounds}", rounds + 1, -signal.SIGKILL
        while code:
            before = segments(cache)
            commands.start(*args, "--out", store, "--gpus", 1)
            is_writing = rng.random() < 0.3
            target = len(before) + rng.randrange(1, 6)
            while commands.is_running(commands.pid):
                ready = store.exists() if is_writing else len(segments(cache)) >= target
                if ready and done < kills:
                    time.sleep(rng.uniform(0, 0.03))
                    with suppress(ProcessLookupError):
                        os.kill(commands.pid, signal.SIGKILL)
                    break
                time.sleep(0.002)
            code = commands.answer()
            assert code in (0, -signal.SIGKILL), commands.log.read_text()
            went_on += "tokenised by an earlier run" in commands.log.read_text()
            if code:
                done += 1
                after = segments(cache)
                assert before.items() <= after.items() or (store / "manifest.json").exists()
        assert planned(store) == wanted
        assert not segments(cache)
    assert went_on
    click.echo(f"{done} kills in {rounds} stores, of which {went_on} runs went on")
