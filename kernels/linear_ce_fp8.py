"""linear_ce with its products in FP8: an option, for GPUs with row-wise scaled FP8 products.

Operands are float8_e4m3fn with one fp32 scale per row of x and dZ, per token of the head in the
first product and per channel of it in the second. The label's part of the gradient is kept out of
FP8: its logit and its product with the head stay exact, so a row has the scale of its largest other
column. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden,
V vocabulary, V' columns of the FP8 head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.head_rows import (
    RowOptions,
    check_head,
    check_labels,
    empty_results,
    row_options,
    scale_rows,
)
from dflash_offline.kernels.linear_ce import ApartLabel, triton_chunk
from dflash_offline.kernels.linear_ce_torch import torch_chunk
from dflash_offline.kernels.logit_chunks import (
    COLUMN_MULTIPLE,
    chunk_bounds,
    chunk_buffer,
    full_precision_sums,
)
from dflash_offline.kernels.optional_triton import tl, triton, use_triton
from dflash_offline.kernels.reference_loss import LinearCE, accumulate_dtype

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Widths of an FP8 product must be multiples of 16; columns of the head are padded to 64, as rows of
# chunk buffers are, so that operands are contiguous.
WIDTH_MULTIPLE = 16
BLOCK_H = 1024


class Fp8Head(NamedTuple):
    """A frozen head [V, H] in FP8, made by `quantize_head`; V' is V rounded up to 64."""

    weight: Tensor  # [V, H], as given: for the label's logit and gradient
    by_token: Tensor  # [V', H] float8_e4m3fn
    token_scale: Tensor  # [1, V'] fp32
    by_channel: Tensor | None  # [H, V'] float8_e4m3fn, or None: the second product stays in bf16
    channel_scale: Tensor | None  # [1, H] fp32


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [R, C] as float8_e4m3fn and scales [R, 1] fp32 with x ~ q * scale."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-30) / FP8_MAX
    return (x.float() / scale).to(FP8), scale


