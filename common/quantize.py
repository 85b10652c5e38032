"""States as int8, int4 or int3 codes: the arithmetic, the same to the bit on a CPU and on a GPU.

Every step is one IEEE fp32 operation on tensors (no fused multiply-add, no library reduction whose
order may change), so codes made on a GPU decode on a CPU to the same bfloat16. The order of
operations is the format; "Int codecs" in docs/store-format.md states it with a decoder in numpy.
What is fitted once for a store is common/calibration.py. Letters: K captured layers, S slots (the
K layers, then the final state where the store has one), T tokens, H hidden, W bytes of a row of
codes, G groups of a row, N rows stored exactly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from dflash_offline.common.codecs import GROUP

# Keeps subnormal numbers out of the decoder; no state is that small against its channel.
MIN_SCALE = 2.0**-64
# Lloyd's levels for a normal variable (0.2451, 0.7560, 1.3439, 2.1520) in multiples of 1/256, so
# that sums of 64 of them are exact in fp32; thresholds halfway between.
LEVELS = (63 / 256, 194 / 256, 344 / 256, 551 / 256)
THRESHOLDS = tuple((a + b) / 2 for a, b in pairwise(LEVELS))
_MAX_CODE = {"int8": 127, "int4": 7}
_PER_SLOT = ("mean", "reciprocal", "scale")
# Values of a block of rows: temporaries stay in a CPU's cache, or bounded on a GPU.
_BLOCK_VALUES = {"cpu": 1 << 17, "cuda": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What all rows of a store are standardised with, one row a slot.

    Attributes:
        mean: fp32 [S, H].
        reciprocal: fp32 [S, H], what the encoder multiplies by; stored, never computed again.
        scale: fp32 [S, H], what the decoder multiplies by. With int3 both carry the same
            pseudo-random sign on the layers' slots.
        exact_bound: rows with a larger standardised magnitude are stored as they are.
        num_tokens, num_samples: rows and samples that it was fitted on.
    """

    codec: str
    mean: Tensor
    reciprocal: Tensor
    scale: Tensor
    exact_bound: float
    num_tokens: int
    num_samples: int

    def to(self, device: torch.device | str) -> "Calibration":
        """Return the same on another device."""
        parts = {name: getattr(self, name).to(device) for name in _PER_SLOT}
        return replace(self, **parts)

    def chosen(self, slots: Sequence[int]) -> "Calibration":
        """Return the rows of some slots."""
        parts = {name: getattr(self, name)[list(slots)] for name in _PER_SLOT}
        return replace(self, **parts)


