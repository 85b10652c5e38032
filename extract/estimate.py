"""What an extraction would take, in bytes and seconds: the answer to `--dry-run`."""

import time

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.progress import format_seconds
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.target import Target
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.plan import padded_fraction
from dflash_offline.extract.planning import Planned

_TIMED_TOKENS = 2048


def estimate_sentence(config: ExtractConfig, planned: Planned, target: Target) -> str:
    """Return what the store would take, in bytes and seconds."""
    free = blobs_at(config.out, config.storage_option).free_bytes()
    needed = estimate_bytes(planned.schema, planned.plan)
    tokens_per_s = _measure(planned, target)
    tokens = int(planned.plan.column("length").sum()) / (1 - padded_fraction(planned.plan))
    room = "unknown" if free is None else f"{free / 1e9:.2f} GB"
    return (
        f"dry run: at most {needed / 1e9:.3f} GB in {planned.plan.num_packs} packs, {room} free; "
        f"about {format_seconds(tokens / tokens_per_s)} at {tokens_per_s:,.0f} tokens/s of the "
        f"forward on this {target.device.type}. Nothing was written"
    )


def _measure(planned: Planned, target: Target) -> float:
    """Return tokens a second of the forward, from one small batch after a warm-up."""
    batch = [planned.tokens[i][:_TIMED_TOKENS] for i in planned.plan.batches[0][0]]
    while len(batch) > 1 and sum(map(len, batch)) > _TIMED_TOKENS:
        batch.pop()
    with StateForward(target, planned.schema.layers, keep_final=False) as forward:
        forward(batch)
        began = time.monotonic()
        forward(batch)
    return sum(map(len, batch)) / (time.monotonic() - began)
