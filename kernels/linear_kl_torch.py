"""The row pass of linear_kl in plain PyTorch: what runs on a CPU.

Same algorithm as the Triton kernel in linear_kl, formulas in docs/kernels.md. Letters: C rows of a
chunk, R rows of a block of it, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.linear_ce_torch import CPU_BLOCK_ELEMENTS
from dflash_offline.kernels.reference_loss import LinearKL, accumulate_dtype


class KLOptions(NamedTuple):
    """What the row pass needs to know besides tensors."""

    with_grad: bool
    kl_weight: float
    reverse_kl_weight: float
    tv_weight: float
    ce_weight: float
    logit_scale: float
    softcap: float | None


def _cap(z: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    return z * logit_scale if softcap is None else softcap * torch.tanh(z * logit_scale / softcap)


def _gradient(
    p: Tensor, r: Tensor, difference: Tensor, raw: Tensor, column: Tensor | None, options: KLOptions
) -> Tensor:
    """Return dz [R, V] of the weighted sum of divergences."""
    dz = options.kl_weight * difference
    if options.reverse_kl_weight:
        dz += options.reverse_kl_weight * p * (r - (p * r).sum(dim=1, keepdim=True))
    if options.tv_weight:
        sign = r.sign()
        dz += options.tv_weight / 2 * p * (sign - (p * sign).sum(dim=1, keepdim=True))
    if options.ce_weight:
        others = p.scatter(1, column, 0)
        dz += options.ce_weight * others.scatter(1, column, -others.sum(dim=1, keepdim=True))
    dz *= options.logit_scale
    if options.softcap is not None:
        dz *= 1 - torch.tanh(raw * options.logit_scale / options.softcap) ** 2
    return dz


def _rows(
    raw_t: Tensor, raw_d: Tensor, labels: Tensor | None, out: LinearKL, options: KLOptions
) -> Tensor | None:
    """Fill `out` from raw teacher logits and differences [R, V]; return dz where it is wanted."""
    raw_s = raw_t + raw_d
    t = _cap(raw_t, options.logit_scale, options.softcap)
    s = _cap(raw_s, options.logit_scale, options.softcap)
    d = raw_d * options.logit_scale if options.softcap is None else s - t
    lse_t = torch.logsumexp(t, dim=1, keepdim=True)
    lse_s = torch.logsumexp(s, dim=1, keepdim=True)
    r = d - (lse_s - lse_t)
    log_p = s - lse_s
    q, p = (t - lse_t).exp(), log_p.exp()
    # exp(r) may overflow where q underflows; only near-equal probabilities need it.
    is_near = r.abs() < 0.25
    difference = torch.where(is_near, q * torch.expm1(r.clamp(-1, 1)), p - q)
    out.kl.copy_((difference - q * r).sum(dim=1))
    out.reverse_kl.copy_((p * r - difference).sum(dim=1))
    out.tv.copy_(difference.abs().sum(dim=1) / 2)
    out.entropy.copy_(-(p * log_p).sum(dim=1))
    out.argmax.copy_(s.argmax(dim=1))
    out.teacher_argmax.copy_(t.argmax(dim=1))
    out.teacher_prob.copy_(q.amax(dim=1))
    out.loss.copy_(options.kl_weight * out.kl + options.tv_weight * out.tv)
    if options.reverse_kl_weight:
        out.loss.add_(out.reverse_kl, alpha=options.reverse_kl_weight)
    column = valid = None
    if labels is None:
        out.nll.zero_()
    else:
        valid = (labels >= 0) & (labels < t.shape[1])
        column = labels.clamp(0, t.shape[1] - 1)[:, None]
        is_best = s.gather(1, column) == s.amax(dim=1, keepdim=True)
        others = p.scatter(1, column, 0).sum(dim=1, keepdim=True)
        # log1p keeps the loss of a row whose label has almost all of the mass.
        certain = torch.log1p(others / p.gather(1, column))
        nll = torch.where(is_best, certain, -log_p.gather(1, column))[:, 0]
        out.nll.copy_(torch.where(valid, nll, float("nan")))
        out.loss.copy_(torch.where(valid, out.loss + options.ce_weight * out.nll, float("nan")))
    if not options.with_grad:
        return None
    dz = _gradient(p, r, difference, raw_s, column, options)
    return dz if valid is None else dz.masked_fill_(~valid[:, None], float("nan"))


def torch_chunk(
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
    dtype = accumulate_dtype(x.dtype)
    raw_label = None
    if labels is not None and delta.dtype != dtype:
        w_label = weight[labels.clamp(0, weight.shape[0] - 1)].to(dtype)
        raw_label = torch.linalg.vecdot(torch.stack((x, teacher_x)).to(dtype), w_label[None])
    block = max(1, CPU_BLOCK_ELEMENTS // weight.shape[0])
    for start in range(0, x.shape[0], block):
        rows = slice(start, start + block)
        raw_t, raw_d = logits[rows].to(dtype), delta[rows].to(dtype)
        chunk_labels = None if labels is None else labels[rows]
        if raw_label is not None:
            column = chunk_labels.clamp(0, weight.shape[0] - 1)[:, None]
            student, teacher = raw_label[:, rows, None]
            raw_t.scatter_(1, column, teacher)
            raw_d.scatter_(1, column, student - teacher)
        dz = _rows(raw_t, raw_d, chunk_labels, LinearKL(*(o[rows] for o in out)), options)
        if dz is not None:
            delta[rows] = dz
