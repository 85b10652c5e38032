"""linear_ce with its products in FP8: an option, for GPUs with row-wise scaled FP8 products.

Operands are float8_e4m3fn with one fp32 scale per row of x and dZ, per token of the head in the
first product and per channel of it in the second. The label's part of the gradient is kept out of
FP8: its logit and its product with the head stay exact, so a row has the scale of its largest other
column. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden,
V vocabulary, V' columns of the FP8 head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.frozen_head import Chunk, FrozenHeadLoss, run_loss
from dflash_offline.kernels.head_rows import check_head, check_labels, row_options
from dflash_offline.kernels.linear_ce import ApartLabel, triton_chunk
from dflash_offline.kernels.linear_ce_torch import torch_chunk
from dflash_offline.kernels.logit_chunks import COLUMN_MULTIPLE
from dflash_offline.kernels.optional_triton import tl, triton, use_triton
from dflash_offline.kernels.reference_loss import LinearCE, accumulate_dtype

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Widths of an FP8 product must be multiples of 16; columns of the head are padded to 64, as rows of
# chunk buffers are, so that operands are contiguous.
WIDTH_MULTIPLE = 16
BLOCK_H = 1024
# Rows and channels of the head that are quantised at a time.
PART_ROWS, PART_CHANNELS = 16384, 256


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
    # By parts: an fp32 copy of a whole head takes 5 GB.
    for start in range(0, vocab_size, PART_ROWS):
        rows = slice(start, min(start + PART_ROWS, vocab_size))
        by_token[rows], token_scale[rows] = quantize_rows(weight[rows])
    if not quantize_gradient:
        return Fp8Head(weight, by_token, token_scale.T.contiguous(), None, None)
    by_channel = torch.zeros(hidden, columns, dtype=FP8, device=weight.device)
    channel_scale = torch.empty(hidden, 1, dtype=torch.float32, device=weight.device)
    for start in range(0, hidden, PART_CHANNELS):
        rows = slice(start, start + PART_CHANNELS)
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


@dataclass(kw_only=True)
class Fp8CE(FrozenHeadLoss):
    """linear_ce_fp8 over one batch, on the GPU."""

    head: Fp8Head
    labels: Tensor  # [N]
    kind: type = LinearCE

    def _logits_of(self, chunk: Chunk) -> Tensor:
        return chunk.buffer("logits", self.head.by_token.shape[0], self.x.dtype)

    def logits(self, chunk: Chunk) -> None:
        x, hidden = self.x[chunk.rows], self.x.shape[1]
        quantized, scale = chunk.buffer("x_fp8", hidden, FP8), chunk.vector("x_scale")
        strides = x.stride(0), quantized.stride(0)
        _quantize_rows_kernel[(chunk.size,)](x, quantized, scale, *strides, hidden, BLOCK_H=BLOCK_H)
        torch._scaled_mm(
            quantized,
            self.head.by_token.T,
            scale_a=scale[:, None],
            scale_b=self.head.token_scale,
            out_dtype=x.dtype,
            use_fast_accum=True,
            out=self._logits_of(chunk),
        )

    def _apart(self, chunk: Chunk) -> ApartLabel | None:
        """Return where the row pass puts the label's gradient, and FP8 rows if they are wanted."""
        if self.dx is None:
            return None
        label_grad = chunk.vector("label_grad")
        if self.head.by_channel is None:
            return ApartLabel(label_grad)
        scaled = chunk.buffer("dz_fp8", self.head.by_token.shape[0], FP8)
        return ApartLabel(label_grad, scaled=scaled, row_scale=chunk.vector("row_scale"))

    def row_pass(self, chunk: Chunk) -> None:
        x, labels = self.x[chunk.rows], self.labels[chunk.rows]
        logits, out, apart = self._logits_of(chunk), self.results(chunk), self._apart(chunk)
        triton_chunk(x, self.head.weight, labels, logits, out, self.options, apart)

    def gradient(self, chunk: Chunk) -> None:
        dx, weight, apart = self.dx[chunk.rows], self.head.weight, self._apart(chunk)
        if apart.scaled is None:
            torch.mm(self._logits_of(chunk)[:, : weight.shape[0]], weight, out=dx)
        else:
            torch._scaled_mm(
                apart.scaled,
                self.head.by_channel.T,
                scale_a=apart.row_scale[:, None],
                scale_b=self.head.channel_scale,
                out_dtype=dx.dtype,
                # The tensor cores' short accumulator would lose digits over V terms.
                use_fast_accum=False,
                out=dx,
            )
        _add_label_rows_kernel[(chunk.size,)](
            dx,
            weight,
            self.labels[chunk.rows],
            apart.label_grad,
            dx.stride(0),
            weight.stride(0),
            dx.shape[1],
            BLOCK_H=BLOCK_H,
        )


class Fp8CETwin(Fp8CE):
    """Same roundings in plain PyTorch: what runs on a CPU, for tests."""

    def _logits_of(self, chunk: Chunk) -> Tensor:
        return chunk.buffer("logits", self.head.weight.shape[0], self.x.dtype)

    def logits(self, chunk: Chunk) -> None:
        x, head, logits = self.x[chunk.rows], self.head, self._logits_of(chunk)
        dtype, vocab_size = accumulate_dtype(x.dtype), head.weight.shape[0]
        quantized, scale = quantize_rows(x)
        product = (quantized.to(dtype) * scale) @ (head.by_token.to(dtype) * head.token_scale.T).T
        logits.copy_(product[:, :vocab_size])
        column = self.labels[chunk.rows].clamp(0, vocab_size - 1)
        label_logit = torch.linalg.vecdot(x, head.weight[column])
        logits.scatter_(1, column[:, None], label_logit[:, None])

    def row_pass(self, chunk: Chunk) -> None:
        x, labels = self.x[chunk.rows], self.labels[chunk.rows]
        logits, out = self._logits_of(chunk), self.results(chunk)
        torch_chunk(x, self.head.weight, labels, logits, out, self.options)

    def gradient(self, chunk: Chunk) -> None:
        head, logits = self.head, self._logits_of(chunk)
        dtype, vocab_size = accumulate_dtype(logits.dtype), head.weight.shape[0]
        column = self.labels[chunk.rows].clamp(0, vocab_size - 1)
        label_grad = logits.gather(1, column[:, None])
        logits.scatter_(1, column[:, None], 0)
        if head.by_channel is None:
            product = logits @ head.weight
        else:
            quantized, scale = quantize_rows(logits)
            by_channel = head.by_channel[:, :vocab_size].to(dtype) * head.channel_scale.T
            product = (quantized.to(dtype) * scale) @ by_channel.T
        self.dx[chunk.rows] = product + label_grad * head.weight[column]


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
    kind = Fp8CE if as_triton else Fp8CETwin
    loss = kind(x=x, head=head, labels=labels, options=options, as_triton=as_triton)
    return run_loss(loss, chunk_rows=chunk_rows)
