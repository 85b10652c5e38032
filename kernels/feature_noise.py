"""Uniform noise on rows, each element a function of its row's key and its column alone.

A counter instead of a generator: the same sample gets the same noise however steps are cut into
passes, whatever the device, and nothing waits. Letters: N rows, C columns.
"""

import torch
from torch import Tensor

from dflash_offline.kernels.optional_triton import tl, triton, use_triton

_BLOCK = 4096
# Rows that the plain path works on at a time: its integers are eight bytes an element.
_CHUNK_ROWS = 256
_MASK = 0xFFFFFFFF


@triton.jit
def _mix32(x):
    """Scramble 32 bits: a bijection whose outputs pass for random (lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["num_columns"])
def _feature_noise_kernel(x_ptr, keys_ptr, out_ptr, width, num_columns, BLOCK: tl.constexpr):
    """out = x + width * u with u = (2 r + 1) / 2^23 - 1 and r the upper 23 bits of the hash."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    bits = _mix32(_mix32(columns.to(tl.uint32)) ^ key) >> 9
    u = (2 * bits + 1).to(tl.float32) * (1.0 / (1 << 23)) - 1.0
    x = tl.load(x_ptr + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    out = (x + width * u).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + columns, out, mask=mask)


def feature_noise(
    x: Tensor, keys: Tensor, *, width: float, implementation: str | None = None
) -> Tensor:
    """Return x plus noise that is uniform in (-width, width).

    Args:
        x: [N, C], no gradient.
        keys: int32 [N], one for each row, well mixed.
        width: largest size of the noise.
        implementation: "triton", "reference", or None to choose by device.

    Returns:
        [N, C] in the dtype of x, rounded once.
    """
    if keys.shape != x.shape[:1] or keys.dtype != torch.int32:
        raise ValueError(f"keys are {keys.dtype} {tuple(keys.shape)}, must be int32 [{len(x)}]")
    if not use_triton(x, implementation):
        return _plain(x, keys, width)
    x, keys = x.contiguous(), keys.contiguous()
    out = torch.empty_like(x)
    num_rows, num_columns = x.shape
    if x.numel():
        grid = (num_rows, triton.cdiv(num_columns, _BLOCK))
        with torch.cuda.device_of(x):
            _feature_noise_kernel[grid](
                x, keys, out, float(width), num_columns, BLOCK=_BLOCK, num_warps=8
            )
    return out


def _plain(x: Tensor, keys: Tensor, width: float) -> Tensor:
    precision = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns_C = _mixed(torch.arange(x.shape[1], device=x.device))
    out = torch.empty_like(x)
    for start in range(0, x.shape[0], _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        bits_NC = _mixed(columns_C ^ (keys[rows, None].long() & _MASK)) >> 9
        u_NC = (2 * bits_NC + 1).to(precision) * 2.0**-23 - 1.0
        out[rows] = (x[rows].to(precision) + width * u_NC).to(x.dtype)
    return out


def _mixed(x: Tensor) -> Tensor:
    """Return `_mix32` of int64 values below 2^32; products wrap, and the mask keeps 32 bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
