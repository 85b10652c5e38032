"""Soft targets through a frozen vocabulary head: KL, reverse KL, TV and CE in three products.

Teacher and student share the head, so what is stored is the teacher's logits t = W x_t and the
difference d = W (x_s - x_t): rounding them to 16 bits leaves a gradient error that does not grow as
the student approaches the teacher. Differences p - q of near-equal probabilities are never taken by
subtraction. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden,
V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.kernels.frozen_head import Chunk, FrozenHeadLoss, run_loss
from dflash_offline.kernels.head_rows import RowLaunch, check_head, check_labels, check_scale
from dflash_offline.kernels.linear_kl_torch import KLOptions, torch_chunk
from dflash_offline.kernels.logit_math import (
    cap_logits,
    cap_slope,
    dot_rows,
    exp_scaled,
    expm1_parts,
    fold_sum,
    load_pair,
    log1p,
)
from dflash_offline.kernels.optional_triton import tl, triton, use_triton
from dflash_offline.kernels.reference_loss import LinearKL

# H200, 4,096 rows of 248,320 columns: 3.22 ms, 3.2 TB/s at ten bytes a logit; 16 warps 4.03 ms.
LAUNCH = RowLaunch(block_v=4096, block_h=2048, num_warps=8)


PER_ROW = ["labels_ptr", *(f"{name}_ptr" for name in LinearKL._fields)]


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=PER_ROW)
def _linear_kl_rows_kernel(
    t_ptr,
    d_ptr,
    x_ptr,
    teacher_x_ptr,
    weight_ptr,
    labels_ptr,
    loss_ptr,
    kl_ptr,
    reverse_kl_ptr,
    tv_ptr,
    nll_ptr,
    entropy_ptr,
    argmax_ptr,
    teacher_argmax_ptr,
    teacher_prob_ptr,
    stride_z,
    stride_x,
    stride_teacher,
    stride_w,
    num_columns,
    hidden,
    kl_weight,
    reverse_kl_weight,
    tv_weight,
    ce_weight,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_REVERSE: tl.constexpr,
    HAS_TV: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One row of teacher logits and logit differences to its divergences and, in d, its gradient.

    With r = log(p / q) = d - c and c = lse_s - lse_t, and e = exp(r) - 1:
    KL = sum q (e - r), reverse KL = sum q (e r - (e - r)), TV = sum q |e| / 2, all terms >= 0;
    dz = slope (kl q e + reverse p (r - RKL) + tv p (sign(r) - G) / 2 + ce (p - onehot)),
    G = sum p sign(r). TV's gradient takes one more pass, for G.
    """
    row = tl.program_id(0).to(tl.int64)
    t_ptr += row * stride_z
    d_ptr += row * stride_z
    offs = tl.arange(0, BLOCK_V)
    # Buffer rows are padded to 64 columns; a bound that is such a multiple keeps loads wide.
    bound = (num_columns + 63) // 64 * 64
    neg_inf = float("-inf")
    is_valid = True
    column = -1
    raw_t_label = 0.0
    raw_d_label = 0.0
    s_label = neg_inf
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        is_valid = (label >= 0) & (label < num_columns)
        column = tl.where(is_valid, label, -1).to(tl.int32)
        w_row = weight_ptr + tl.where(is_valid, label, 0) * stride_w
        raw_s_label = dot_rows(x_ptr + row * stride_x, w_row, hidden, BLOCK_H)
        raw_t_label = dot_rows(teacher_x_ptr + row * stride_teacher, w_row, hidden, BLOCK_H)
        raw_d_label = raw_s_label - raw_t_label
        s_label = (raw_t_label + raw_d_label) * logit_scale
        if HAS_SOFTCAP:
            s_label = cap_logits(raw_t_label + raw_d_label, logit_scale, softcap)
        s_label = tl.where(is_valid, s_label, neg_inf)

    # Taken out here, the padding costs no comparison in the passes.
    padding = bound - 64 + tl.arange(0, 64)
    tl.store(t_ptr + padding, neg_inf, mask=padding >= num_columns)
    tl.store(d_ptr + padding, 0.0, mask=padding >= num_columns)
    # Other threads of the program read these columns next.
    tl.debug_barrier()

    m_t = neg_inf
    m_s = s_label
    top_s = neg_inf
    start_t = 0
    start_s = 0
    sum_t = 0.0
    others_s = 0.0
    weighted_d = 0.0
    largest_d = tl.zeros([BLOCK_V // 8], tl.float32)
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        t, s, d, _ = load_pair(
            t_ptr, d_ptr, cols, bound, column, raw_t_label, raw_d_label,
            logit_scale, softcap, HAS_SOFTCAP, HAS_LABELS,
        )  # fmt: skip
        largest_d = tl.maximum(largest_d, tl.max(tl.reshape(tl.abs(d), [BLOCK_V // 8, 8]), axis=1))
        top = tl.max(t)
        start_t = tl.where(top > m_t, start, start_t)
        new_t = tl.maximum(m_t, top)
        sum_t = sum_t * exp_scaled(m_t - new_t, 1.0) + tl.sum(exp_scaled(t - new_t, 1.0))
        m_t = new_t
        top = tl.max(s)
        start_s = tl.where(top > top_s, start, start_s)
        top_s = tl.maximum(top_s, top)
        new_s = tl.maximum(m_s, top)
        shrink = exp_scaled(m_s - new_s, 1.0)
        e_s = exp_scaled(s - new_s, 1.0)
        if HAS_REVERSE:
            weighted_d = weighted_d * shrink + tl.sum(e_s * d)
        if HAS_LABELS:
            e_s = tl.where(cols == column, 0.0, e_s)
        others_s = others_s * shrink + tl.sum(e_s)
        m_s = new_s

    sum_s = others_s
    if HAS_LABELS:
        sum_s += tl.where(is_valid, exp_scaled(s_label - m_s, 1.0), 0.0)
    # The two sums may be rounded differently where all d are zero and they are equal.
    c = tl.where(tl.max(largest_d) == 0.0, 0.0, (m_s - m_t) + tl.log(sum_s / sum_t))
    inv_t = 1.0 / sum_t
    inv_s = 1.0 / sum_s
    expected_r = weighted_d * inv_s - c
    balance = 0.0
    if HAS_TV and WITH_GRAD:
        signed = tl.zeros([BLOCK_V // 8], tl.float32)
        for start in range(0, num_columns, BLOCK_V):
            cols = start + offs
            t, s, d, _ = load_pair(
                t_ptr, d_ptr, cols, bound, column, raw_t_label, raw_d_label,
                logit_scale, softcap, HAS_SOFTCAP, HAS_LABELS,
            )  # fmt: skip
            r = d - c
            p = exp_scaled(s - m_s, 1.0) * inv_s
            signed += fold_sum(tl.where(r > 0.0, p, tl.where(r < 0.0, -p, 0.0)), BLOCK_V)
        balance = tl.sum(signed)

    # Only one block can hold a first largest column.
    cols = start_t + offs
    t, s, d, _ = load_pair(
        t_ptr, d_ptr, cols, bound, column, raw_t_label, raw_d_label,
        logit_scale, softcap, HAS_SOFTCAP, HAS_LABELS,
    )  # fmt: skip
    argmax = tl.min(tl.where(t == m_t, cols, num_columns))
    tl.store(teacher_argmax_ptr + row, tl.where(argmax < num_columns, argmax, 0).to(tl.int64))
    cols = start_s + offs
    t, s, d, _ = load_pair(
        t_ptr, d_ptr, cols, bound, column, raw_t_label, raw_d_label,
        logit_scale, softcap, HAS_SOFTCAP, HAS_LABELS,
    )  # fmt: skip
    argmax = tl.min(tl.where(s == m_s, cols, num_columns))
    tl.store(argmax_ptr + row, tl.where(argmax < num_columns, argmax, 0).to(tl.int64))

    kl = tl.zeros([BLOCK_V // 8], tl.float32)
    reverse = tl.zeros([BLOCK_V // 8], tl.float32)
    distance = tl.zeros([BLOCK_V // 8], tl.float32)
    spread = tl.zeros([BLOCK_V // 8], tl.float32)
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        t, s, d, raw_s = load_pair(
            t_ptr, d_ptr, cols, bound, column, raw_t_label, raw_d_label,
            logit_scale, softcap, HAS_SOFTCAP, HAS_LABELS,
        )  # fmt: skip
        q = exp_scaled(t - m_t, 1.0) * inv_t
        # Bounded, so that absent columns give 0 * -1e30 and not 0 * inf.
        shifted = tl.maximum(s - m_s, -1e30)
        p = exp_scaled(shifted, 1.0) * inv_s
        r = d - c
        is_near = tl.abs(r) < 0.25
        e, f = expm1_parts(r)
        difference = tl.where(is_near, q * e, p - q)
        kl += fold_sum(tl.where(is_near, q * f, difference - q * r), BLOCK_V)
        term = tl.where(is_near, q * (e * r - f), p * r - difference)
        reverse += fold_sum(term, BLOCK_V)
        distance += fold_sum(tl.abs(difference), BLOCK_V)
        spread += fold_sum(p * shifted, BLOCK_V)
        if WITH_GRAD:
            dz = kl_weight * difference
            if HAS_REVERSE:
                dz += reverse_kl_weight * p * (r - expected_r)
            if HAS_TV:
                sign = tl.where(r > 0.0, 1.0, tl.where(r < 0.0, -1.0, 0.0))
                dz += 0.5 * tv_weight * p * (sign - balance)
            if HAS_LABELS:
                dz += ce_weight * tl.where(cols == column, -others_s * inv_s, p)
                dz = tl.where(is_valid, dz, float("nan"))
            dz *= logit_scale
            if HAS_SOFTCAP:
                dz *= cap_slope(raw_s, logit_scale, softcap)
            tl.store(d_ptr + cols, dz.to(d_ptr.dtype.element_ty), mask=cols < bound)

    kl_sum = tl.sum(kl)
    reverse_sum = tl.sum(reverse)
    tv_sum = 0.5 * tl.sum(distance)
    nll = 0.0
    if HAS_LABELS:
        nll = tl.where(s_label == m_s, log1p(others_s), (m_s - s_label) + tl.log(sum_s))
        nll = tl.where(is_valid, nll, float("nan"))
    loss = kl_weight * kl_sum + tv_weight * tv_sum + ce_weight * nll
    if HAS_REVERSE:
        # Absent otherwise: it may be infinite, and zero times infinity is NaN.
        loss += reverse_kl_weight * reverse_sum
    if HAS_LABELS:
        loss = tl.where(is_valid, loss, float("nan"))
    tl.store(loss_ptr + row, loss)
    tl.store(kl_ptr + row, kl_sum)
    tl.store(reverse_kl_ptr + row, reverse_sum)
    tl.store(tv_ptr + row, tv_sum)
    tl.store(nll_ptr + row, nll)
    tl.store(entropy_ptr + row, tl.log(sum_s) - tl.sum(spread))
    tl.store(teacher_prob_ptr + row, inv_t)


def _triton_chunk(
    x: Tensor,
    teacher_x: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    logits: Tensor,
    delta: Tensor,
    out: LinearKL,
    options: KLOptions,
) -> None:
    """Fill `out` from teacher logits and differences [C, V]; with_grad, leave dz in `delta`."""
    _linear_kl_rows_kernel[(x.shape[0],)](
        logits,
        delta,
        x,
        teacher_x,
        weight,
        labels,
        *out,
        delta.stride(0),
        x.stride(0),
        teacher_x.stride(0),
        weight.stride(0),
        weight.shape[0],
        x.shape[1],
        options.kl_weight,
        options.reverse_kl_weight,
        options.tv_weight,
        options.ce_weight,
        options.logit_scale,
        1.0 if options.softcap is None else options.softcap,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_LABELS=labels is not None,
        HAS_REVERSE=options.reverse_kl_weight != 0,
        HAS_TV=options.tv_weight != 0,
        WITH_GRAD=options.with_grad,
        BLOCK_V=LAUNCH.block_v,
        BLOCK_H=LAUNCH.block_h,
        num_warps=LAUNCH.num_warps,
    )


@dataclass(kw_only=True)
class SharedHeadKL(FrozenHeadLoss):
    """linear_kl over one batch."""

    weight: Tensor  # [V, H]
    teacher_x: Tensor  # [N, H]
    labels: Tensor | None  # [N]
    kind: type = LinearKL

    def _logits_of(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the buffers of teacher logits and of differences."""
        columns, dtype = self.weight.shape[0], self.x.dtype
        return chunk.buffer("logits", columns, dtype), chunk.buffer("delta", columns, dtype)

    def logits(self, chunk: Chunk) -> None:
        x, teacher_x = self.x[chunk.rows], self.teacher_x[chunk.rows]
        logits, delta = self._logits_of(chunk)
        delta_x = chunk.buffer("delta_x", self.x.shape[1], self.x.dtype)
        # Subtracted in fp32 and rounded once, whatever the dtype.
        torch.sub(x, teacher_x, out=delta_x)
        torch.mm(teacher_x, self.weight.T, out=logits)
        torch.mm(delta_x, self.weight.T, out=delta)

    def row_pass(self, chunk: Chunk) -> None:
        run = _triton_chunk if self.as_triton else torch_chunk
        labels = None if self.labels is None else self.labels[chunk.rows]
        x, teacher_x = self.x[chunk.rows], self.teacher_x[chunk.rows]
        buffers, out = self._logits_of(chunk), self.results(chunk)
        run(x, teacher_x, self.weight, labels, *buffers, out, self.options)

    def gradient(self, chunk: Chunk) -> None:
        torch.mm(self._logits_of(chunk)[1], self.weight, out=self.dx[chunk.rows])


def linear_kl(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    *,
    labels: Tensor | None = None,
    kl_weight: float = 1.0,
    reverse_kl_weight: float = 0.0,
    tv_weight: float = 0.0,
    ce_weight: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> LinearKL:
    """Return divergences from a teacher that shares the frozen head, and their weighted sum.

    With `z(x) = cap(logit_scale * x @ weight.T)`, p = softmax(z(x)) and q = softmax(z(teacher_x)):
    `loss = kl_weight * KL(q, p) + reverse_kl_weight * KL(p, q) + tv_weight * TV + ce_weight * nll`,
    differentiable with respect to x alone, any upstream gradient per row. A weight of zero means
    that the term is absent from loss; all of them are returned. Nothing here waits for the GPU.

    Args:
        x: [N, H] student rows, normalised as the head expects; fp32 or fp64 on CPUs, bf16 on GPUs.
        weight: [V, H] head, same dtype; gets no gradient.
        teacher_x: [N, H] the teacher's states after its final norm, same dtype.
        labels: [N] int64 columns for nll, or None; needed where ce_weight is not zero.
        kl_weight, reverse_kl_weight, tv_weight, ce_weight: constant factors of the terms.
        logit_scale: factor on the logits, before the soft-cap.
        softcap: bound of the tanh soft-cap, or None.
        chunk_rows: most rows of a chunk, as in linear_ce.
        vocab_size: rows of weight that take part, where it is padded beyond the vocabulary.
        implementation: "triton", "reference" (the same algorithm in plain PyTorch), or None to
            choose by device.

    Returns:
        LinearKL, nine tensors [N].

    Raises:
        ValueError: shapes, dtypes, weights or an implementation that do not go together.
    """
    weight = weight[:vocab_size].detach()
    as_triton = use_triton(x, implementation)
    check_head(x, weight, as_triton=as_triton)
    check_head(teacher_x, weight, as_triton=as_triton)
    if teacher_x.shape != x.shape:
        raise ValueError(
            f"teacher_x is {tuple(teacher_x.shape)}; it must have x's shape {tuple(x.shape)}"
        )
    if labels is not None:
        labels = check_labels(labels, num_rows=x.shape[0])
    elif ce_weight:
        raise ValueError(f"ce_weight is {ce_weight} without labels; pass labels or set it to 0")
    check_scale(logit_scale, softcap)
    options = KLOptions(
        with_grad=x.requires_grad and torch.is_grad_enabled(),
        kl_weight=float(kl_weight),
        reverse_kl_weight=float(reverse_kl_weight),
        tv_weight=float(tv_weight),
        ce_weight=float(ce_weight),
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
    )
    loss = SharedHeadKL(
        x=x,
        weight=weight,
        teacher_x=teacher_x.detach(),
        labels=labels,
        options=options,
        as_triton=as_triton,
    )
    return run_loss(loss, chunk_rows=chunk_rows)
