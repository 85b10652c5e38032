"""Elementwise passes of a drafter layer: norms, rotary positions, SwiGLU, each in one kernel.

Plain PyTorch twins of the same names are in `reference`. Arithmetic is float32 with one rounding at
the end. Weight gradients are summed in two fixed stages: the same bits every time. docs/kernels.md,
"Norms, rotary positions, SwiGLU", has the formulas and the bytes.

Letters: N rows, H width, D head dimension, I MLP width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_offline.kernels import reference
from dflash_offline.kernels.norm_rope_kernels import (
    _norm_rope_bwd_kernel,
    _norm_rope_fwd_kernel,
    _rms_norm_bwd_kernel,
    _rms_norm_fwd_kernel,
    _swiglu_bwd_kernel,
    _swiglu_fwd_kernel,
)
from dflash_offline.kernels.optional_triton import is_interpreted, use_triton
from dflash_offline.kernels.reference import inverse_frequencies, rotary_table

__all__ = [
    "add_rms_norm", "inverse_frequencies", "norm_rope", "rms_norm", "rope", "rotary_table",
    "swiglu", "swiglu_linear",
]  # fmt: skip

# Programs of the backward passes, each of which leaves one partial sum of the weight gradient: four
# for each of an H200's 132 multiprocessors.
NUM_PARTIALS = 528
INTERPRETED_PARTIALS = 4
# Columns of a program of the SwiGLU kernels: 16 for each of 128 threads.
SWIGLU_BLOCK = 2048
MAX_WIDTH = 16384


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _num_partials(rows: int) -> int:
    return min(rows, INTERPRETED_PARTIALS if is_interpreted() else NUM_PARTIALS)


def _warps(elements: int) -> int:
    return min(max(elements // 512, 1), 16)


def _check_norm(x: Tensor, weight: Tensor, widest: int) -> None:
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, must be ({width},)")
    if width > widest:
        raise ValueError(f"x is {width} wide, kernels go to {widest}; use the reference")


def _check_rotary(x: Tensor, table: Tensor) -> None:
    if x.shape[2] % 2:
        raise ValueError(f"heads have {x.shape[2]} channels, which must be an even number")
    if table.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"table is for {tuple(table.shape)} rows and channels, must be for those of x: "
            f"{(x.shape[0], x.shape[2])}"
        )


def _check_pair(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise ValueError(f"up is {tuple(up.shape)}, must be as gate: {tuple(gate.shape)}")


class _RmsNorm(torch.autograd.Function):
    """Keeps x (or the sum) and the weight; the root mean square is computed again in backward."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        rows = x.contiguous().view(-1, x.shape[-1])
        out = torch.empty_like(rows)
        total = rows
        if residual is not None:
            residual = residual.contiguous()
            total = torch.empty_like(rows)
        if rows.shape[0]:
            block = _power_of_two(rows.shape[1])
            _rms_norm_fwd_kernel[(rows.shape[0],)](
                rows, residual, weight, total, out, eps,
                H=rows.shape[1], BLOCK_H=block, ADD=residual is not None, num_warps=_warps(block),
            )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.shape = eps, x.shape
        return out.view(x.shape), total.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_total):
        total, weight = ctx.saved_tensors
        rows, width = total.shape
        d_rows = torch.empty_like(total)
        partials = torch.empty(_num_partials(rows), width, dtype=torch.float32, device=total.device)
        if rows:
            block = _power_of_two(width)
            d_total = None if d_total is None else d_total.contiguous()
            _rms_norm_bwd_kernel[(partials.shape[0],)](
                total, weight, d_out.contiguous(), d_total, d_rows, partials, rows, ctx.eps,
                H=width, BLOCK_H=block, ADD=d_total is not None, num_warps=_warps(block),
            )  # fmt: skip
        d_rows = d_rows.view(ctx.shape)
        d_residual = d_rows if ctx.needs_input_grad[1] else None
        return d_rows, d_residual, partials.sum(0).to(weight.dtype), None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, implementation: str | None = None
) -> Tensor:
    """Return x / sqrt(mean(x ** 2) + eps) * weight over the last axis.

    Args:
        x: [..., H]
        weight: [H]
        implementation: "reference" or "triton"; by default Triton on CUDA.
    """
    if not use_triton(x, implementation):
        return reference.rms_norm(x, weight, eps)
    _check_norm(x, weight, MAX_WIDTH)
    with torch.cuda.device_of(x):
        return _RmsNorm.apply(x, None, weight.contiguous(), eps)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual, weight, eps), x + residual) in one pass.

    Args:
        x, residual: [..., H]; the sum is rounded to their dtype before it is normed.
        weight: [H]
        implementation: "reference" or "triton"; by default Triton on CUDA.
    """
    if not use_triton(x, implementation):
        return reference.add_rms_norm(x, residual, weight, eps)
    _check_norm(x, weight, MAX_WIDTH)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, must be as x: {tuple(x.shape)}")
    with torch.cuda.device_of(x):
        return _RmsNorm.apply(x, residual, weight.contiguous(), eps)


class _NormRope(torch.autograd.Function):
    """Keeps x, weight and the table; the norm is computed again in backward."""

    @staticmethod
    def forward(ctx, x, weight, table, eps):
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ctx.save_for_backward(x, weight, table)
        ctx.eps = eps
        if x.shape[0]:
            _norm_rope_fwd_kernel[(x.shape[0],)](
                x, weight, table, out, eps, **_NormRope._constants(x, weight)
            )
        return out

    @staticmethod
    def _constants(x: Tensor, weight: Tensor | None) -> dict:
        heads, half = _power_of_two(x.shape[1]), _power_of_two(x.shape[2] // 2)
        return {
            "STRIDE": x.stride(0),
            "HEADS": x.shape[1],
            "D": x.shape[2],
            "BLOCK_HEADS": heads,
            "BLOCK_HALF": half,
            "NORM": weight is not None,
            "num_warps": _warps(heads * half),
        }

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        x, weight, table = ctx.saved_tensors
        rows, _, dim = x.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partials = torch.empty(_num_partials(rows), dim, dtype=torch.float32, device=x.device)
        if rows:
            _norm_rope_bwd_kernel[(partials.shape[0],)](
                x, weight, table, d_out.contiguous(), dx, partials, rows, ctx.eps,
                **_NormRope._constants(x, weight),
            )  # fmt: skip
        d_weight = None if weight is None else partials.sum(0).to(weight.dtype)
        return dx, d_weight, None, None


def norm_rope(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Tensor:
    """Return rope(rms_norm(x, weight, eps), table): a head's norm and rotation at once.

    Args:
        x: [N, heads, D], D even; rows may be any distance apart.
        weight: [D]
        table: `rotary_table` of the rows' positions, float32 [N, D], one for all layers.
        eps: of the norm.
        implementation: "reference" or "triton"; by default Triton on CUDA.
    """
    _check_rotary(x, table)
    if not use_triton(x, implementation):
        return reference.norm_rope(x, weight, table, eps=eps)
    _check_norm(x, weight, 512)
    with torch.cuda.device_of(x):
        return _NormRope.apply(x, weight.contiguous(), table.contiguous(), eps)


def rope(x: Tensor, table: Tensor, *, implementation: str | None = None) -> Tensor:
    """Rotate the halves of every head of x [N, heads, D] by its row of `rotary_table` [N, D]."""
    _check_rotary(x, table)
    if not use_triton(x, implementation):
        return reference.rope(x, table)
    with torch.cuda.device_of(x):
        return _NormRope.apply(x, None, table.contiguous(), 0.0)


def _swiglu_tiles(gate: Tensor) -> tuple[tuple[int, int], dict]:
    width = gate.shape[-1]
    block = min(SWIGLU_BLOCK, _power_of_two(width))
    grid = (gate.numel() // width, -(-width // block))
    return grid, {"WIDTH": width, "BLOCK": block, "num_warps": _warps(block)}


def _swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid, constants = _swiglu_tiles(gate)
        _swiglu_fwd_kernel[grid](gate, up, out, **constants)
    return out


def _swiglu_backward(gate: Tensor, up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        grid, constants = _swiglu_tiles(gate)
        _swiglu_bwd_kernel[grid](gate, up, d_out.contiguous(), d_gate, d_up, **constants)
    return d_gate, d_up


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _swiglu_forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        return _swiglu_backward(*ctx.saved_tensors, d_out)


class _SwigluLinear(torch.autograd.Function):
    """Keeps gate and up but not their product, which backward makes again for the weight."""

    @staticmethod
    def forward(ctx, gate, up, weight):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        return _swiglu_forward(gate, up) @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        gate, up, weight = ctx.saved_tensors
        d_weight = d_out.t() @ _swiglu_forward(gate, up)
        d_gate, d_up = _swiglu_backward(gate, up, d_out @ weight)
        return d_gate, d_up, d_weight


def swiglu(gate: Tensor, up: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return silu(gate) * up, elementwise."""
    if not use_triton(gate, implementation):
        return reference.swiglu(gate, up)
    _check_pair(gate, up)
    with torch.cuda.device_of(gate):
        return _Swiglu.apply(gate, up)


def swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Return swiglu(gate, up) @ weight.T without keeping the product: 2 I bytes a row less.

    Args:
        gate, up: [N, I]
        weight: [H, I]
        implementation: "reference" or "triton"; by default Triton on CUDA.
    """
    if not use_triton(gate, implementation):
        return reference.swiglu_linear(gate, up, weight)
    _check_pair(gate, up)
    with torch.cuda.device_of(gate):
        return _SwigluLinear.apply(gate, up, weight)
