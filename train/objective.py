"""What a block's slots count for: position weights, the loss sum, and joint acceptance.

Pure functions of tensors; nothing here divides by a local count. A pass returns sums, and the
step divides once by the sum of the weights over all passes, accumulation parts and ranks.

Letters: A anchors, P predicting slots of a block (index j from 0), M labelled rows.
"""

import itertools
from dataclasses import dataclass

import torch

from dflash_offline.train.loss_spec import (
    CROSS_ENTROPY,
    DECAY,
    DPACE,
    DPACE_ALPHA,
    LossSpec,
    Terms,
)

# Block size to decay constant, as the DFlash authors give them.
_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))


def decay_gamma(block_size: int) -> float:
    """Return the decay constant for a block size.

    4 for 8, 5 for 10 and 7 for 16 slots, linear between those, and in proportion to the block
    size below 8 and above 16.
    """
    (first, first_gamma), (last, last_gamma) = _GAMMAS[0], _GAMMAS[-1]
    if block_size <= first:
        return first_gamma * block_size / first
    if block_size >= last:
        return last_gamma * block_size / last
    for (left, low), (right, high) in itertools.pairwise(_GAMMAS):
        if block_size <= right:
            return low + (high - low) * (block_size - left) / (right - left)
    raise AssertionError("unreachable: the last bound was tested")


def decay_weights(valid: torch.Tensor, gamma: float, dtype: torch.dtype) -> torch.Tensor:
    """Return exp(-j / gamma) where a slot is labelled, 0 elsewhere.

    In the 1+N layout slot k has j = k - 1.

    Args:
        valid: bool [A, P].
        gamma: decay constant in slots, positive.
        dtype: of the result.

    Returns:
        [A, P].
    """
    steps_P = torch.arange(valid.shape[1], device=valid.device, dtype=dtype)
    return torch.exp(-steps_P / gamma) * valid.to(dtype)


def dpace_weights(
    nll: torch.Tensor, valid: torch.Tensor, alpha: float = DPACE_ALPHA
) -> torch.Tensor:
    """Return the D-PACE weights: how much of the expected acceptance hangs on each slot.

    With q_j = exp(-nll_j) and q̃_j = (1 - a)·q_j + a, a = alpha (1 where unlabelled),
    w_j = Σ_{m ≥ j} Π_{i ≤ m} q̃_i over labelled m, and 0 where slot j is unlabelled. Detached.

    Args:
        nll: [A, P] negative log-likelihoods; anything where unlabelled.
        valid: bool [A, P].
        alpha: smoothing in [0, 1]; 1 makes every slot count the labelled slots from it on.

    Returns:
        [A, P] in the dtype of `nll`.
    """
    with torch.no_grad():
        smoothed_AP = (1 - alpha) * torch.exp(-nll) + alpha
        prefix_AP = torch.where(valid, smoothed_AP, 1.0).cumprod(dim=1)
        terms_AP = torch.where(valid, prefix_AP, 0.0)
        suffix_AP = terms_AP.flip(1).cumsum(dim=1).flip(1)
        return torch.where(valid, suffix_AP, 0.0)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a slot minimises, and which weight it gets."""

    loss: str  # DECAY or DPACE
    gamma: float
    alpha: float = DPACE_ALPHA
    terms: Terms = CROSS_ENTROPY
    teacher_labels: bool = False  # labels are the target's best tokens, not the data's
    noise: float = 0.0  # largest size of the uniform noise on the context's states
    num_topk: int = 0  # the teacher is known by so many best tokens; 0: by its states

    @property
    def needs_label(self) -> bool:
        """Whether the gradient depends on the labels."""
        return bool(self.terms.ce) or self.loss == DPACE

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's states, or its best tokens, take part."""
        return self.teacher_labels or self.terms.need_teacher

    @property
    def needs_states(self) -> bool:
        """Whether the target's states take part."""
        return self.needs_teacher and not self.num_topk

    @property
    def makes_target_logits(self) -> bool:
        """Whether the target's logits are made beside the drafter's."""
        return self.terms.need_teacher and not self.num_topk

    @property
    def finds_best_tokens(self) -> bool:
        """Whether labels come from a product of the target's states with its head."""
        return self.teacher_labels and self.needs_label and not self.num_topk

    def weights(self, nll: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return the detached weights [A, P] for negative log-likelihoods [A, P]."""
        if self.loss == DPACE:
            return dpace_weights(nll, valid, self.alpha)
        assert self.loss == DECAY, f"loss is {self.loss}"
        return decay_weights(valid, self.gamma, nll.dtype)


def objective_of(
    spec: LossSpec, *, labels: str, block_size: int, noise: float = 0.0, num_topk: int = 0
) -> Objective:
    """Return the objective that `--loss`, `--labels` and `--noise` ask for.

    Args:
        num_topk: best tokens that the stores keep of their teacher, 0 where they keep its states.
    """
    has_teacher = labels == "teacher" or spec.terms.need_teacher
    return Objective(
        loss=spec.weights,
        gamma=spec.gamma or decay_gamma(block_size),
        alpha=spec.alpha,
        terms=spec.terms,
        teacher_labels=labels == "teacher",
        noise=noise,
        num_topk=num_topk if has_teacher else 0,
    )


@dataclass(frozen=True, kw_only=True)
class PassSums:
    """Sums over one pass, all on the device; adding two gives those of both."""

    loss: torch.Tensor  # [], Σ w·loss, differentiable
    weight: torch.Tensor  # [], Σ w
    blocks: torch.Tensor  # [], number of anchors
    accepted: torch.Tensor  # [P], blocks whose slots up to and including j are all right

    def detached(self) -> "PassSums":
        """Return the same sums without their graph."""
        return PassSums(
            loss=self.loss.detach(),
            weight=self.weight,
            blocks=self.blocks,
            accepted=self.accepted,
        )

    def flat(self) -> torch.Tensor:
        """Return [3 + P]: loss, weight, blocks, accepted; float64 so that counts stay exact."""
        head = torch.stack([self.loss.detach(), self.weight, self.blocks])
        return torch.cat([head.double(), self.accepted.double()])


def scatter_rows(values: torch.Tensor, rows: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Put per-row values [M] on the [A, B] grid of all block rows, 0 elsewhere, differentiably."""
    flat = values.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, rows, values).view(shape)


def pass_sums(
    objective: Objective,
    loss: torch.Tensor,
    nll: torch.Tensor,
    correct: torch.Tensor,
    valid: torch.Tensor,
) -> PassSums:
    """Weigh the losses of a pass and count joint greedy acceptance.

    Args:
        objective: which weights.
        loss: [A, P] differentiable losses, 0 where unlabelled.
        nll: [A, P] negative log-likelihoods of the labels; anything where unlabelled.
        correct: bool [A, P], the most likely token is the label; False where unlabelled.
        valid: bool [A, P], the slot has a label.
    """
    weights_AP = objective.weights(nll, valid)
    accepted_AP = (correct & valid).long().cumprod(dim=1)
    return PassSums(
        loss=(weights_AP * loss).sum(),
        weight=weights_AP.sum(),
        blocks=torch.full_like(weights_AP[:0].sum(), valid.shape[0]),
        accepted=accepted_AP.sum(dim=0),
    )