@dataclass(frozen=True, kw_only=True)
class EncodedStates:
    """Coded rows of some slots, on any one device.

    Attributes:
        codes: int8 [K, T, H], or uint8 [K, T, W] packed.
        scales: bfloat16 [K, T, G]; G is H / 64 for int4, else 1.
        final_codes: int8 [T, H]: the final state is never below int8.
        final_scales: bfloat16 [T, 1].
        exact_rows: int32 [N, 2]: slot and token of each row stored as it is, ascending; slot K is
            the final state.
        exact: bfloat16 [N, H].
    """

    codes: Tensor
    scales: Tensor
    final_codes: Tensor | None
    final_scales: Tensor | None
    exact_rows: Tensor
    exact: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens, T."""
        return self.codes.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "EncodedStates":
        """Return the same on another device."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {
            name: None if part is None else part.to(device, non_blocking=non_blocking)
            for name, part in parts.items()
        }
        return EncodedStates(**moved)

    def rows(self, start: int, stop: int) -> "EncodedStates":
        """Return tokens [start, stop), counted from `start`; codes share memory."""
        token = self.exact_rows[:, 1]
        kept = (token >= start) & (token < stop)
        shift = self.exact_rows.new_tensor([0, start])
        return EncodedStates(
            codes=self.codes[:, start:stop],
            scales=self.scales[:, start:stop],
            final_codes=None if self.final_codes is None else self.final_codes[start:stop],
            final_scales=None if self.final_scales is None else self.final_scales[start:stop],
            exact_rows=self.exact_rows[kept] - shift,
            exact=self.exact[kept],
        )

    def zeros(self) -> "EncodedStates":
        """Return as many rows that hold nothing."""
        has_final = self.final_codes is not None
        return EncodedStates(
            codes=torch.zeros_like(self.codes),
            scales=torch.zeros_like(self.scales),
            final_codes=torch.zeros_like(self.final_codes) if has_final else None,
            final_scales=torch.zeros_like(self.final_scales) if has_final else None,
            exact_rows=self.exact_rows[:0],
            exact=self.exact[:0],
        )

    @staticmethod
    def joined(parts: Sequence["EncodedStates"]) -> "EncodedStates":
        """Return the rows of several one after the other."""
        moved, first = [], 0
        for part in parts:
            moved.append(part.exact_rows + part.exact_rows.new_tensor([0, first]))
            first += part.num_tokens
        exact_rows, exact = torch.cat(moved), torch.cat([part.exact for part in parts])
        order = torch.argsort(exact_rows[:, 0].long() * first + exact_rows[:, 1])
        has_final = parts[0].final_codes is not None
        return EncodedStates(
            codes=torch.cat([part.codes for part in parts], dim=1),
            scales=torch.cat([part.scales for part in parts], dim=1),
            final_codes=torch.cat([p.final_codes for p in parts]) if has_final else None,
            final_scales=torch.cat([p.final_scales for p in parts]) if has_final else None,
            exact_rows=exact_rows[order],
            exact=exact[order],
        )


def standardise(x: Tensor, calibration: Calibration, slot: int) -> Tensor:
    """Return fp32 `(x - mean) * reciprocal` of bfloat16 rows [T, H]."""
    return (x.float() - calibration.mean[slot]) * calibration.reciprocal[slot]


def encode_states(
    features: Tensor, final: Tensor | None, is_first: Tensor, calibration: Calibration
) -> EncodedStates:
    """Encode rows where they are.

    Args:
        features: bfloat16 [K, T, H].
        final: bfloat16 [T, H], when the store has that teacher.
        is_first: bool [T], position 0 of a sample; such rows are stored as they are.
        calibration: of the store, on the same device.

    Returns:
        Codes on the same device. Codes and scales of rows stored exactly are zero.
    """
    slots = list(features) if final is None else [*features, final]
    return encode_slots(slots, is_first, calibration, has_final=final is not None)


def encode_slots(
    slots: Iterable[Tensor], is_first: Tensor, calibration: Calibration, *, has_final: bool
) -> EncodedStates:
    """Encode states that come one after the other, so that each can be dropped before the next.

    Args:
        slots: bfloat16 [T, H], the K layers and then, if `has_final`, the final state.
        is_first, calibration: as for `encode_states`.

    Finding the rows that are stored exactly waits for the device once a slot.
    """
    num_layers = len(calibration.mean) - has_final
    codes, scales, places, exact = [], [], [], []
    for slot, x in enumerate(slots):
        name = calibration.codec if slot < num_layers else "int8"
        size = _block_rows(x)
        parts = [
            _encode_block(rows, first, name=name, calibration=calibration, slot=slot)
            for rows, first in zip(x.split(size), is_first.split(size), strict=True)
        ]
        some_codes, some_scales, is_exact = (torch.cat(each) for each in zip(*parts, strict=True))
        token = is_exact.nonzero()[:, 0]
        codes.append(some_codes)
        scales.append(some_scales)
        places.append(torch.stack((torch.full_like(token, slot), token), dim=1))
        exact.append(x[token])
    return EncodedStates(
        codes=torch.stack(codes[:num_layers]),
        scales=torch.stack(scales[:num_layers]),
        final_codes=codes[-1] if has_final else None,
        final_scales=scales[-1] if has_final else None,
        exact_rows=torch.cat(places).int(),
        exact=torch.cat(exact),
    )


