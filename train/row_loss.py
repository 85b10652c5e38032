"""What each labelled row loses: cross-entropy, or divergences from the stored teacher.

One choice of loss head a run; all of them share the frozen output weight and never hold the logits
of more than a chunk of rows.

Letters: M labelled rows, H hidden.
"""

from typing import NamedTuple

import torch

from dflash_offline.kernels.linear_kl import linear_kl
from dflash_offline.kernels.linear_kl_topk import linear_kl_topk
from dflash_offline.train.objective import Objective
from dflash_offline.train.target_head import TargetHead


class RowLosses(NamedTuple):
    """Per labelled row, [M] each; only `loss` carries a gradient."""

    loss: torch.Tensor  # what is minimised
    nll: torch.Tensor  # -log p(label), which D-PACE weighs by; unused otherwise
    correct: torch.Tensor  # bool, the most likely token is the label


class BestTokens(NamedTuple):
    """A teacher known by its k best tokens at every labelled row."""

    ids: torch.Tensor  # int32 [M, k], the likeliest first
    logprobs: torch.Tensor  # float32 [M, k]


def row_losses(
    head: TargetHead,
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | BestTokens | None,
    objective: Objective,
) -> RowLosses:
    """Return the losses of drafter rows.

    Args:
        head: the target's output weight, scale and soft-cap.
        states: [M, H] drafter rows after the final norm.
        labels: int64 [M], the data's tokens.
        teacher: the target's states [M, H] that predict the same tokens, or its best tokens; None
            where neither labels nor terms need the target.
        objective: terms, and whether labels are the target's best tokens.
    """
    terms = objective.terms
    if objective.teacher_labels and isinstance(teacher, BestTokens):
        labels = teacher.ids[:, 0].long()
    elif objective.finds_best_tokens:
        assert teacher is not None, "labels of the teacher need its states"
        labels = head.best_tokens(teacher)
    if not terms.need_teacher:
        result = head.cross_entropy(states, labels)
        return RowLosses(terms.ce * result.nll, result.nll, result.argmax == labels)
    assert teacher is not None, "divergences need the teacher"
    if isinstance(teacher, BestTokens):
        return _from_best_tokens(head, states, labels, teacher, objective)
    result = linear_kl(
        states,
        head.weight,
        teacher,
        labels=labels if objective.needs_label else None,
        kl_weight=terms.kl,
        reverse_kl_weight=terms.rkl,
        tv_weight=terms.tv,
        ce_weight=terms.ce,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        chunk_rows=head.chunk_rows,
    )
    if objective.teacher_labels:
        # Scale and soft-cap are monotonic: this is best_tokens without its product.
        labels = result.teacher_argmax
    return RowLosses(result.loss, result.nll, result.argmax == labels)


def _from_best_tokens(
    head: TargetHead,
    states: torch.Tensor,
    labels: torch.Tensor,
    teacher: BestTokens,
    objective: Objective,
) -> RowLosses:
    """Return the KL over the teacher's tokens and the rest, with cross-entropy where it counts."""
    terms = objective.terms
    divergence = linear_kl_topk(
        states,
        head.weight,
        teacher.ids,
        teacher.logprobs,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        chunk_rows=head.chunk_rows,
    )
    loss, correct = terms.kl * divergence.loss, divergence.argmax == labels
    if not objective.needs_label:
        return RowLosses(loss, torch.zeros_like(loss), correct)
    # D-PACE alone needs no gradient of it.
    hard = head.cross_entropy(states if terms.ce else states.detach(), labels)
    return RowLosses(loss + terms.ce * hard.nll, hard.nll, correct)