def quantize_head(weight: Tensor, *, quantize_gradient: bool = True) -> Fp8Head:
    """Return the head [V, H] in FP8, with or without the copy that the dX product needs.

    Raises:
        ValueError: H is not a multiple of 16.
    """
    weight = weight.detach()
    vocab_size, hidden = weight.shape
    if hidden % WIDTH_MULTIPLE:
        raise ValueError(f"the head's width is {hidden}; FP8 products need a multiple of 16")
    columns = -(-vocab_size // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    by_token = torch.zeros(columns, hidden, dtype=FP8, device=weight.device)
    token_scale = torch.ones(columns, 1, dtype=torch.float32, device=weight.device)
    by_token[:vocab_size], token_scale[:vocab_size] = quantize_rows(weight)
    if not quantize_gradient:
        return Fp8Head(weight, by_token, token_scale.T.contiguous(), None, None)
    by_channel = torch.zeros(hidden, columns, dtype=FP8, device=weight.device)
    channel_scale = torch.empty(hidden, 1, dtype=torch.float32, device=weight.device)
    for start in range(0, hidden, 256):
        # By parts: an fp32 copy of a whole head takes 5 GB.
        rows = slice(start, start + 256)
        by_channel[rows, :vocab_size], channel_scale[rows] = quantize_rows(weight[:, rows].T)
    return Fp8Head(
        weight, by_token, token_scale.T.contiguous(), by_channel, channel_scale.T.contiguous()
    )


@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x, stride_out, hidden, BLOCK_H: tl.constexpr
):
    """quantize_rows, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    largest = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, hidden, BLOCK_H):
        mask = start + offs < hidden
        x = tl.load(x_ptr + row * stride_x + start + offs, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest), 1e-30) / 448.0
    tl.store(scale_ptr + row, scale)
    for start in range(0, hidden, BLOCK_H):
        mask = start + offs < hidden
        x = tl.load(x_ptr + row * stride_x + start + offs, mask=mask, other=0.0).to(tl.float32)
        at = out_ptr + row * stride_out + start + offs
        tl.store(at, (x / scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["labels_ptr"])
def _add_label_rows_kernel(
    dx_ptr,
    weight_ptr,
    labels_ptr,
    label_grad_ptr,
    stride_dx,
    stride_w,
    hidden,
    BLOCK_H: tl.constexpr,
):
    """dX_i += label_grad_i W[label_i]; label_grad is NaN where the label is poisoned."""
    row = tl.program_id(0).to(tl.int64)
    label_grad = tl.load(label_grad_ptr + row)
    label = tl.where(label_grad == label_grad, tl.load(labels_ptr + row), 0)
    offs = tl.arange(0, BLOCK_H)
    for start in range(0, hidden, BLOCK_H):
        mask = start + offs < hidden
        at = dx_ptr + row * stride_dx + start + offs
        w = tl.load(weight_ptr + label * stride_w + start + offs, mask=mask).to(tl.float32)
        dx = tl.load(at, mask=mask).to(tl.float32) + label_grad * w
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _fp8_chunk(
    x: Tensor,
    head: Fp8Head,
    labels: Tensor,
    out: LinearCE,
    options: RowOptions,
    dx: Tensor | None,
) -> None:
    """Both products and the row pass of one chunk, on the GPU."""
    (num_rows, hidden), columns = x.shape, head.by_token.shape[0]
    device = x.device
    quantized = chunk_buffer("x_fp8", num_rows, hidden, dtype=FP8, device=device)
    scale = chunk_buffer("scale", 2, num_rows, dtype=torch.float32, device=device)
    x_scale, row_scale = scale[0], scale[1]
    _quantize_rows_kernel[(num_rows,)](
        x, quantized, x_scale, x.stride(0), quantized.stride(0), hidden, BLOCK_H=BLOCK_H
    )
    logits = chunk_buffer("logits", num_rows, columns, dtype=x.dtype, device=device)
    torch._scaled_mm(
        quantized,
        head.by_token.T,
        scale_a=x_scale[:, None],
        scale_b=head.token_scale,
        out_dtype=x.dtype,
        use_fast_accum=True,
        out=logits,
    )
    if dx is None:
        triton_chunk(x, head.weight, labels, logits, out, options)
        return
    label_grad = chunk_buffer("label_grad", 1, num_rows, dtype=torch.float32, device=device)[0]
    if head.by_channel is None:
        triton_chunk(x, head.weight, labels, logits, out, options, ApartLabel(label_grad))
        torch.mm(logits[:, : head.weight.shape[0]], head.weight, out=dx)
    else:
        scaled = chunk_buffer("dz_fp8", num_rows, columns, dtype=FP8, device=device)
        apart = ApartLabel(label_grad, scaled=scaled, row_scale=row_scale)
        triton_chunk(x, head.weight, labels, logits, out, options, apart)
        torch._scaled_mm(
            scaled,
            head.by_channel.T,
            scale_a=row_scale[:, None],
            scale_b=head.channel_scale,
            out_dtype=x.dtype,
            # The tensor cores' short accumulator would lose digits over V terms.
            use_fast_accum=False,
            out=dx,
        )
    _add_label_rows_kernel[(num_rows,)](
        dx,
        head.weight,
        labels,
        label_grad,
        dx.stride(0),
        head.weight.stride(0),
        hidden,
        BLOCK_H=BLOCK_H,
    )


def _torch_fp8_chunk(
    x: Tensor,
    head: Fp8Head,
    labels: Tensor,
    out: LinearCE,
    options: RowOptions,
    dx: Tensor | None,
) -> None:
    """Same roundings as _fp8_chunk in plain PyTorch: what runs on a CPU, for tests."""
    dtype, vocab_size = accumulate_dtype(x.dtype), head.weight.shape[0]
    column = labels.clamp(0, vocab_size - 1)
    quantized, scale = quantize_rows(x)
    logits = (quantized.to(dtype) * scale) @ (head.by_token.to(dtype) * head.token_scale.T).T
    logits = logits[:, :vocab_size].to(x.dtype)
    label_logit = torch.linalg.vecdot(x, head.weight[column])
    logits.scatter_(1, column[:, None], label_logit[:, None])
    torch_chunk(x, head.weight, labels, logits, out, options)
    if dx is None:
        return
    label_grad = logits.gather(1, column[:, None]).clone()
    logits.scatter_(1, column[:, None], 0)
    if head.by_channel is None:
        product = logits @ head.weight
    else:
        quantized, scale = quantize_rows(logits)
        by_channel = head.by_channel[:, :vocab_size].to(dtype) * head.channel_scale.T
        product = (quantized.to(dtype) * scale) @ by_channel.T
    dx.copy_(product + label_grad * head.weight[column])


class _LinearCEFp8(torch.autograd.Function):
    """Saves dX [N, H], made in forward for an upstream gradient of one."""

    @staticmethod
    def forward(ctx, x, head, labels, options, chunk_rows, as_triton):
        out = empty_results(LinearCE, x)
        dx = torch.empty_like(x) if options.with_grad else None
        run = _fp8_chunk if as_triton else _torch_fp8_chunk
        with full_precision_sums(), torch.cuda.device_of(x):
            for start, end in chunk_bounds(x.shape[0], chunk_rows):
                chunk = slice(start, end)
                results = LinearCE(*(o[chunk] for o in out))
                run(
                    x[chunk],
                    head,
                    labels[chunk],
                    results,
                    options,
                    None if dx is None else dx[chunk],
                )
        ctx.mark_non_differentiable(*out[1:])
        ctx.save_for_backward(dx)
        ctx.as_triton = as_triton
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_nll, *_unused):
        (dx,) = ctx.saved_tensors
        with torch.cuda.device_of(dx):
            grad = scale_rows(dx, grad_nll, as_triton=ctx.as_triton)
        return grad, None, None, None, None, None


def linear_ce_fp8(
    x: Tensor,
    head: Fp8Head,
    labels: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    implementation: str | None = None,
) -> LinearCE:
    """Return linear_ce's results with logits, and the gradient if the head has its copy, from FP8.

    Args:
        x: [N, H] rows, as in linear_ce; H a multiple of 16.
        head: the head in FP8.
        labels: [N] int64 columns, as in linear_ce.
        logit_scale: factor on the logits, above 0.
        softcap, chunk_rows, implementation: as in linear_ce. "triton" needs a GPU.

    Raises:
        ValueError: shapes, dtypes or an implementation that do not go together.
    """
    as_triton = use_triton(x, implementation)
    check_head(x, head.weight, as_triton=as_triton)
    labels = check_labels(labels, num_rows=x.shape[0])
    options = row_options(x, logit_scale=logit_scale, softcap=softcap)
    return LinearCE(*_LinearCEFp8.apply(x, head, labels, options, chunk_rows, as_triton))
