"""States as the store packs them, on their way to the device: raw, int8, int4 or int3.

This is the one place that says how codes are packed; whoever writes them follows it. Buffers are
layer-major: a layer's tokens are neighbours. H is a multiple of GROUP = 64 for int4 and int3, and a
group is 64 neighbouring channels of one token.

    raw    values [K, T, H]: bfloat16, or its bits as uint16
    int8   codes int8 [K, T, H], -127 to 127; one scale a token: scales [K, T, 1]
    int4   codes uint8 [K, T, H / 2], channel 2 i in the low nibble of byte i, channel 2 i + 1 in
           the high one, stored + 8 (1 to 15); one scale a group: scales [K, T, H / 64]
    int3   codes uint8 [K, T, 3 H / 8], 24 bytes a group: three planes of 8 bytes, plane p holding
           bit p of the 64 codes, channel 8 i + j in bit j of byte i (`numpy.packbits`, little); a
           code is an index into `codebook` [8]; one scale a token: scales [K, T, 1]

Decoding gives, in fp32 and rounded after each operation (docs/store-format.md, "Int codecs"),

    x = mean + gain * (scale * code)        int8, int4; gain is the channel's standard deviation
    x = mean + gain * (scale * (W level))   int3; W rotates each group back

W is the orthonormal Hadamard matrix of 64, W[i, j] = (-1) ** popcount(i & j) / 8, its own inverse.
The encoder multiplies the standardised channels by fixed random signs and rotates them; `gain` is
the standard deviation times those signs. Levels have at most 11 bits, so that the rotation by the
matrix units is exact. Rows whose slot in `exact_slot` is not -1 are taken from `exact` instead.

Letters: K captured layers, T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.common.codecs import GROUP
from dflash_offline.common.quantize import LEVELS, Calibration, EncodedStates

CODE_BYTES = {"int8": (1, 1), "int4": (1, 2), "int3": (3, 8)}


@dataclass(frozen=True, kw_only=True)
class CodedStates:
    """States of K layers and T tokens in one of the packings above, all on one device."""

    codec: str
    values: Tensor  # [K, T, H] raw, else the codes
    scales: Tensor | None = None  # float [K, T, 1 or H / 64]
    mean: Tensor | None = None  # float32 [K, H]
    gain: Tensor | None = None  # float32 [K, H]
    codebook: Tensor | None = None  # float32 [8], int3 only
    exact_slot: Tensor | None = None  # int32 [K, T], row of `exact` or -1
    exact: Tensor | None = None  # bfloat16 (or uint16 bits) [E, H]

    def __post_init__(self):
        if self.codec == "raw":
            return
        if self.codec not in CODE_BYTES:
            allowed = ("raw", *CODE_BYTES)
            raise ValueError(f"codec is {self.codec!r}, must be one of {allowed}")
        if self.scales is None or self.mean is None or self.gain is None:
            raise ValueError(f"codec {self.codec} needs scales, mean and gain")
        if (self.codebook is None) != (self.codec != "int3"):
            raise ValueError("a codebook belongs to codec int3, and to no other")
        if (self.exact_slot is None) != (self.exact is None):
            raise ValueError("exact_slot and exact must be given together")
        layers, tokens, num_bytes = self.values.shape
        up, down = CODE_BYTES[self.codec]
        groups = self.hidden // GROUP if self.codec == "int4" else 1
        wanted = (layers, tokens, self.hidden * up // down)
        if self.codec != "int8" and self.hidden % GROUP:
            raise ValueError(f"codec {self.codec} needs a multiple of {GROUP} channels")
        if (layers, tokens, num_bytes) != wanted:
            raise ValueError(f"codes have shape {tuple(self.values.shape)}, must be {wanted}")
        if self.scales.shape != (layers, tokens, groups):
            given = tuple(self.scales.shape)
            raise ValueError(f"scales have shape {given}, must be {(layers, tokens, groups)}")

    @property
    def num_layers(self) -> int:
        return self.values.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.values.shape[1]

    @property
    def hidden(self) -> int:
        return self.values.shape[2] if self.mean is None else self.mean.shape[1]

    def to(self, device, *, non_blocking: bool = True) -> CodedStates:
        """Copy every buffer to `device`."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) if torch.is_tensor(value) else value
            for name, value in vars(self).items()
        }
        return CodedStates(**moved)


def coded_states(
    encoded: EncodedStates, calibration: Calibration, slots: Sequence[int]
) -> CodedStates:
    """Return the layers of a store's codes as the kernels take them, sharing their memory.

    Kernels need them contiguous, which those of a part of a pack are not before they are copied.

    Args:
        encoded: codes of K layers.
        calibration: of the store, on the same device.
        slots: rows of the calibration, one a layer.
    """
    device, layers = encoded.codes.device, len(encoded.codes)
    own = torch.as_tensor(list(slots), device=device)
    slot, token = encoded.exact_rows.long().unbind(1)
    kept = slot < layers
    exact_slot = torch.full(encoded.codes.shape[:2], -1, dtype=torch.int32, device=device)
    rows = torch.arange(len(slot), dtype=torch.int32, device=device)
    exact_slot[slot[kept], token[kept]] = rows[kept]
    levels = [-each for each in reversed(LEVELS)] + list(LEVELS)
    return CodedStates(
        codec=calibration.codec,
        values=encoded.codes,
        scales=encoded.scales,
        mean=calibration.mean[own],
        gain=calibration.scale[own],
        codebook=torch.tensor(levels, device=device) if calibration.codec == "int3" else None,
        exact_slot=exact_slot,
        exact=encoded.exact,
    )


def as_bfloat16(x: Tensor) -> Tensor:
    """View uint16 bit patterns as the bfloat16 they are; leave every other dtype alone."""
    return x.view(torch.bfloat16) if x.dtype == torch.uint16 else x


def hadamard(size: int = GROUP, *, device=None, dtype=torch.float32) -> Tensor:
    """Return the orthonormal Hadamard matrix in Sylvester's order: its own inverse."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def unpack_codes(states: CodedStates, codes: Tensor) -> Tensor:
    """Return codes [K, R, bytes] as what a scale multiplies: float32 [K, R, H]."""
    if states.codec == "int8":
        return codes.view(torch.int8).float()
    if states.codec == "int4":
        low, high = codes & 15, codes >> 4
        return torch.stack([low, high], dim=-1).flatten(-2).float() - 8.0
    planes = codes.unflatten(2, (states.hidden // GROUP, 3, 8))  # [K, R, groups, plane, byte]
    bits = planes[..., None] >> torch.arange(8, dtype=torch.uint8, device=codes.device) & 1
    index = bits[:, :, :, 0] + 2 * bits[:, :, :, 1] + 4 * bits[:, :, :, 2]
    return states.codebook.float()[index.flatten(2).long()]
