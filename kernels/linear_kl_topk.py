"""KL against a stored top-k teacher through a frozen head, in two matrix products.

The teacher is k columns with log-probabilities, and one bucket for the rest of its mass; the
student is compared over the same k + 1 buckets. Logits of listed columns are taken in fp32, as
linear_ce does for its label. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a
chunk, H hidden, V vocabulary, k listed columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.kernels.frozen_head import Chunk, FrozenHeadLoss, run_loss
from dflash_offline.kernels.head_rows import RowOptions, check_head, row_launch, row_options
from dflash_offline.kernels.logit_math import cap_logits, cap_slope, exp_scaled
from dflash_offline.kernels.optional_triton import tl, triton, use_triton
from dflash_offline.kernels.reference_loss import TAIL_FLOOR, LinearTopKKL, accumulate_dtype

# Tile of the listed logits: rows of the head, and elements of each, at a time.
BLOCK_LISTED = 16
BLOCK_H = 256

PER_ROW = ["ids_ptr", "logprobs_ptr", *(f"{name}_ptr" for name in LinearTopKKL._fields)]


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["ids_ptr"])
def _listed_logits_kernel(
    x_ptr,
    weight_ptr,
    ids_ptr,
    out_ptr,
    stride_x,
    stride_w,
    stride_ids,
    stride_listed,
    num_columns,
    hidden,
    num_listed,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out_ik = x_i . W[ids_ik] in fp32; ids outside the vocabulary read column 0."""
    row = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    for first in range(0, num_listed, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        mask_k = offs_k < num_listed
        ids = tl.load(ids_ptr + row * stride_ids + offs_k, mask=mask_k, other=0).to(tl.int64)
        ids = tl.where((ids >= 0) & (ids < num_columns), ids, 0)
        total = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, hidden, BLOCK_H):
            mask_h = start + offs_h < hidden
            x = tl.load(x_ptr + row * stride_x + start + offs_h, mask=mask_h, other=0.0)
            w = tl.load(
                weight_ptr + ids[:, None] * stride_w + (start + offs_h)[None, :],
                mask=mask_h[None, :],
                other=0.0,
            )
            total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        tl.store(out_ptr + row * stride_listed + offs_k, total, mask=mask_k)


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=PER_ROW)
def _linear_kl_topk_rows_kernel(
    z_ptr,
    listed_ptr,
    ids_ptr,
    logprobs_ptr,
    loss_ptr,
    mass_ptr,
    lse_ptr,
    argmax_ptr,
    stride_z,
    stride_ids,
    stride_logprobs,
    stride_listed,
    num_columns,
    num_listed,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row of raw logits to its loss and, in place, its gradient.

    With P, Q the student's and teacher's mass off the list: dz_j = p_j - q_j on it and
    p_j (1 - Q / P) off it. Listed columns are taken out of the buffer for the passes over it.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride_z
    offs = tl.arange(0, BLOCK_V)
    # Buffer rows are padded to 64 columns; a bound that is such a multiple keeps loads wide.
    bound = (num_columns + 63) // 64 * 64
    neg_inf = float("-inf")

    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < num_listed
    given = tl.load(ids_ptr + row * stride_ids + offs_k, mask=mask_k, other=0)
    is_known = (given >= 0) & (given < num_columns)
    ids = given.to(tl.int32)
    is_valid = tl.sum((mask_k & (is_known == 0)).to(tl.int32)) == 0
    mask_k = mask_k & is_known
    log_q = tl.load(logprobs_ptr + row * stride_logprobs + offs_k, mask=mask_k, other=neg_inf)
    log_q = log_q.to(tl.float32)
    raw_listed = tl.load(listed_ptr + row * stride_listed + offs_k, mask=mask_k, other=0.0)
    listed = raw_listed * logit_scale
    if HAS_SOFTCAP:
        listed = cap_logits(raw_listed, logit_scale, softcap)
    listed = tl.where(mask_k, listed, neg_inf)
    m_listed = tl.max(listed)
    sum_listed = tl.sum(tl.exp(listed - m_listed))

    absent = tl.full([BLOCK_K], neg_inf, tl.float32).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + ids, absent, mask=mask_k)
    padding = bound - 64 + tl.arange(0, 64)
    tl.store(z_ptr + padding, neg_inf, mask=padding >= num_columns)
    # Other threads of the program read these columns next.
    tl.debug_barrier()

    m_tail = neg_inf
    top_start = 0
    sum_tail = 0.0
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        raw = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
        z = cap_logits(raw, logit_scale, softcap) if HAS_SOFTCAP else raw * logit_scale
        top = tl.max(z)
        top_start = tl.where(top > m_tail, start, top_start)
        m_new = tl.maximum(m_tail, top)
        m_safe = tl.where(m_new == neg_inf, 0.0, m_new)
        sum_tail = sum_tail * exp_scaled(m_tail - m_safe, 1.0) + tl.sum(exp_scaled(z - m_safe, 1.0))
        m_tail = m_new

    m = tl.maximum(m_listed, m_tail)
    lse = m + tl.log(sum_listed * tl.exp(m_listed - m) + sum_tail * tl.exp(m_tail - m))
    q = tl.exp(log_q)
    q_tail = 1.0 - tl.sum(q)
    q_tail = tl.where(q_tail < FLOOR, 0.0, q_tail)
    log_p = listed - lse
    loss = tl.sum(tl.where(q > 0.0, q * (log_q - log_p), 0.0))
    if q_tail > 0.0:
        loss += q_tail * (tl.log(q_tail) - (m_tail + tl.log(sum_tail) - lse))
    nan = float("nan")
    tl.store(loss_ptr + row, tl.where(is_valid, loss, nan))
    tl.store(mass_ptr + row, sum_listed * tl.exp(m_listed - lse))
    tl.store(lse_ptr + row, lse)

    # Only one block can hold the first largest column off the list.
    cols = top_start + offs
    raw = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
    z = cap_logits(raw, logit_scale, softcap) if HAS_SOFTCAP else raw * logit_scale
    first = tl.min(tl.where((z == m) & (cols < num_columns), cols, num_columns))
    argmax = tl.minimum(first, tl.min(tl.where(mask_k & (listed == m), ids, num_columns)))
    tl.store(argmax_ptr + row, tl.where(argmax < num_columns, argmax, 0).to(tl.int64))

    # exp(z - m_tail) times this is p - p Q / P; a list of the whole vocabulary leaves no tail.
    share = tl.where(sum_tail > 0.0, q_tail / sum_tail, 0.0)
    factor = tl.where(is_valid, (tl.exp(m_tail - lse) - share) * logit_scale, nan)
    m_safe = tl.where(m_tail == neg_inf, 0.0, m_tail)
    for start in range(0, num_columns, BLOCK_V):
        cols = start + offs
        raw = tl.load(z_ptr + cols, mask=cols < bound, other=neg_inf).to(tl.float32)
        z = cap_logits(raw, logit_scale, softcap) if HAS_SOFTCAP else raw * logit_scale
        if WITH_GRAD:
            dz = exp_scaled(z - m_safe, 1.0) * factor
            if HAS_SOFTCAP:
                dz *= cap_slope(raw, logit_scale, softcap)
            tl.store(z_ptr + cols, dz.to(z_ptr.dtype.element_ty), mask=cols < bound)
    if WITH_GRAD:
        dz = (tl.exp(log_p) - q) * logit_scale
        if HAS_SOFTCAP:
            dz *= cap_slope(raw_listed, logit_scale, softcap)
        dz = tl.where(is_valid, dz, nan)
        tl.debug_barrier()
        tl.store(z_ptr + ids, dz.to(z_ptr.dtype.element_ty), mask=mask_k)


