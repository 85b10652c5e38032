"""Write a store until it is finished or the process is killed; a program for test_kills.py.

Run as `kill_writer.py URL SEED [KEY=VALUE ...]`; the seed only decides the order of the packs.
"""

import os
import random
import runpy
import sys
from pathlib import Path

import click

from dflash_offline.common.s3_blobs import S3Blobs

LENGTHS = (300, 200, 512, 450, 60, 500, 130, 380, 512, 512)


def main() -> None:
    url, seed, *options = sys.argv[1:]
    conftest = runpy.run_path(str(Path(__file__).parent.parent / "conftest.py"))
    corpus = conftest["make_corpus"](lengths=LENGTHS, pack_tokens=512, hidden=1024)
    click.echo("ready")
    with corpus.open(url, storage_options=tuple(options)) as store:
        if isinstance(store.blobs, S3Blobs):
            # Packs go in parts, so that a kill may come between them.
            store.blobs.single_put_bytes, store.blobs.part_bytes = 1 << 19, 5 << 20
        packs = sorted(set(range(corpus.plan.num_packs)) - store.committed)
        random.Random(seed).shuffle(packs)
        corpus.commit(store, packs)
    click.echo("finished")
    # pyarrow aborts now and then while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