def decode_states(
    encoded: EncodedStates, calibration: Calibration, slots: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return bfloat16 features [K, T, H] and final state [T, H] of codes.

    Args:
        encoded: rows of the slots given, in that order.
        calibration: of the store, on the same device.
        slots: which of the calibration's rows the layers of `encoded` have; all, in order, if None.
    """
    num_layers, num_tokens = encoded.codes.shape[:2]
    slots = range(num_layers) if slots is None else slots
    hidden = calibration.mean.shape[1]
    features = encoded.exact.new_empty(num_layers, num_tokens, hidden)
    for row, slot in enumerate(slots):
        decode_rows(
            encoded.codes[row], encoded.scales[row], calibration, slot=slot, out=features[row]
        )
    layer, token = encoded.exact_rows.long().unbind(1)
    is_feature = layer < num_layers
    features[layer[is_feature], token[is_feature]] = encoded.exact[is_feature]
    has_final = encoded.final_codes is not None
    return features, decode_final(encoded, calibration) if has_final else None


def decode_final(encoded: EncodedStates, calibration: Calibration) -> Tensor:
    """Return the bfloat16 final state [T, H] of codes that hold one."""
    assert encoded.final_codes is not None, "the codes hold no final state"
    assert encoded.final_scales is not None, "the codes hold no final state"
    final = encoded.exact.new_empty(encoded.final_codes.shape)
    last = len(calibration.mean) - 1
    decode_rows(encoded.final_codes, encoded.final_scales, calibration, slot=last, out=final)
    slot, token = encoded.exact_rows.long().unbind(1)
    is_final = slot == len(encoded.codes)
    final[token[is_final]] = encoded.exact[is_final]
    return final


def decode_rows(
    codes: Tensor, scales: Tensor, calibration: Calibration, *, slot: int, out: Tensor
) -> None:
    """Decode rows of one slot into `out`, bfloat16 [T, H], rows stored exactly apart.

    The codec follows from the width of `codes`: the final state is int8 in every store.
    """
    mean, scale = calibration.mean[slot], calibration.scale[slot]
    rows = _block_rows(out)
    for some, factor, into in zip(
        codes.split(rows), scales.split(rows), out.split(rows), strict=True
    ):
        if some.dtype == torch.int8:
            y = some.float() * factor.float()
        elif calibration.codec == "int4":
            y = (_unpack_int4(some).float() * factor.float()[..., None]).flatten(1)
        else:
            y = _decode_int3(some, factor)
        into.copy_(y.mul_(scale).add_(mean))


def rotate(y: Tensor) -> Tensor:
    """Mix each group of 64 channels of fp32 rows [T, H] by the orthonormal Hadamard matrix.

    Butterflies at distance 1, 2, 4, … 32, then a multiplication by 1/8.
    """
    groups, distance = y.unflatten(1, (-1, GROUP)), 1
    while distance < GROUP:
        pairs = groups.reshape(*groups.shape[:2], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack((a + b, a - b), dim=-2).flatten(2)
        distance *= 2
    return groups.flatten(1) * GROUP**-0.5


def hadamard(device: torch.device | str = "cpu") -> Tensor:
    """Return `rotate`'s matrix, fp32 [64, 64] of ±1/8 in Sylvester's order, its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < GROUP:
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom))
    return matrix * GROUP**-0.5