def _triton_chunk(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    listed: Tensor,
    out: LinearTopKKL,
    options: RowOptions,
) -> None:
    """Fill `out` from raw logits [C, V]; with_grad, leave dz in their place. `listed` is room."""
    (num_rows, num_listed), num_columns = ids.shape, weight.shape[0]
    launch = row_launch(x.device)
    _listed_logits_kernel[(num_rows,)](
        x,
        weight,
        ids,
        listed,
        x.stride(0),
        weight.stride(0),
        ids.stride(0),
        listed.stride(0),
        num_columns,
        x.shape[1],
        num_listed,
        BLOCK_K=BLOCK_LISTED,
        BLOCK_H=BLOCK_H,
        num_warps=4,
    )
    _linear_kl_topk_rows_kernel[(num_rows,)](
        logits,
        listed,
        ids,
        logprobs,
        *out,
        logits.stride(0),
        ids.stride(0),
        logprobs.stride(0),
        listed.stride(0),
        num_columns,
        num_listed,
        options.logit_scale,
        1.0 if options.softcap is None else options.softcap,
        HAS_SOFTCAP=options.softcap is not None,
        WITH_GRAD=options.with_grad,
        FLOOR=TAIL_FLOOR,
        BLOCK_V=launch.block_v,
        BLOCK_K=triton.next_power_of_2(num_listed),
        num_warps=launch.num_warps,
    )


