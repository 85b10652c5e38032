"""Muon: momentum made orthogonal, for matrices, with steps of the size that AdamW's have.

The arithmetic of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, on fp32 masters, and
with a step that the device can decide to leave out.
"""

import torch

MOMENTUM = 0.95
# Newton-Schulz iterations and their quintic's coefficients, as published with the method.
_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# An orthogonal matrix has elements of size 1 / sqrt(longer side); AdamW's updates are about 0.2.
_RMS = 0.2


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T; singular values end between 0.7 and 1.2.

    On a GPU in bfloat16, whose rounding the iteration forgives.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def follow(
    gradient: torch.Tensor, momentum: torch.Tensor, *, skipped: torch.Tensor
) -> torch.Tensor:
    """Move the momentum, in place, and return what is to be made orthogonal.

    Args:
        gradient, momentum: fp32, a matrix or some of its rows.
        skipped: [], 1.0 leaves everything as it is, whatever the gradient holds; no host wait.
    """
    gradient = torch.where(skipped > 0, torch.zeros_like(gradient), gradient)
    momentum.lerp_(gradient, ((1.0 - MOMENTUM) * (1.0 - skipped)).to(momentum.dtype))
    return gradient.lerp(momentum, MOMENTUM)


def move(
    matrix: torch.Tensor,
    direction: torch.Tensor,
    *,
    longer: int,
    lr: float,
    weight_decay: float,
    skipped: torch.Tensor,
) -> None:
    """Update a matrix in place.

    Args:
        matrix: fp32, a matrix or some of its rows.
        direction: of the same shape, orthogonal where it is whole.
        longer: longer side of the whole matrix.
        lr: learning rate, of the size that AdamW wants.
        weight_decay: decoupled, in units of the learning rate.
        skipped: as in `follow`.
    """
    kept = 1.0 - skipped
    matrix.mul_(1.0 - lr * weight_decay * kept)
    matrix.sub_(direction.to(matrix.dtype) * (lr * _RMS * longer**0.5 * kept))
