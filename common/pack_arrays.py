"""The arrays of one pack: from states or codes to arrays by name, and to the chunks of a shard.

Reading turns the arrays of an int store into codes of some slots and tokens. Letters: K captured
layers, S slots (the K layers, then the final state), T tokens, N rows stored exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.common.direct_io import empty_aligned
from dflash_offline.common.store import (
    EXACT,
    EXACT_ROWS,
    FEATURES,
    FINAL,
    FINAL_SCALES,
    SCALES,
    TOPK_IDS,
    TOPK_LOGPROBS,
    ArraySpec,
    Schema,
)
from dflash_offline.common.topk import TopK

if TYPE_CHECKING:
    import torch

    from dflash_offline.common.quantize import Calibration, EncodedStates

# Fills arrays with inner chunks of one array of a pack: (array name, [(chunk number, array)]).
ReadChunks = Callable[[str, Sequence[tuple[int, np.ndarray]]], None]


def state_arrays(
    schema: Schema,
    features: "np.ndarray | EncodedStates",
    final: np.ndarray | None,
    *,
    is_first: np.ndarray,
    calibration: "Calibration | None",
    topk: TopK | None = None,
) -> dict[str, np.ndarray]:
    """Return what is written for a pack, by array; encodes states where codes are stored.

    Args:
        features: uint16 [K, T, H], or all states as codes on the CPU.
        final: uint16 [T, H], for stores with that teacher.
        is_first: bool [T], position 0 of a sample.
        calibration: of an int store.
        topk: for stores with that teacher.
    """
    best = {} if topk is None else {TOPK_IDS: topk.ids, TOPK_LOGPROBS: topk.logprobs}
    for name, values in best.items():
        assert values.shape == (len(is_first), schema.num_topk), f"{name} {values.shape}"
    if not isinstance(features, np.ndarray):
        assert features.num_tokens == len(is_first), f"{features.num_tokens}, not {len(is_first)}"
        return coded_arrays(schema, features) | best
    states = {FEATURES: features} | ({FINAL: final} if final is not None else {})
    for name, values in states.items():
        assert values.shape[-2:] == (len(is_first), schema.hidden), f"{name} {values.shape}"
    if not schema.is_coded:
        return states | best
    import torch

    from dflash_offline.common.quantize import encode_states

    assert calibration is not None, "write_calibration comes before the first pack"
    tensors = as_bfloat16(features), None if final is None else as_bfloat16(final)
    encoded = encode_states(*tensors, torch.from_numpy(is_first), calibration)
    return coded_arrays(schema, encoded) | best


def coded_arrays(schema: Schema, encoded: "EncodedStates") -> dict[str, np.ndarray]:
    """Return the arrays of a pack in an int store, by name, from codes on the CPU."""
    slot, token = encoded.exact_rows.numpy().T
    exact_rows = (1 + slot.astype(np.int64) * schema.pack_tokens + token).astype(np.int32)
    arrays = {
        FEATURES: encoded.codes.numpy(),
        SCALES: bits_of(encoded.scales),
        EXACT_ROWS: exact_rows[:, None],
        EXACT: bits_of(encoded.exact),
    }
    if encoded.final_codes is not None and encoded.final_scales is not None:
        arrays[FINAL] = encoded.final_codes.numpy()
        arrays[FINAL_SCALES] = bits_of(encoded.final_scales)
    return arrays


def bits_of(values: "torch.Tensor") -> np.ndarray:
    """View a bfloat16 tensor as uint16 bit patterns of the same shape."""
    import torch

    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def inner_chunks(spec: ArraySpec, values: np.ndarray) -> Iterator[np.ndarray | None]:
    """Yield the inner chunks of rows [..., rows, width] in C order; `None` past their end."""
    capacity, size = (spec.shard[-2], spec.chunk[-2]) if len(spec.shard) > 1 else spec.shard * 2
    for layer in values.reshape(-1, *values.shape[-2:]):
        for first in range(0, capacity, size):
            rows = layer[first : first + size]
            if len(rows) == 0:
                yield None
            elif len(rows) == size and rows.flags.c_contiguous:
                yield rows
            else:
                whole = np.zeros((size, *rows.shape[1:]), values.dtype)
                whole[: len(rows)] = rows
                yield whole


def read_rows(
    read: ReadChunks, spec: ArraySpec, name: str, *, slots: Sequence[int], tokens: range
) -> np.ndarray:
    """Return rows [slots, tokens, width] of an array, from the inner chunks that cover them."""
    size, width = spec.chunk[-2:]
    per_slot = spec.shard[-2] // size
    first, last = tokens.start // size, -(-tokens.stop // size)
    out = empty_aligned((len(slots), (last - first) * size, width), spec.dtype)
    wanted = [
        (slot * per_slot + chunk, out[row, (chunk - first) * size :][:size])
        for row, slot in enumerate(slots)
        for chunk in range(first, last)
    ]
    read(name, wanted)
    return out[:, tokens.start - first * size :][:, : len(tokens)]


def read_topk(read: ReadChunks, schema: Schema, *, tokens: range) -> TopK | None:
    """Return the teacher's best tokens at some tokens of a pack, where the store has them."""
    if not schema.num_topk:
        return None
    ids, logprobs = (
        read_rows(read, schema.arrays[name], name, slots=[0], tokens=tokens)[0]
        for name in (TOPK_IDS, TOPK_LOGPROBS)
    )
    return TopK(ids=ids, logprobs=logprobs)


