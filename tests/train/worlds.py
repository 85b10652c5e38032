"""Run a script as jobs of several sizes, in processes forked from one that has done its imports.

`python worlds.py 1,2,3 SCRIPT ARGUMENT...`; `{size}` in an argument is the size of the job. A
process that imports torch takes seconds, and a job of three takes them three times.
"""

import os
import socket
import sys
import traceback

import dflash_offline.train.cli
import dflash_offline.train.loop  # noqa: F401


def run_job(size: int, script: str, arguments: list[str]) -> bool:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork_rank(rank, size, port, script, arguments) for rank in range(size)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    return not any(codes)


def fork_rank(rank: int, size: int, port: int, script: str, arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = [script, *(each.format(size=size) for each in arguments)]
    code = 0
    try:
        with open(script) as file:
            exec(compile(file.read(), script, "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sizes, script, *arguments = sys.argv[1:]
    sys.exit(not all(run_job(int(size), script, arguments) for size in sizes.split(",")))
