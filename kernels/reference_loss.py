"""Plain-PyTorch definitions of the loss heads: what linear_ce and linear_kl compute.

Full logits, autograd, no chunks: for reading and for tests. Arithmetic is fp64 for fp64 inputs and
fp32 for everything else. Letters: N rows, H hidden, V vocabulary. Formulas: docs/kernels.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A stored teacher's mass off its list is one minus a sum of fp32 exponentials: less is rounding.
TAIL_FLOOR = 1e-6


class LinearCE(NamedTuple):
    """Per-row results of linear_ce, each [N]; only nll carries a gradient.

    A row whose label lies outside [0, V) is poisoned: nll, label_prob and the gradient are NaN and
    rank is V. Masking it with torch.where gives it an exact zero gradient.
    """

    nll: Tensor  # -log p(label), fp32 (fp64 for fp64 inputs)
    lse: Tensor  # log of the sum of exponentials of the row's logits
    argmax: Tensor  # int64, first column of the largest logit
    rank: Tensor  # int64, columns ahead of the label in a stable descending sort; 0 is the best
    entropy: Tensor  # of the row's distribution, nats
    label_prob: Tensor  # p(label)


class LinearKL(NamedTuple):
    """Per-row results of linear_kl, each [N]; only loss carries a gradient.

    p is the student's distribution, q the teacher's, natural logarithms. The row's acceptance under
    speculative sampling is 1 - tv. A row whose label lies outside [0, V) has NaN loss, nll and
    gradient.
    """

    loss: Tensor  # kl_weight kl + reverse_kl_weight reverse_kl + tv_weight tv + ce_weight nll
    kl: Tensor  # sum q log(q / p)
    reverse_kl: Tensor  # sum p log(p / q)
    tv: Tensor  # sum |p - q| / 2
    nll: Tensor  # -log p(label); zero where no labels were given
    entropy: Tensor  # of p
    argmax: Tensor  # int64, of p
    teacher_argmax: Tensor  # int64, of q
    teacher_prob: Tensor  # the largest q


class LinearTopKKL(NamedTuple):
    """Per-row results of linear_kl_topk, each [N]; only loss carries a gradient."""

    loss: Tensor  # KL between the teacher's k + 1 buckets and the student's
    mass: Tensor  # student's probability of the k columns together
    lse: Tensor  # log of the sum of exponentials of the student's logits
    argmax: Tensor  # int64, of the student


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that row statistics of `dtype` inputs are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def head_logits(
    x: Tensor, weight: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Return softcap * tanh(logit_scale * x W^T / softcap) as [N, V] in the accumulation dtype."""
    dtype = accumulate_dtype(x.dtype)
    logits = x.to(dtype) @ weight.to(dtype).T * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class _Poison(torch.autograd.Function):
    """Make rows that are not valid NaN, and their gradient too unless it is masked out upstream."""

    @staticmethod
    def forward(ctx, values: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(valid)
        return torch.where(valid, values, float("nan"))

    @staticmethod
    def backward(ctx, grad: Tensor):
        (valid,) = ctx.saved_tensors
        return torch.where(valid | (grad == 0), grad, float("nan")), None


def linear_ce(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    vocab_size: int | None = None,
) -> LinearCE:
    """Return cross-entropy and row statistics of `x @ weight.T`; see linear_ce.linear_ce.

    `chunk_rows` is accepted for the common signature and has no effect.
    """
    del chunk_rows
    weight = weight[:vocab_size].detach()
    logits = head_logits(x, weight, logit_scale=logit_scale, softcap=softcap)  # [N, V]
    num_columns = weight.shape[0]
    valid = (labels >= 0) & (labels < num_columns)
    column = labels.clamp(0, num_columns - 1)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    label_log_prob = log_probs.gather(1, column)[:, 0]
    nll = _Poison.apply(-label_log_prob, valid)

    with torch.no_grad():
        label_logit = logits.gather(1, column)
        is_ahead = logits > label_logit
        is_tied = (logits == label_logit) & (
            torch.arange(num_columns, device=x.device)[None] < column
        )
        rank = (is_ahead | is_tied).sum(dim=1)
        probs = log_probs.exp()
        return LinearCE(
            nll=nll,
            lse=torch.logsumexp(logits, dim=-1),
            argmax=logits.argmax(dim=-1),
            rank=torch.where(valid, rank, num_columns),
            entropy=-torch.special.xlogy(probs, probs).sum(dim=-1),
            label_prob=torch.where(valid, label_log_prob.exp(), float("nan")),
        )


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
) -> LinearKL:
    """Return divergences between two states' distributions; see linear_kl.linear_kl.

    `chunk_rows` is accepted for the common signature and has no effect.
    """
    del chunk_rows
    weight = weight[:vocab_size].detach()
    logits = head_logits(x, weight, logit_scale=logit_scale, softcap=softcap)  # [N, V]
    log_p = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        teacher = head_logits(teacher_x, weight, logit_scale=logit_scale, softcap=softcap)  # [N, V]
        log_q = torch.log_softmax(teacher, dim=-1)
        q = log_q.exp()
    p = log_p.exp()
    kl = (q * (log_q - log_p)).sum(dim=-1)
    reverse_kl = (p * (log_p - log_q)).sum(dim=-1)
    tv = (p - q).abs().sum(dim=-1) / 2
    nll = torch.zeros_like(kl)
    if labels is not None:
        valid = (labels >= 0) & (labels < weight.shape[0])
        column = labels.clamp(0, weight.shape[0] - 1)[:, None]
        nll = _Poison.apply(-log_p.gather(1, column)[:, 0], valid)
    # A weight of zero means absent: zero times an infinite divergence would be NaN.
    terms = [(kl_weight, kl), (reverse_kl_weight, reverse_kl), (tv_weight, tv), (ce_weight, nll)]
    loss = sum((weight * term for weight, term in terms if weight), torch.zeros_like(kl))
    if labels is not None:
        loss = _Poison.apply(loss, valid)
    return LinearKL(
        loss=loss,
        kl=kl.detach(),
        reverse_kl=reverse_kl.detach(),
        tv=tv.detach(),
        nll=nll.detach(),
        entropy=-(p * log_p).sum(dim=-1).detach(),
        argmax=logits.argmax(dim=-1),
        teacher_argmax=teacher.argmax(dim=-1),
        teacher_prob=q.amax(dim=-1),
    )


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
) -> LinearTopKKL:
    """Return KL against a stored top-k teacher; see linear_kl_topk.linear_kl_topk.

    `chunk_rows` is accepted for the common signature and has no effect.
    """
    del chunk_rows
    weight = weight[:vocab_size].detach()
    logits = head_logits(x, weight, logit_scale=logit_scale, softcap=softcap)  # [N, V]
    valid = ((topk_ids >= 0) & (topk_ids < weight.shape[0])).all(dim=-1)
    ids = topk_ids.long().clamp(0, weight.shape[0] - 1)
    log_q = topk_logprobs.to(logits.dtype)  # [N, k]
    q = log_q.exp()
    log_p = torch.log_softmax(logits, dim=-1)
    log_p_listed = log_p.gather(1, ids)  # [N, k]
    # The tail is summed over its own columns: one minus the listed mass would cancel.
    log_p_tail = torch.logsumexp(log_p.scatter(1, ids, float("-inf")), dim=-1)
    q_tail = 1 - q.sum(dim=-1)
    q_tail = torch.where(q_tail < TAIL_FLOOR, 0, q_tail)
    listed = torch.special.xlogy(q, q) - q * log_p_listed
    # A list of the whole vocabulary leaves an empty tail, whose log is -inf.
    log_p_tail = torch.where(q_tail > 0, log_p_tail, 0)
    tail = torch.special.xlogy(q_tail, q_tail) - q_tail * log_p_tail
    return LinearTopKKL(
        loss=_Poison.apply(listed.sum(dim=-1) + tail, valid),
        mass=log_p_listed.exp().sum(dim=-1).detach(),
        lse=torch.logsumexp(logits, dim=-1).detach(),
        argmax=logits.argmax(dim=-1),
    )
