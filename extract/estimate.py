"""What an extraction would take, in bytes and seconds: the answer to `--dry-run`.

From the target's configuration and a sample of the corpus; no weight is loaded.
"""

import time
from itertools import chain, islice

import torch

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.progress import format_seconds
from dflash_offline.common.store_checks import refuse_small_disk
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.memory_model import FreeMemory, free_device_bytes
from dflash_offline.extract.plan import make_plan, padded_fraction
from dflash_offline.extract.planning import Prepared, prepare, refuse_small_memory
from dflash_offline.extract.rows import count_rows, read_rows

# Rows from all over the corpus that stand for it.
_SAMPLE_ROWS = 2048
# Side of the matrices that are timed, and the share of their speed that a forward reaches: an
# 8-billion target reaches 0.7 of it on an H200.
_TIMED_WIDTH = {"cpu": 1024, "cuda": 8192}
_FORWARD_SHARE = 0.7


def dry_run(config: ExtractConfig, device: torch.device) -> str:
    """Return what the extraction would take, a line for each kind.

    Raises:
        BadInput: what the user gave cannot be used, or the extraction does not fit.
    """
    free = FreeMemory(free_device_bytes(device))
    prepared = prepare(config, device, free)
    total = sum(map(count_rows, config.data))
    every = max(1, total // _SAMPLE_ROWS)
    rows = islice(chain.from_iterable(map(read_rows, config.data)), 0, None, every)
    sample, report = prepared.reader.convert(rows, config.num_samples)
    plan, _ = make_plan(sample, report, prepared.plan_options)
    # What is read beyond the sample is like it.
    times = max(1.0, total / report.num_rows)
    if config.num_samples is not None:
        times = max(1.0, min(times, config.num_samples / report.num_kept))
    num_packs = round(plan.num_packs * times)
    memory = prepared.memory(device, num_packs=num_packs)
    refuse_small_memory(memory, config.batch_tokens, free)
    needed = int(estimate_bytes(prepared.schema, plan) * times)
    blobs = blobs_at(config.out, config.storage_option)
    refuse_small_disk(blobs, needed, {})
    tokens = plan.column("length").sum() * times
    speed = prepared.num_workers * _forward_speed(prepared, device)
    left = blobs.free_bytes()
    room = "unknown" if left is None else f"{left / 1e9:.2f} GB"
    share = f"from {report.num_rows:,} of {total:,} rows: " if times > 1 else ""
    return (
        f"{memory.sentence(free)}\n"
        f"dry run, {share}{tokens:,.0f} tokens, {padded_fraction(plan):.0%} padding; at most "
        f"{needed / 1e9:.3f} GB in {num_packs:,} packs, {room} free; about "
        f"{format_seconds(tokens / (1 - padded_fraction(plan)) / speed)} at {speed:,.0f} tokens/s "
        f"of {prepared.num_workers} {device.type}. Nothing was written"
    )


def _forward_speed(prepared: Prepared, device: torch.device) -> float:
    """Return a guess at the tokens a second of one worker, from the speed of a matrix product."""
    width = _TIMED_WIDTH[device.type]
    a = torch.ones(width, width, dtype=prepared.dtype, device=device)
    seconds = min(_timed(a) for _ in range(3))
    return _FORWARD_SHARE * 2 * width**3 / seconds / prepared.cost.flops_per_token


def _timed(a: torch.Tensor) -> float:
    out = a @ a
    float(out[0, 0])  # waits for a GPU
    began = time.monotonic()
    out = a @ a
    float(out[0, 0])
    return time.monotonic() - began
