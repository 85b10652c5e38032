"""Write stores until they are finished or a process is killed; a program for test_kills.py.

Run as `kill_writer.py HIDDEN`. A server: each line of its input is a JSON object with `url`,
`options`, `workers`, `seed`, and `kill_after` in seconds or null. For each it forks an owner of the
store, who forks the other workers; it kills one of them at that time, and answers with the owner's
exit status. Forked, because imports take longer than writing a store, and before anything is open.
"""

import json
import os
import random
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any

from forking import fork

from dflash_offline.common.launch import die_with
from dflash_offline.common.s3_blobs import S3Blobs
from dflash_offline.common.store_writer import Store

LENGTHS = (300, 200, 512, 450, 60, 500, 130, 380, 512, 512)
LOST_WORKER = 3


def use_parts(store: Store) -> None:
    """Let packs go in parts, so that a kill may come between them; 5 MiB is the least on S3."""
    if isinstance(store.blobs, S3Blobs):
        store.blobs.single_put_bytes, store.blobs.part_bytes = 1 << 19, 5 << 20


def write(corpus: Any, order: dict[str, Any]) -> None:
    """Own a store and commit what is missing, together with other workers."""
    url, options = order["url"], tuple(order["options"])
    pipes = [os.pipe() for _ in range(order["workers"] - 1)]

    def help_out(share: int) -> None:
        die_with(os.getppid())
        packs, claim = json.loads(os.read(share, 4096) or b'[[], ""]')
        if packs:
            store = Store.join(url, options, claim=claim)
            use_parts(store)
            corpus.commit(store, packs)

    others = [fork(lambda share=share: help_out(share)) for share, _ in pipes]
    with corpus.open(url, storage_options=options) as store:
        use_parts(store)
        packs = sorted(set(range(corpus.plan.num_packs)) - store.committed)
        random.Random(order["seed"]).shuffle(packs)
        for number, (_, give) in enumerate(pipes, 1):
            os.write(give, json.dumps([packs[number :: order["workers"]], store.claim]).encode())
        corpus.commit(store, packs[:: order["workers"]])
        ends = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in others]
        if any(ends):
            raise SystemExit(LOST_WORKER if set(ends) <= {0, -signal.SIGKILL} else 1)
        store.refresh()


def kill_one_of(owner: int, rng: random.Random) -> None:
    """Kill the owner or one of the processes that it forked."""
    others = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    os.kill(rng.choice([owner, *map(int, others)]), signal.SIGKILL)


def main() -> None:
    """Serve until the input ends."""
    conftest = runpy.run_path(str(Path(__file__).parent.parent / "conftest.py"))
    corpus = conftest["make_corpus"](lengths=LENGTHS, pack_tokens=512, hidden=int(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        owner = fork(lambda order=order: write(corpus, order))
        ended = os.pidfd_open(owner)
        if not select.select([ended], [], [], order["kill_after"])[0]:
            kill_one_of(owner, random.Random(order["seed"]))
        os.close(ended)
        _, status = os.waitpid(owner, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
