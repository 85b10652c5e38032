"""What the row passes of the loss heads share: launch settings, options, input checks, row scaling.

Letters: N rows, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.optional_triton import tl, triton
from dflash_offline.kernels.reference_loss import accumulate_dtype


class RowLaunch(NamedTuple):
    """Launch settings of the row kernels: columns a step, columns of the label dot, warps."""

    block_v: int
    block_h: int
    num_warps: int


# By compute capability (major). H200, 4,096 rows of 151,936 bf16 logits: 0.96 ms, 3.9 TB/s at six
# bytes a logit; steps of 4,096 columns 1.05, of 8,192 1.42 ms; 8 warps 0.96 to 1.12 ms.
ROW_LAUNCH = {9: RowLaunch(block_v=2048, block_h=1024, num_warps=4)}
DEFAULT_ROW_LAUNCH = RowLaunch(block_v=4096, block_h=1024, num_warps=4)


class RowOptions(NamedTuple):
    """What the row pass needs to know besides tensors."""

    with_grad: bool
    logit_scale: float
    softcap: float | None


def row_options(x: Tensor, *, logit_scale: float, softcap: float | None) -> RowOptions:
    """Return the options of a row pass over x; the gradient is made where x will be asked for one.

    Raises:
        ValueError: a logit scale or soft-cap that is not above zero.
    """
    check_scale(logit_scale, softcap)
    with_grad = x.requires_grad and torch.is_grad_enabled()
    # Triton would compile a whole number in as a constant of its own type.
    softcap = None if softcap is None else float(softcap)
    return RowOptions(with_grad=with_grad, logit_scale=float(logit_scale), softcap=softcap)


def check_scale(logit_scale: float, softcap: float | None) -> None:
    """Raise ValueError unless the logit scale, and the soft-cap if there is one, are above zero."""
    if not logit_scale > 0 or not (softcap is None or softcap > 0):
        raise ValueError(
            f"logit_scale is {logit_scale} and softcap {softcap}; both must be above 0, "
            "and softcap None where the model has none"
        )


def row_launch(device: torch.device) -> RowLaunch:
    """Return the launch settings for `device`."""
    if device.type != "cuda":
        return DEFAULT_ROW_LAUNCH
    major, _ = torch.cuda.get_device_capability(device)
    return ROW_LAUNCH.get(major, DEFAULT_ROW_LAUNCH)


@triton.jit(do_not_specialize=["stride_g"], do_not_specialize_on_alignment=["g_ptr"])
def _scale_rows_kernel(
    dx_ptr, g_ptr, out_ptr, stride_dx, stride_g, stride_out, hidden, BLOCK_H: tl.constexpr
):
    """out_i = g_i dx_i, and zero where g_i is zero even if dx_i is NaN (a poisoned, masked row)."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(g_ptr + row * stride_g).to(tl.float32)
    offs = tl.arange(0, BLOCK_H)
    for start in range(0, hidden, BLOCK_H):
        cols = start + offs
        mask = cols < hidden
        dx = tl.load(dx_ptr + row * stride_dx + cols, mask=mask).to(tl.float32)
        value = tl.where(g == 0.0, 0.0, dx * g).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * stride_out + cols, value, mask=mask)


def scale_rows(dx: Tensor, grad: Tensor, *, as_triton: bool) -> Tensor:
    """Return dx [N, H] with row i multiplied by grad[i]; rows with a zero factor become zero."""
    if not as_triton:
        factor = grad[:, None]
        return torch.where(factor == 0, 0, dx * factor).to(dx.dtype)
    out = torch.empty_like(dx)
    if dx.shape[0]:
        _scale_rows_kernel[(dx.shape[0],)](
            dx,
            grad,
            out,
            dx.stride(0),
            grad.stride(0),
            out.stride(0),
            dx.shape[1],
            BLOCK_H=row_launch(dx.device).block_h,
            num_warps=4,
        )
    return out


def empty_results(kind: type, x: Tensor):
    """Return uninitialised per-row results of NamedTuple `kind` for rows x [N, H].

    Fields are fp32 (fp64 for fp64 rows); columns and ranks are int64.
    """
    integers = {"argmax", "teacher_argmax", "rank"}
    real = accumulate_dtype(x.dtype)
    return kind(
        *(
            torch.empty(
                x.shape[0], dtype=torch.int64 if name in integers else real, device=x.device
            )
            for name in kind._fields
        )
    )


def check_head(x: Tensor, weight: Tensor, *, as_triton: bool) -> None:
    """Raise ValueError unless x [N, H] and weight [V, H] go together."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; they must be [N, H] and [V, H]"
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}; "
            "convert or move one of them"
        )
    if as_triton and x.dtype == torch.float64:
        raise ValueError("x is torch.float64, which the kernels do not take; convert it to float32")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("rows of x and weight must be contiguous; call contiguous() on them")


def check_labels(labels: Tensor, *, num_rows: int) -> Tensor:
    """Return labels contiguous; raise ValueError unless they are int64 [num_rows].

    Their values are not looked at, which would wait for the GPU.
    """
    if labels.shape != (num_rows,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}; they must be int64 [{num_rows}]"
        )
    return labels.contiguous()


def warm_up_loss(
    loss: Callable[[Tensor, Tensor], Tensor], weight: Tensor, *, chunk_rows: int = 4096
) -> None:
    """Compile what `loss` needs, with and without a gradient, and take its buffers.

    `loss` maps rows [C, H] and labels [C] to losses [C] through the head [V, H], for example
    `lambda x, labels: linear_kl(x, weight, x.detach(), labels=labels, ce_weight=0.5).loss`. After
    it no batch of any number of rows compiles anything.
    """
    rows = chunk_rows if weight.is_cuda else 1
    labels = torch.zeros(rows, dtype=torch.int64, device=weight.device)
    for with_grad in (False, True):
        x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        losses = loss(x.requires_grad_(with_grad), labels)
        if with_grad:
            losses.sum().backward()
