"""What a store will take on disk, before it is written."""

import math

import numpy as np

from dflash_offline.common.codecs import codec_named
from dflash_offline.common.shards import ALIGN_BYTES
from dflash_offline.common.store import (
    EXACT,
    EXACT_ROWS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    Plan,
    Schema,
)

# Share of rows beside position 0 that an int codec may store exactly.
_EXACT_FRAC = 0.01


def estimate_bytes(schema: Schema, plan: Plan) -> int:
    """Return what the store will take on disk at most, in bytes, tokens and target apart."""
    tokens = int(plan.column("length").sum())
    raw = tokens * schema.bytes_per_token()
    best = 2 * 4 * schema.num_topk * tokens
    specs = {name: schema.arrays[name] for name in schema.state_arrays}
    if schema.is_coded:
        apart = (EXACT, EXACT_ROWS, TOPK_IDS, TOPK_LOGPROBS)
        names = [name for name in specs if name not in apart]
        coded = sum(_bytes_of(specs[name].shard, specs[name].dtype) for name in names)
        first_rows = len(plan.samples) * schema.bytes_per_token()
        states = tokens * coded // schema.pack_tokens + first_rows + int(_EXACT_FRAC * raw)
    else:
        states = int(raw * codec_named(schema.codec).ratio)
    # Padding to 4 KiB, the index, and the zeros that fill the last inner chunk of a layer where
    # nothing makes them small.
    chunks = sum(spec.num_chunks for spec in specs.values())
    fill = sum(
        math.prod(spec.shard[:-2]) * _bytes_of(spec.chunk, spec.dtype)
        for spec in specs.values()
        if spec.codec == "raw"
    )
    token_bytes = 5 * schema.pack_tokens
    return states + best + plan.num_packs * (chunks * ALIGN_BYTES + fill + token_bytes)


def _bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
