"""kill -9 of the writer at random points: no wrong read, nothing committed lost, and it goes on.

`--kills N` sets the number of kills for each storage; by default a few.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import MissingStore
from dflash_offline.common.lease import is_owner_key
from dflash_offline.common.s3_blobs import CLIENTS

LOST_WORKER = 3
WRITER = Path(__file__).parent / "kill_writer.py"
# The program imports tests/forking.py.
PATH = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
# On S3 a full pack is two parts of an upload.
HIDDEN = {"local": 1024, "s3": 4096}
LENGTHS = (300, 200, 512, 450, 60, 500, 130, 380, 512, 512)


class Writers:
    """The program that forks writers of one store after another."""

    def __init__(self, hidden: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(hidden)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
            text=True,
        )

    def write(self, url: str, options: tuple[str, ...], **order: Any) -> bool:
        """Run one to its end, or till one of its workers is killed; returns whether it ended.

        Args:
            order: `seed`, and if they are not to be the least: `workers`, `kill_after` in seconds.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"workers": 1, "kill_after": None, **order, "url": url, "options": options}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        assert code in (0, LOST_WORKER, -signal.SIGKILL), "the writer failed; it says why above"
        return code == 0


@pytest.fixture
def writers(storage: str) -> Iterator[Writers]:
    started = Writers(HIDDEN[storage])
    yield started
    started.process.communicate()


def check_committed(url: str, options: tuple[str, ...], corpus) -> int:
    """Read every committed pack and compare; returns how many there are."""
    try:
        cache = open_cache(url, partial=True, storage_options=options)
    except MissingStore:
        return 0
    for document in cache.read_many(cache.samples):
        np.testing.assert_array_equal(document.features, corpus.features[document.index])
        np.testing.assert_array_equal(document.tokens, corpus.tokens[document.index])
        np.testing.assert_array_equal(document.loss_mask, corpus.masks[document.index])
    return len(cache.packs)


def content_of(url: str, options: tuple[str, ...]) -> dict[str, bytes]:
    """Every object but those of ownership and the indexes, whose number depends on the kills."""
    blobs = blobs_at(url, options)
    keys = [k for k in blobs.list("") if not is_owner_key(k) and not k.startswith("index-")]
    return {key: blobs.read(key) for key in keys}


@pytest.mark.parametrize("storage", ["local", "s3"])
def test_killed_writer_goes_on(storage, request, tmp_path, corpus_maker, writers):
    kills = request.config.getoption("--kills") or {"local": 10, "s3": 5}[storage]
    options: tuple[str, ...] = ()
    root = str(tmp_path / "stores")
    if storage == "s3":
        options = request.getfixturevalue("s3_server").options
        root = request.getfixturevalue("s3_url")
    corpus = corpus_maker(lengths=LENGTHS, pack_tokens=512, hidden=HIDDEN[storage])

    writers.write(f"{root}/first", options, seed=0)  # the first one waits for the imports
    begin = time.monotonic()
    writers.write(f"{root}/clean", options, seed=0)
    undisturbed_s = time.monotonic() - begin
    expected = content_of(f"{root}/clean", options)

    rng, done, rounds, left = random.Random(kills), 0, 0, []
    while done < kills:
        url, rounds, finished = f"{root}/round-{rounds}", rounds + 1, False
        num_packs, workers = 0, 1
        while not finished and done < kills:
            workers = rng.choice([n for n in (1, 2, 3) if n != workers])
            given = (*options, f"client={rng.choice(CLIENTS)}") if options else ()
            finished = writers.write(
                url,
                given,
                workers=workers,
                seed=rng.randrange(1000),
                kill_after=rng.uniform(0, 0.7 * undisturbed_s),
            )
            done += not finished
            found = check_committed(url, options, corpus)
            assert found >= num_packs, "a committed pack was lost"
            num_packs = found
            left.append(num_packs)
        writers.write(url, options, seed=1)
        assert check_committed(url, options, corpus) == corpus.plan.num_packs
        assert content_of(url, options) == expected
    some = {n: left.count(n) for n in sorted(set(left))}
    click.echo(
        f"{done} kills in {rounds} stores of {undisturbed_s:.2f} s; packs after each: {some}"
    )
