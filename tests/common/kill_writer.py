"""Write stores until they are finished or the process is killed; a program for test_kills.py.

Run as `kill_writer.py HIDDEN`. A server: each line of its input is a JSON object with `url`,
`options`, `seed` of the order of the packs, and `kill_after` in seconds or null. For each it forks
a writer, kills it at that time, and answers with its exit status. Forked, because imports take
longer than writing a store.
"""

import json
import os
import random
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from dflash_offline.common.s3_blobs import S3Blobs

LENGTHS = (300, 200, 512, 450, 60, 500, 130, 380, 512, 512)


def write(corpus: Any, order: dict[str, Any]) -> None:
    """Commit what is missing."""
    with corpus.open(order["url"], storage_options=tuple(order["options"])) as store:
        if isinstance(store.blobs, S3Blobs):
            # Packs go in parts, so that a kill may come between them; 5 MiB is the least.
            store.blobs.single_put_bytes, store.blobs.part_bytes = 1 << 19, 5 << 20
        packs = sorted(set(range(corpus.plan.num_packs)) - store.committed)
        random.Random(order["seed"]).shuffle(packs)
        corpus.commit(store, packs)


def fork_writer(corpus: Any, order: dict[str, Any]) -> int:
    """Start a writer and return its process number."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            write(corpus, order)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # A forked process must never go on as the server.
            os._exit(code)
    return process


def main() -> None:
    """Serve until the input ends."""
    conftest = runpy.run_path(str(Path(__file__).parent.parent / "conftest.py"))
    corpus = conftest["make_corpus"](lengths=LENGTHS, pack_tokens=512, hidden=int(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        process = fork_writer(corpus, order)
        ended = os.pidfd_open(process)
        if not select.select([ended], [], [], order["kill_after"])[0]:
            os.kill(process, signal.SIGKILL)
        os.close(ended)
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