def _encode_block(
    x: Tensor, is_first: Tensor, *, name: str, calibration: Calibration, slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, bfloat16 scales and which rows are stored exactly, of rows of one slot."""
    z = standardise(x, calibration, slot)
    # Negated, so that a row with a NaN is kept as it is.
    is_exact = is_first | ~(z.abs().amax(dim=1) <= calibration.exact_bound)
    z = z.masked_fill(is_exact[:, None], 0.0)
    if name == "int3":
        codes, scales = _encode_int3(z)
    else:
        grouped = z.unflatten(1, (-1, GROUP)) if name == "int4" else z[:, None]
        largest = _MAX_CODE[name]
        scales = _rounded_up(_divided(grouped.abs().amax(dim=-1), largest))
        levels = (grouped / scales.float()[..., None]).round_().clamp_(-largest, largest)
        codes = _pack_int4(levels) if name == "int4" else levels[:, 0].to(torch.int8)
    codes.masked_fill_(is_exact[:, None], 0)
    scales.masked_fill_(is_exact[:, None], 0)
    return codes, scales, is_exact


def _divided(x: Tensor, by: float) -> Tensor:
    # By a plain number, CUDA multiplies with a rounded reciprocal; a tensor gets IEEE division.
    return x / torch.full((), by, dtype=torch.float32, device=x.device)


def _rounded_up(scale: Tensor) -> Tensor:
    """Return the least bfloat16 that is not below a positive fp32, nor below `MIN_SCALE`."""
    bits = (scale.clamp_min(MIN_SCALE).view(torch.int32) + 0xFFFF) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def _pack_int4(levels: Tensor) -> Tensor:
    """Byte i holds channel 2 i in its low half and channel 2 i + 1 in its high half, plus 8."""
    pairs = (levels.flatten(1) + 8).to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def _unpack_int4(codes: Tensor) -> Tensor:
    levels = torch.stack((codes & 15, codes >> 4), dim=-1).to(torch.int8) - 8
    return levels.flatten(1).unflatten(1, (-1, GROUP))  # [T, G, GROUP]


def _encode_int3(z: Tensor) -> tuple[Tensor, Tensor]:
    y = rotate(z)
    scales = _divided(_sum_in_order(y * y), y.shape[1]).sqrt()
    scales = scales.clamp_min(MIN_SCALE).to(torch.bfloat16)
    u = y / scales.float()[:, None]
    magnitude = u.abs()
    above = sum((magnitude > each).to(torch.uint8) for each in THRESHOLDS)
    level = torch.where(u < 0, 3 - above, 4 + above)
    return _pack_int3(level), scales[:, None]


def _pack_int3(level: Tensor) -> Tensor:
    """A group is three planes of 8 bytes; bit j of byte i of plane p is bit p of code 8 i + j."""
    grouped = level.unflatten(1, (-1, 1, 8, 8))  # [T, G, 1, byte, bit]
    planes = torch.cat([grouped >> plane & 1 for plane in range(3)], dim=2)
    packed = planes[..., 0].clone()
    for bit in range(1, 8):
        packed |= planes[..., bit] << bit
    return packed.flatten(1)


def _unpack_int3(codes: Tensor) -> Tensor:
    # A byte of a plane becomes eight bytes of one bit, by table, as one little-endian word.
    byte = torch.arange(256, device=codes.device)
    spread = sum((byte >> bit & 1) << 8 * bit for bit in range(8))
    low, middle, high = spread[codes.unflatten(1, (-1, 3, 8)).int()].unbind(2)  # [T, G, 8]
    return (low | middle << 1 | high << 2).view(torch.uint8).flatten(1)


def _decode_int3(codes: Tensor, scales: Tensor) -> Tensor:
    table = torch.tensor([-each for each in reversed(LEVELS)] + list(LEVELS), device=codes.device)
    levels = table.index_select(0, _unpack_int3(codes).flatten().int()).view(-1, GROUP)
    # Exact in any order of summation: the levels are small multiples of 1/256.
    return (levels @ hadamard(codes.device)).view(len(codes), -1) * scales.float()


def _sum_in_order(v: Tensor) -> Tensor:
    """Sum fp32 rows [T, H] by halves, padded with zeros to a power of two: one result anywhere."""
    size = 1 << (v.shape[1] - 1).bit_length()
    v = torch.nn.functional.pad(v, (0, size - v.shape[1]))
    while size > 1:
        size //= 2
        v = v[:, :size] + v[:, size:]
    return v[:, 0]


def _block_rows(x: Tensor) -> int:
    return max(1, _BLOCK_VALUES["cpu" if x.device.type == "cpu" else "cuda"] // x.shape[-1])
