"""Cross-entropy through a frozen vocabulary head: two matrix products, one pass over the logits.

Logits of a chunk of rows are made in a kept buffer, turned into their own gradient in place, and
multiplied back to dX, all in the forward pass; backward scales rows of dX by the upstream gradient.
The label's logit is taken in fp32 and its gradient is -(S - e_y) / S, so that 16-bit logits cost no
accuracy. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden,
V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.frozen_head import Chunk, FrozenHeadLoss, run_loss
from dflash_offline.kernels.head_rows import (
    RowOptions,
    check_head,
    check_labels,
    row_launch,
    row_options,
    warm_up_loss,
)
from dflash_offline.kernels.linear_ce_torch import torch_chunk
from dflash_offline.kernels.logit_math import (
    cap_logits,
    cap_slope,
    dot_rows,
    exp_scaled,
    fold_sum,
    just_below,
    log1p,
)
from dflash_offline.kernels.optional_triton import tl, triton, use_triton
from dflash_offline.kernels.reference_loss import LinearCE

# Columns whose probability mass is summed for linear_ce_skip; the height of a step of its product.
TILE_COLUMNS = 64

# Row offsets change from step to step, so their alignment is not compiled in.
PER_ROW = ["labels_ptr", *(f"{name}_ptr" for name in LinearCE._fields)]
PER_ROW += ["label_grad_ptr", "row_scale_ptr"]


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=PER_ROW)
def _linear_ce_rows_kernel(
    z_ptr,
    x_ptr,
    weight_ptr,
    labels_ptr,
    nll_ptr,
    lse_ptr,
    argmax_ptr,
    rank_ptr,
    entropy_ptr,
    label_prob_ptr,
    label_grad_ptr,
    mass_ptr,
    scaled_ptr,
    row_scale_ptr,
    stride_z,
    stride_x,
    stride_w,
    stride_mass,
    stride_scaled,
    num_columns,
    hidden,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row of raw logits to its statistics and, in place, to its gradient.

    Pass 1: m = max_j z_j and R = sum_{j != y} exp(z_j - m), so S = R + exp(z_y - m).
    Pass 2: dz_j = slope_j exp(z_j - m) / S and dz_y = -slope_y R / S; rank and entropy.
    With label_grad, dz_y goes there and the row has a zero in its place; with mass, sums of dz over
    TILE columns are stored; with scaled, the row goes there divided by its row_scale.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_z
    label = tl.load(labels_ptr + row)
    is_valid = (label >= 0) & (label < num_columns)
    w_row = weight_ptr + tl.where(is_valid, label, 0) * stride_w
    raw_label = dot_rows(x_ptr + row * stride_x, w_row, hidden, BLOCK_H)
    neg_inf = float("-inf")
    # u is a logit after the soft-cap, or a raw one whose scale is left to the exponent.
    unit = 1.0 if HAS_SOFTCAP else logit_scale
    u_label = cap_logits(raw_label, logit_scale, softcap) if HAS_SOFTCAP else raw_label
    column = tl.where(is_valid, label, -1).to(tl.int32)
    offs = tl.arange(0, BLOCK_V)
    # Buffer rows are padded to 64 columns; a bound that is such a multiple keeps loads wide.
    bound = (num_columns + 63) // 64 * 64

    # Taken out here, the label and the padding cost no comparison in the passes.
    absent = tl.full([64], neg_inf, tl.float32).to(z_ptr.dtype.element_ty)
    padding = bound - 64 + tl.arange(0, 64)
    tl.store(z_ptr + padding, absent, mask=(padding >= num_columns) | (padding == column))
    tl.store(z_ptr + tl.maximum(column, 0), neg_inf, mask=column >= 0)
    # Other threads of the program read these columns next.
    tl.debug_barrier()

    m = tl.where(is_valid, u_label, neg_inf)
    others = 0.0
    top_other = neg_inf
    top_start = 0
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        u = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
        if HAS_SOFTCAP:
            u = cap_logits(u, logit_scale, softcap)
        top = tl.max(u)
        top_start = tl.where(top > top_other, start, top_start)
        top_other = tl.maximum(top_other, top)
        m_new = tl.maximum(m, top)
        # A block may hold nothing but -inf, before the first finite logit.
        m_safe = tl.where(m_new == neg_inf, 0.0, m_new)
        others = others * exp_scaled(m - m_safe, unit) + tl.sum(exp_scaled(u - m_safe, unit))
        m = m_new

    e_label = tl.where(is_valid, exp_scaled(u_label - m, unit), 0.0)
    total = others + e_label
    log_total = tl.log(total)
    inverse = 1.0 / total
    nll = tl.where(u_label == m, log1p(others), (m - u_label) * unit + log_total)
    nan = float("nan")
    tl.store(nll_ptr + row, tl.where(is_valid, nll, nan))
    tl.store(lse_ptr + row, m * unit + log_total)
    tl.store(label_prob_ptr + row, tl.where(is_valid, e_label * inverse, nan))

    # Only one block can hold the first largest column, and one the label's equals on both sides.
    cols = top_start + offs
    u = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
    if HAS_SOFTCAP:
        u = cap_logits(u, logit_scale, softcap)
    first = tl.min(tl.where(u == top_other, cols, num_columns))
    is_label_first = (u_label > top_other) | ((u_label == top_other) & (column < first))
    argmax = tl.where(is_valid & is_label_first, column, first)
    tl.store(argmax_ptr + row, tl.where(argmax < num_columns, argmax, 0).to(tl.int64))
    label_start = tl.maximum(column, 0) // BLOCK_V * BLOCK_V
    cols = label_start + offs
    u = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
    if HAS_SOFTCAP:
        u = cap_logits(u, logit_scale, softcap)
    rank = tl.sum(((u == u_label) & (cols < column)).to(tl.int32))

    scale = tl.where(is_valid, inverse * logit_scale, nan)
    if row_scale_ptr is not None:
        # The largest |dz| off the label becomes 448, the largest number of float8_e4m3fn.
        tl.store(row_scale_ptr + row, exp_scaled(top_other - m, unit) * scale / 448.0)
    label_grad = -others * scale
    if HAS_SOFTCAP:
        label_grad *= cap_slope(raw_label, logit_scale, softcap)
    if label_grad_ptr is not None:
        tl.store(label_grad_ptr + row, label_grad)

    label_spread = tl.where(is_valid, e_label * (u_label - m), 0.0)
    below = just_below(u_label)
    ahead = tl.zeros([BLOCK_V // 8], tl.int32)
    spread = tl.zeros([BLOCK_V // 8], tl.float32)
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        raw = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
        u = cap_logits(raw, logit_scale, softcap) if HAS_SOFTCAP else raw
        # Before the label's block its equals are ahead of it; from it on they are not.
        threshold = tl.where(start < label_start, below, u_label)
        ahead += fold_sum((u > threshold).to(tl.int32), BLOCK_V)
        # Bounded, so that absent columns give 0 * -1e30 and not 0 * inf.
        shifted = tl.maximum(u - m, -1e30)
        e = exp_scaled(shifted, unit)
        spread += fold_sum(e * shifted, BLOCK_V)
        if WITH_GRAD:
            if scaled_ptr is not None:
                dz = 448.0 * exp_scaled(tl.maximum(u - top_other, -1e30), unit)
            else:
                dz = e * scale
            if HAS_SOFTCAP:
                dz *= cap_slope(raw, logit_scale, softcap)
            if scaled_ptr is not None:
                at = scaled_ptr + row * stride_scaled + cols
                tl.store(at, dz.to(scaled_ptr.dtype.element_ty), mask=cols < bound)
            else:
                tl.store(z_ptr + cols, dz.to(z_ptr.dtype.element_ty), mask=cols < bound)
            if mass_ptr is not None:
                runs = tl.reshape(fold_sum(dz, BLOCK_V), [BLOCK_V // TILE, TILE // 8])
                tiles = start // TILE + tl.arange(0, BLOCK_V // TILE)
                at = mass_ptr + row * stride_mass + tiles
                mass = tl.sum(runs, axis=1).to(mass_ptr.dtype.element_ty)
                tl.store(at, mass, mask=tiles * TILE < num_columns)
    rank += tl.sum(ahead)
    tl.store(rank_ptr + row, tl.where(is_valid, rank, num_columns).to(tl.int64))
    tl.store(entropy_ptr + row, log_total - (tl.sum(spread) + label_spread) * inverse * unit)
    if WITH_GRAD and label_grad_ptr is None:
        tl.debug_barrier()
        at = z_ptr + tl.maximum(column, 0)
        tl.store(at, label_grad.to(z_ptr.dtype.element_ty), mask=column >= 0)


class ApartLabel(NamedTuple):
    """Where the row kernel puts a gradient that is not all in the logits' place, for C rows.

    The label's entry is always taken out of the row: it is the largest, and it has an exact product
    of its own, label_grad_i * W[label_i].
    """

    label_grad: Tensor  # [C] fp32
    mass: Tensor | None = None  # [C, V / TILE_COLUMNS], sums of dz over tiles of columns
    scaled: Tensor | None = None  # [C, V] float8_e4m3fn, dz / row_scale, instead of dz in place
    row_scale: Tensor | None = None  # [C] fp32


def triton_chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    logits: Tensor,
    out: LinearCE,
    options: RowOptions,
    apart: ApartLabel | None = None,
) -> None:
    """Fill `out` from raw logits [C, V] and, with_grad, leave dz in their place."""
    launch = row_launch(x.device)
    label_grad, mass, scaled, row_scale = apart or (None,) * 4
    _linear_ce_rows_kernel[(x.shape[0],)](
        logits,
        x,
        weight,
        labels,
        *out,
        label_grad,
        mass,
        scaled,
        row_scale,
        logits.stride(0),
        x.stride(0),
        weight.stride(0),
        0 if mass is None else mass.stride(0),
        0 if scaled is None else scaled.stride(0),
        weight.shape[0],
        x.shape[1],
        options.logit_scale,
        1.0 if options.softcap is None else options.softcap,
        HAS_SOFTCAP=options.softcap is not None,
        WITH_GRAD=options.with_grad,
        BLOCK_V=launch.block_v,
        BLOCK_H=launch.block_h,
        TILE=TILE_COLUMNS,
        num_warps=launch.num_warps,
    )


@dataclass(kw_only=True)
class ExactCE(FrozenHeadLoss):
    """linear_ce over one batch."""

    weight: Tensor  # [V, H]
    labels: Tensor  # [N]
    kind: type = LinearCE

    def _logits_of(self, chunk: Chunk) -> Tensor:
        return chunk.buffer("logits", self.weight.shape[0], self.x.dtype)

    def logits(self, chunk: Chunk) -> None:
        torch.mm(self.x[chunk.rows], self.weight.T, out=self._logits_of(chunk))

    def row_pass(self, chunk: Chunk) -> None:
        run = triton_chunk if self.as_triton else torch_chunk
        x, labels = self.x[chunk.rows], self.labels[chunk.rows]
        out = self.results(chunk)
        run(x, self.weight, labels, self._logits_of(chunk), out, self.options)

    def gradient(self, chunk: Chunk) -> None:
        torch.mm(self._logits_of(chunk), self.weight, out=self.dx[chunk.rows])


def linear_ce(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> LinearCE:
    """Return cross-entropy and row statistics through a frozen head.

    Equal to `F.cross_entropy(cap(logit_scale * x @ weight.T), labels, reduction="none")` with
    `cap(z) = softcap * tanh(z / softcap)`, and differentiable with respect to x alone. Any upstream
    gradient per row is allowed (weights, masks, a common denominator). An empty batch gives an
    empty nll whose sum is a zero attached to the graph. Nothing here waits for the GPU.

    Args:
        x: [N, H] rows, normalised as the head expects them; fp32 or fp64 on a CPU, bf16 on a GPU.
        weight: [V, H] head, same dtype; gets no gradient.
        labels: [N] int64 columns; a row with any other value is poisoned (see LinearCE).
        logit_scale: factor on the logits, before the soft-cap.
        softcap: bound of the tanh soft-cap, or None.
        chunk_rows: most rows of a chunk; above 1,024 a GPU holds logits of two chunks. Changes the
            result by rounding only.
        vocab_size: rows of weight that take part, where it is padded beyond the vocabulary.
        implementation: "triton", "reference" (the same algorithm in plain PyTorch), or None to
            choose by device.

    Returns:
        LinearCE, six tensors [N].

    Raises:
        ValueError: shapes, dtypes or an implementation that do not go together.
    """
    weight = weight[:vocab_size].detach()
    as_triton = use_triton(x, implementation)
    check_head(x, weight, as_triton=as_triton)
    labels = check_labels(labels, num_rows=x.shape[0])
    options = row_options(x, logit_scale=logit_scale, softcap=softcap)
    loss = ExactCE(x=x, weight=weight, labels=labels, options=options, as_triton=as_triton)
    return run_loss(loss, chunk_rows=chunk_rows)


def warm_up(
    weight: Tensor,
    *,
    chunk_rows: int = 4096,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> None:
    """Compile every kernel that linear_ce uses with the head [V, H], and take its buffer."""
    warm_up_loss(
        lambda x, labels: (
            linear_ce(
                x, weight, labels, softcap=softcap, chunk_rows=chunk_rows, vocab_size=vocab_size
            ).nll
        ),
        weight,
        chunk_rows=chunk_rows,
    )
