"""A flipped bit, or a file cut short, in every kind of file: named by `verify`, never read as data.

`--flips N` sets how many there are over all stores, 200 by default. Files of ownership and logs of
runs hold nothing that is read as data, and are left out.
"""

import random
from collections import Counter, defaultdict
from pathlib import Path

import click
import pytest

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import CopyConfig, VerifyConfig
from dflash_offline.common.cache_copy import copy
from dflash_offline.common.cache_verify import verify
from dflash_offline.common.errors import BadInput, DamagedStore, FoundProblems
from dflash_offline.common.lease import is_owner_key

CASES = [(codec, "final") for codec in ("raw", "lossless", "int8", "int4", "int3")]
CASES += [("lossless", "topk:3")]


def make_store(folder: Path, codec: str, teacher: str, corpus_maker) -> Path:
    """A store with two plans, several indexes, a pack that was given up and written again."""
    first = corpus_maker(teacher=teacher, lengths=(40, 70, 25, 64))
    more = {"seed": 1, "source": "more", "lengths": (50, 31)}
    second = corpus_maker(codec=codec, teacher=teacher, **more)
    second.target_files = first.target_files
    first.write(folder / "first")
    copy(CopyConfig(source=str(folder / "first"), destination=str(folder / "s"), codec=codec))
    with second.open(folder / "s", append=True) as store:
        first_pack = store.plan.num_packs - second.plan.num_packs
        second.commit(store, first_pack=first_pack)
        store.drop_packs({first_pack})
        second.commit(store, [0], first_pack=first_pack)
    return folder / "s"


def content_of(url: str) -> dict[str, bytes]:
    """All that a store gives its readers, as bytes."""
    cache = open_cache(url, partial=True)
    content = {
        "config": repr(cache.target_config).encode(),
        "embedding": cache.target_tensor("embed_tokens").numpy().tobytes(),
        "samples": repr([cache.plan.samples[i] for i in cache.samples]).encode(),
        "root": repr((cache.schema, cache.identity, cache.options)).encode(),
    }
    for document in cache.read_many(cache.samples):
        arrays = {n: getattr(document, n) for n in ("tokens", "loss_mask", "features", "final")}
        if document.topk is not None:
            arrays |= {"ids": document.topk.ids, "logprobs": document.topk.logprobs}
        for name, values in arrays.items():
            content[f"{document.id} {name}"] = b"" if values is None else values.tobytes()
    return content


def what_verify_says(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The words of `dflash-cache verify --deep`, empty where it finds nothing."""
    capsys.readouterr()
    try:
        verify(VerifyConfig(url=url, deep=True))
    except FoundProblems:
        return capsys.readouterr().out
    except (DamagedStore, BadInput) as problem:
        return str(problem)
    return ""


def what_a_read_says(url: str, clean: dict[str, bytes]) -> str:
    """Why a reader stops, empty where it reads exactly what was written."""
    try:
        read = content_of(url)
    except (DamagedStore, BadInput) as problem:
        return str(problem)
    assert read == clean, "wrong data"
    return ""


def names(words: str, key: str) -> bool:
    """Whether a message says which file is wrong; a root of another format may be a newer one."""
    return key in words or (key == "zarr.json" and "has store format" in words)


@pytest.mark.parametrize(("codec", "teacher"), CASES)
def test_every_flip_and_cut_is_named(codec, teacher, corpus_maker, tmp_path, request, capsys):
    url = make_store(tmp_path, codec, teacher, corpus_maker)
    clean = content_of(str(url))
    assert not what_verify_says(str(url), capsys)
    kinds = defaultdict(list)
    for path in sorted(url.rglob("*")):
        key = path.relative_to(url).as_posix()
        if path.is_file() and not is_owner_key(key):
            kinds["".join(c for c in key if not c.isdigit())].append(key)
    rng, done, stopped = random.Random(codec + teacher), Counter(), 0
    # Every kind of file has its turn.
    count = max(len(kinds), request.config.getoption("--flips") // len(CASES))
    for number in range(count):
        kind = sorted(kinds)[number % len(kinds)]
        key = rng.choice(kinds[kind])
        good = (url / key).read_bytes()
        place, cut = rng.randrange(len(good)), rng.random() < 0.25
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        (url / key).write_bytes(good[:place] if cut else bad)
        what = f"{key}: {'cut to' if cut else 'bit flipped in byte'} {place} of {len(good)}"
        said = what_verify_says(str(url), capsys)
        assert names(said, key), (what, said)
        said = what_a_read_says(str(url), clean)
        assert not said or names(said, key), (what, said)
        stopped += bool(said)
        (url / key).write_bytes(good)
        done[kind] += 1
    with capsys.disabled():
        kinds_met = f"{done.total()} in {len(done)} kinds of file"
        click.echo(f"\n{codec}, {teacher}: {kinds_met}, {stopped} stop a read")
