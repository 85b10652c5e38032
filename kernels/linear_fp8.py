"""Products of trained projections in FP8: an option, for GPUs with row-wise scaled FP8 products.

y = x W^T and dx = dy W have float8_e4m3fn operands with one fp32 scale for each row of x and dy,
for each output of W in the first product and for each input of it in the second. The gradient of W
is made as elsewhere: its sum runs over rows, along which FP8 would need scales of its own.
Formulas: docs/kernels.md, "linear_fp8". Letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.kernels.optional_triton import tl, triton, use_triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Widths of an FP8 product must be multiples of 16.
WIDTH_MULTIPLE = 16
# Columns of a step of the row kernel; tile of the weight kernel.
BLOCK_COLUMNS, TILE = 2048, 64


@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """scale = max |x| / 448 and out = x / scale, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + offs < width
        x = tl.load(x_ptr + row * stride_x + start + offs, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest), 1e-30) / 448.0
    tl.store(scale_ptr + row, scale)
    inverse = 1.0 / scale
    for start in range(0, width, BLOCK):
        mask = start + offs < width
        x = tl.load(x_ptr + row * stride_x + start + offs, mask=mask, other=0.0).to(tl.float32)
        q = tl.clamp(x * inverse, -448.0, 448.0)
        tl.store(out_ptr + row * width + start + offs, q.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_weight_kernel(
    w_ptr, out_ptr, by_input_ptr, output_scale_ptr, input_scale_ptr, num_outputs, num_inputs,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of W [O, I] to both of its forms, the second transposed."""
    o = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (o < num_outputs)[:, None] & (i < num_inputs)[None, :]
    w = tl.load(w_ptr + o[:, None] * num_inputs + i[None, :], mask=mask, other=0.0).to(tl.float32)
    output_scale = tl.load(output_scale_ptr + o, mask=o < num_outputs, other=1.0)
    input_scale = tl.load(input_scale_ptr + i, mask=i < num_inputs, other=1.0)
    q = tl.clamp(w / output_scale[:, None], -448.0, 448.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o[:, None] * num_inputs + i[None, :], q, mask=mask)
    q = tl.clamp(w / input_scale[None, :], -448.0, 448.0).to(by_input_ptr.dtype.element_ty)
    at = by_input_ptr + i[:, None] * num_outputs + o[None, :]
    tl.store(at, tl.trans(q), mask=tl.trans(mask))


@dataclass(frozen=True)
class Fp8Rows:
    """Rows [N, I] as numbers and scales: x ~ values * scales."""

    values: Tensor  # float8_e4m3fn [N, I]
    scales: Tensor  # fp32 [N, 1]


@dataclass(frozen=True)
class Fp8Weight:
    """A projection's weight [O, I], scaled for each of its two products."""

    by_output: Tensor  # float8_e4m3fn [O, I]
    output_scale: Tensor  # fp32 [1, O]
    by_input: Tensor  # float8_e4m3fn [I, O]
    input_scale: Tensor  # fp32 [1, I]

    @classmethod
    def empty_like(cls, weight: Tensor) -> Fp8Weight:
        """Return uninitialised buffers for a weight [O, I].

        Raises:
            ValueError: a width is not a multiple of 16.
        """
        outputs, inputs = weight.shape
        if outputs % WIDTH_MULTIPLE or inputs % WIDTH_MULTIPLE:
            raise ValueError(
                f"a projection has {inputs} inputs and {outputs} outputs; FP8 products need "
                f"multiples of {WIDTH_MULTIPLE}"
            )
        device = weight.device
        return cls(
            torch.empty(outputs, inputs, dtype=FP8, device=device),
            torch.empty(1, outputs, dtype=torch.float32, device=device),
            torch.empty(inputs, outputs, dtype=FP8, device=device),
            torch.empty(1, inputs, dtype=torch.float32, device=device),
        )

    def fill(self, weight: Tensor, *, implementation: str | None = None) -> None:
        """Quantise a weight [O, I] into the buffers."""
        for scale, dim in ((self.output_scale, 1), (self.input_scale, 0)):
            largest = torch.linalg.vector_norm(weight, torch.inf, dim=dim, dtype=torch.float32)
            scale[0].copy_(largest.clamp_min(1e-30) / FP8_MAX)
        if not use_triton(weight, implementation):
            self.by_output.copy_(weight.float() / self.output_scale.t())
            self.by_input.copy_((weight.float() / self.input_scale).t())
            return
        outputs, inputs = weight.shape
        with torch.cuda.device_of(weight):
            _quantize_weight_kernel[(-(-outputs // TILE), -(-inputs // TILE))](
                weight, self.by_output, self.by_input, self.output_scale, self.input_scale,
                outputs, inputs, TILE=TILE, num_warps=4,
            )  # fmt: skip


def quantize_rows(x: Tensor, *, implementation: str | None = None) -> Fp8Rows:
    """Return rows [N, I] in FP8; columns of a row are contiguous."""
    rows, width = x.shape
    if not use_triton(x, implementation):
        scales = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-30) / FP8_MAX
        return Fp8Rows((x.float() / scales).to(FP8), scales)
    values = torch.empty(rows, width, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):
            _quantize_rows_kernel[(rows,)](
                x, values, scales, x.stride(0), width, BLOCK=BLOCK_COLUMNS, num_warps=4
            )
    return Fp8Rows(values, scales)


def product(rows: Fp8Rows, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [N, C] @ weight [F, C].T as [N, F], with the weight's scales [1, F]."""
    if not rows.values.is_cuda:
        left = rows.values.float() * rows.scales
        return (left @ (weight.float() * scale.t()).t()).to(dtype)
    return torch._scaled_mm(
        rows.values,
        weight.t(),
        scale_a=rows.scales,
        scale_b=scale,
        out_dtype=dtype,
        use_fast_accum=True,
    )
