"""The run's log in the store: one JSONL file a worker, never part of the content."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_offline.common.blobs import Blobs, LocalBlobs
from dflash_offline.common.errors import Stopped
from dflash_offline.common.options import config_as_dict
from dflash_offline.common.progress import JsonLog
from dflash_offline.common.store import LOGS
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.place import Place
from dflash_offline.extract.self_check import Check


def log_checks(log: JsonLog, kind: str, checks: Sequence[Check]) -> None:
    """Write the lines of a check's table."""
    for check in checks:
        record = {"name": check.name, "value": check.value, "bound": check.bound}
        log.write({"kind": kind, **record, "ok": check.is_good})


@contextmanager
def run_log(
    blobs: Blobs, config: ExtractConfig, place: Place, checks: Sequence[Check] = ()
) -> Iterator[JsonLog]:
    """Keep a worker's log: a file that grows, on object storage one for each run."""
    stem = "extract" if place.is_first else f"extract-rank{place.rank}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = blobs.root / LOGS if isinstance(blobs, LocalBlobs) else Path(temporary)
        log = JsonLog(folder / f"{stem}.jsonl")
        log.write({"kind": "run", "config": config_as_dict(config), "workers": place.size})
        log_checks(log, "self-check", checks)
        try:
            yield log
        finally:
            log.close()
            if not isinstance(blobs, LocalBlobs):
                # The reason why a run ends matters more than its log.
                with suppress(Stopped, OSError):
                    content = (folder / f"{stem}.jsonl").read_bytes()
                    blobs.create(f"{LOGS}/{stem}-{time.time_ns()}.jsonl", [content])
