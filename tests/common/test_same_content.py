"""Whichever way a store came to be, it decodes to the content of one written in a single run."""

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import CopyConfig, VerifyConfig
from dflash_offline.common.cache_copy import copy
from dflash_offline.common.cache_verify import verify
from dflash_offline.common.store import COMMIT

SMALL = ("--pack-tokens", "256", "--batch-tokens", "512", "--layers", "0,1,4", "--teacher", "final")
MAIN = "from dflash_offline.extract.cli import main; main()"


def content_hash(cache: Cache, only: str = "") -> str:
    """SHA-256 of everything that is decoded, sample by sample in the order of their ids."""
    digest = hashlib.sha256()
    chosen = [i for i in cache.samples if cache.plan.samples[i].id.startswith(only)]
    for document in sorted(cache.read_many(chosen), key=lambda document: document.id):
        digest.update(f"{document.id} {document.source}".encode())
        for array in (document.tokens, document.loss_mask, document.features, document.final):
            assert array is not None
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def extraction(*args: object) -> subprocess.Popen[str]:
    """Start `dflash-extract` as a shell does."""
    command = [sys.executable, "-c", MAIN, *map(str, args)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(*args: object) -> None:
    process = extraction(*args)
    _, said = process.communicate()
    assert process.returncode == 0, said


def interrupt(url: str, options: tuple[str, ...], *args: object) -> None:
    """Run it until some packs are there, then stop it as a batch system does."""
    process, blobs = extraction(*args), blobs_at(url, options)
    while len(blobs.list(COMMIT)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 3, said


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of conversations of many lengths."""
    files = []
    for name, count in (("one", 300), ("two", 40)):
        rows = [
            f'{{"id": "{name}-{i}", "messages": [{{"role": "user", "content": "{name} {i}?"}},'
            f' {{"role": "assistant", "content": "{"so " * (i * 7 % 11)}{i}."}}]}}\n'
            for i in range(count)
        ]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(rows))
    return files[0], files[1]


@pytest.mark.slow
def test_every_way_gives_the_same_content(tiny_target, corpora, s3_server, s3_url, tmp_path):
    """Stopped with two workers on S3, finished with one, appended to by three, copied and back."""
    first, second = corpora
    args = ("--target", tiny_target, *SMALL)
    options = s3_server.options
    remote = (*args, "--out", s3_url, *(f"--storage-option={each}" for each in options))
    for name, data in (("first", first), ("second", second)):
        finish(*args, "--data", data, "--out", tmp_path / name)
    hashes = {name: content_hash(open_cache(str(tmp_path / name))) for name in ("first", "second")}
    assert hashes["first"] != hashes["second"]

    interrupt(s3_url, options, *remote, "--data", first, "--gpus", 2)
    finish(*remote, "--data", first, "--gpus", 1)
    assert content_hash(open_cache(s3_url, storage_options=options)) == hashes["first"]
    finish(*remote, "--data", second, "--gpus", 3, "--append")
    copy(CopyConfig(source=s3_url, destination=str(tmp_path / "disk"), storage_option=options))
    back = f"{s3_url}-back"
    copy(CopyConfig(source=str(tmp_path / "disk"), destination=back, storage_option=options))
    for url, given in ((s3_url, options), (str(tmp_path / "disk"), ()), (back, options)):
        cache = open_cache(url, storage_options=given)
        assert content_hash(cache, only="one") == hashes["first"], url
        assert content_hash(cache, only="two") == hashes["second"], url
        verify(VerifyConfig(url=url, deep=True, storage_option=given))