def _torch_chunk(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    out: LinearTopKKL,
    options: RowOptions,
) -> None:
    """Same as _triton_chunk, in plain PyTorch: what runs on a CPU."""
    dtype = accumulate_dtype(x.dtype)
    valid = ((ids >= 0) & (ids < weight.shape[0])).all(dim=1)
    ids = ids.long().clamp(0, weight.shape[0] - 1)
    raw = logits.to(dtype)
    if raw.dtype != logits.dtype:
        # [C, k, H] rows of the head against x, as exact as fp32 logits would be.
        raw.scatter_(1, ids, torch.linalg.vecdot(weight[ids].to(dtype), x[:, None].to(dtype)))
    z, slope = raw * options.logit_scale, options.logit_scale
    if options.softcap is not None:
        t = torch.tanh(z / options.softcap)
        z, slope = options.softcap * t, options.logit_scale * (1 - t * t)
    lse = torch.logsumexp(z, dim=1, keepdim=True)
    log_q = logprobs.to(dtype)
    q = log_q.exp()
    q_tail = 1 - q.sum(dim=1, keepdim=True)
    q_tail = torch.where(q_tail < TAIL_FLOOR, 0, q_tail)
    log_p = z.gather(1, ids) - lse
    tail = z.scatter(1, ids, float("-inf"))
    log_tail = torch.logsumexp(tail, dim=1, keepdim=True) - lse
    loss = (torch.special.xlogy(q, q) - q * log_p).sum(dim=1, keepdim=True)
    loss += torch.where(q_tail > 0, q_tail * (q_tail.log() - log_tail), 0)
    out.loss.copy_(torch.where(valid, loss[:, 0], float("nan")))
    out.mass.copy_(log_p.exp().sum(dim=1))
    out.lse.copy_(lse[:, 0])
    out.argmax.copy_(z.argmax(dim=1))
    if options.with_grad:
        # Subtracted as logarithms of the same column, so that an empty tail gives 0 and not 0 / 0.
        p_tail = (tail - lse).exp()
        dz = p_tail - q_tail * torch.where(p_tail > 0, (tail - lse - log_tail).exp(), 0)
        dz.scatter_(1, ids, log_p.exp() - q).mul_(slope)
        logits.copy_(dz.masked_fill_(~valid[:, None], float("nan")))


@dataclass(kw_only=True)
class TopKTeacherKL(FrozenHeadLoss):
    """linear_kl_topk over one batch."""

    weight: Tensor  # [V, H]
    ids: Tensor  # [N, k]
    logprobs: Tensor  # [N, k]
    kind: type = LinearTopKKL

    def _logits_of(self, chunk: Chunk) -> Tensor:
        return chunk.buffer("logits", self.weight.shape[0], self.x.dtype)

    def logits(self, chunk: Chunk) -> None:
        torch.mm(self.x[chunk.rows], self.weight.T, out=self._logits_of(chunk))

    def row_pass(self, chunk: Chunk) -> None:
        x, ids, logprobs = (each[chunk.rows] for each in (self.x, self.ids, self.logprobs))
        logits, out = self._logits_of(chunk), self.results(chunk)
        if self.as_triton:
            listed = chunk.buffer("listed", ids.shape[1], torch.float32)
            _triton_chunk(x, self.weight, ids, logprobs, logits, listed, out, self.options)
        else:
            _torch_chunk(x, self.weight, ids, logprobs, logits, out, self.options)

    def gradient(self, chunk: Chunk) -> None:
        torch.mm(self._logits_of(chunk), self.weight, out=self.dx[chunk.rows])


def linear_kl_topk(
    x: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> LinearTopKKL:
    """Return KL from a teacher known by its k likeliest columns.

    With q over the listed columns, Q = 1 - sum q, p = softmax of the student's logits and P its
    mass off the list: `loss = sum q log(q / p) + Q log(Q / P)`, a lower bound of the full KL that
    is zero only where the k + 1 buckets agree; Q under TAIL_FLOOR counts as zero. Differentiable
    with respect to x alone. No final state of the teacher is needed, and nothing here waits for the
    GPU.

    Args:
        x: [N, H] student rows, normalised as the head expects; fp32 or fp64 on CPUs, bf16 on GPUs.
        weight: [V, H] head, same dtype; gets no gradient.
        topk_ids: [N, k] int32 or int64, different columns in each row; a row with an id outside
            [0, V) is poisoned: its loss and gradient are NaN.
        topk_logprobs: [N, k] floating, the teacher's log-probabilities of the full distribution.
        logit_scale: factor on the logits, before the soft-cap.
        softcap: bound of the tanh soft-cap, or None.
        chunk_rows: most rows of a chunk, as in linear_ce.
        vocab_size: rows of weight that take part, where it is padded beyond the vocabulary.
        implementation: "triton", "reference" (the same algorithm in plain PyTorch), or None to
            choose by device.

    Returns:
        LinearTopKKL, four tensors [N].

    Raises:
        ValueError: shapes, dtypes or an implementation that do not go together.
    """
    weight = weight[:vocab_size].detach()
    as_triton = use_triton(x, implementation)
    check_head(x, weight, as_triton=as_triton)
    shape = topk_ids.shape
    if len(shape) != 2 or shape[0] != x.shape[0] or topk_logprobs.shape != shape or not shape[1]:
        raise ValueError(
            f"topk_ids are {tuple(shape)}, topk_logprobs {tuple(topk_logprobs.shape)}; "
            f"both must be [{x.shape[0]}, k] with k at least 1"
        )
    options = row_options(x, logit_scale=logit_scale, softcap=softcap)
    loss = TopKTeacherKL(
        x=x,
        weight=weight,
        ids=topk_ids.contiguous(),
        logprobs=topk_logprobs.detach().contiguous(),
        options=options,
        as_triton=as_triton,
    )
    return run_loss(loss, chunk_rows=chunk_rows)
