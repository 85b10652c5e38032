"""Plain-PyTorch definitions of the loss heads: what linear_ce and linear_kl compute.

Full logits, autograd, no chunks: for reading and for tests. Arithmetic is fp64 for fp64 inputs and
fp32 for everything else. Letters: N rows, H hidden, V vocabulary. Formulas: docs/kernels.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
