"""kill -9 of the writer at random points: no wrong read, nothing committed lost, and it goes on.

`--kills N` sets the number of kills for each storage; by default a few.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import MissingStore
from dflash_offline.common.lease import is_owner_key

WRITER = Path(__file__).parent / "kill_writer.py"
LENGTHS = (300, 200, 512, 450, 60, 500, 130, 380, 512, 512)


class Writer:
    """The program, started and past its imports."""

    def __init__(self, url: str, options: tuple[str, ...], seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), url, str(seed), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.communicate()

    def kill_after(self, seconds: float) -> bool:
        """Kill it, and return whether that came before its end."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        out, problem = self.process.communicate()
        assert self.process.returncode in (0, -9), problem
        return out != "finished\n"

    def finish(self) -> None:
        out, problem = self.process.communicate()
        assert (out, self.process.returncode) == ("finished\n", 0), problem


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
def test_killed_writer_goes_on(storage, request, tmp_path, corpus_maker):
    kills = request.config.getoption("--kills") or {"local": 10, "s3": 5}[storage]
    options: tuple[str, ...] = ()
    root = str(tmp_path / "stores")
    if storage == "s3":
        options = request.getfixturevalue("s3_server").options
        root = request.getfixturevalue("s3_url")
    corpus = corpus_maker(lengths=LENGTHS, pack_tokens=512, hidden=1024)

    clean = f"{root}/clean"
    writer = Writer(clean, options, 0)
    begin = time.monotonic()
    writer.finish()
    undisturbed_s = time.monotonic() - begin
    expected = content_of(clean, options)

    rng, done, rounds = random.Random(kills), 0, 0
    while done < kills:
        url, rounds, finished = f"{root}/round-{rounds}", rounds + 1, False
        num_packs = 0
        while not finished and done < kills:
            writer = Writer(url, options, seed=rng.randrange(1000))
            finished = not writer.kill_after(rng.uniform(0, 0.7 * undisturbed_s))
            done += not finished
            left = check_committed(url, options, corpus)
            assert left >= num_packs, "a committed pack was lost"
            num_packs = left
        Writer(url, options, seed=1).finish()
        assert check_committed(url, options, corpus) == corpus.plan.num_packs
        assert content_of(url, options) == expected