def read_encoded(
    read: ReadChunks, schema: Schema, *, slots: Sequence[int], tokens: range
) -> "EncodedStates":
    """Return the codes of some layers and the final state at some tokens of a pack.

    Args:
        slots: of the layers; rows and exact rows of the result count in this order.
    """
    import torch

    from dflash_offline.common.quantize import EncodedStates

    def rows(name: str, of: Sequence[int]) -> np.ndarray:
        return read_rows(read, schema.arrays[name], name, slots=of, tokens=tokens)

    has_final = FINAL in schema.state_arrays
    stored = [*slots, len(schema.layers)] if has_final else [*slots]
    exact_rows, exact = _read_exact(read, schema, stored=stored, tokens=tokens)
    return EncodedStates(
        codes=torch.from_numpy(rows(FEATURES, slots)),
        scales=as_bfloat16(rows(SCALES, slots)),
        final_codes=torch.from_numpy(rows(FINAL, [0])[0]) if has_final else None,
        final_scales=as_bfloat16(rows(FINAL_SCALES, [0])[0]) if has_final else None,
        exact_rows=torch.from_numpy(exact_rows),
        exact=as_bfloat16(exact),
    )


def _read_exact(
    read: ReadChunks, schema: Schema, *, stored: Sequence[int], tokens: range
) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 [N, 2] (place in `stored`, place in `tokens`) and uint16 [N, H]."""
    spec = schema.arrays[EXACT]
    index = np.empty(spec.shard[0], np.int32)
    read(EXACT_ROWS, [(0, index)])
    slot, token = np.divmod(index[index > 0] - 1, schema.pack_tokens)
    place_of = np.full(schema.num_slots, -1)
    place_of[list(stored)] = np.arange(len(stored))
    found = (place_of[slot] >= 0) & (token >= tokens.start) & (token < tokens.stop)
    at = np.flatnonzero(found)
    at = at[np.argsort(place_of[slot[at]], kind="stable")]
    size = spec.chunk[0]
    chunks = np.unique(at // size)
    rows = np.empty((len(chunks) * size, schema.hidden), np.uint16)
    read(EXACT, [(int(c), rows[i * size :][:size]) for i, c in enumerate(chunks)])
    places = np.searchsorted(chunks, at // size) * size + at % size
    exact_rows = np.stack([place_of[slot[at]], token[at] - tokens.start], axis=1)
    return exact_rows.astype(np.int32), rows[places]


def as_bfloat16(bits: np.ndarray) -> "torch.Tensor":
    """View uint16 bit patterns as a bfloat16 tensor of the same shape."""
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
