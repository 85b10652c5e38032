"""What each labelled row loses: cross-entropy, or divergences from the stored teacher.

One choice of loss head a run; all of them share the frozen output weight and never hold the logits
of more than a chunk of rows.

Letters: M labelled rows, H hidden.
"""

from typing import NamedTuple

import torch

from dflash_offline.kernels.linear_kl import linear_kl
from dflash_offline.train.objective import Objective
from dflash_offline.train.target_head import TargetHead


class RowLosses(NamedTuple):
    """Per labelled row, [M] each; only `loss` carries a gradient."""

    loss: torch.Tensor  # what is minimised
    nll: torch.Tensor  # -log p(label), which D-PACE weighs by; unused otherwise
    correct: torch.Tensor  # bool, the most likely token is the label


def row_losses(
    head: TargetHead,
    states: torch.Tensor,
    labels: torch.Tensor,
    final: torch.Tensor | None,
    objective: Objective,
) -> RowLosses:
    """Return the losses of drafter rows.

    Args:
        head: the target's output weight, scale and soft-cap.
        states: [M, H] drafter rows after the final norm.
        labels: int64 [M], the data's tokens.
        final: [M, H], the target's states that predict the same tokens; None where neither labels
            nor terms need the target.
        objective: terms, and whether labels are the target's best tokens.
    """
    terms = objective.terms
    if objective.teacher_labels and objective.needs_label:
        assert final is not None, "labels of the teacher need its states"
        labels = head.best_tokens(final)
    if not terms.need_teacher:
        result = head.cross_entropy(states, labels)
        return RowLosses(terms.ce * result.nll, result.nll, result.argmax == labels)
    assert final is not None, "divergences need the teacher's states"
    result = linear_kl(
        states,
        head.weight,
        final,
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
