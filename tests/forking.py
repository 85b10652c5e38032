"""What the programs share whose processes are killed: forks that end as processes of their own."""

import os
import sys
import traceback
from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Start a process and return its number."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            # It must never go on as the process that forked it.
            os._exit(code)
    return process
