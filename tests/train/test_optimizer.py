"""AdamW with the division, the clip and the skip on the device."""

import pytest
import torch
from torch import nn

from dflash_offline.train.optimizer import Optimizer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(3, generator=generator))


def give_gradients(model: nn.Module, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


def test_equals_torch_after_division_and_clip():
    ours, theirs = Model(), Model()
    optimizer = Optimizer(ours, weight_decay=0.1, betas=(0.9, 0.95))
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.matrix], "weight_decay": 0.1},
            {"params": [theirs.vector], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for parameter in theirs.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(4):
        give_gradients(ours, 10.0 * (step + 1))
        norm, skipped = optimizer.step(lr=0.01, weight_sum=torch.tensor(5.0), clip=1.0)
        give_gradients(theirs, 2.0 * (step + 1))
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        torch.testing.assert_close(norm, expected)
        assert skipped == 0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("gradient", "weight"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (0.0, 0.0)],
    ids=["nan", "inf", "no-anchor"],
)
def test_a_step_that_is_not_finite_changes_nothing(gradient, weight):
    model = Model()
    optimizer = Optimizer(model, weight_decay=0.1, betas=(0.9, 0.95))
    give_gradients(model)
    optimizer.step(lr=0.01, weight_sum=torch.tensor(1.0), clip=1.0)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for parameter in model.parameters():
        parameter.grad.fill_(gradient)
    _, skipped = optimizer.step(lr=0.01, weight_sum=torch.tensor(weight), clip=1.0)
    assert skipped == 1
    after = optimizer.tensors()
    assert before["step"] == 1
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_state_round_trip():
    first, second = Model(), Model()
    ours = Optimizer(first, weight_decay=0.0, betas=(0.9, 0.95))
    give_gradients(first)
    ours.step(lr=0.01, weight_sum=torch.tensor(1.0), clip=1.0)
    theirs = Optimizer(second, weight_decay=0.0, betas=(0.9, 0.95))
    theirs.load({name: tensor.clone() for name, tensor in ours.tensors().items()})
    for model, optimizer in ((first, ours), (second, theirs)):
        give_gradients(model, -2.0)
        optimizer.step(lr=0.01, weight_sum=torch.tensor(1.0), clip=1.0)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert set(ours.tensors()) == {"step"} | {
        f"{kind}.{name}"
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for name in ("matrix", "vector")
    }
