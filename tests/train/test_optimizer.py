"""Updates with the division, the clip and the skip on the device, and who owns what."""

import itertools

import pytest
import torch
from torch import nn

from dflash_offline.train.flat import Plan
from dflash_offline.train.muon import orthogonal
from dflash_offline.train.optimizer import Optimizer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(3, generator=generator))


def give_gradients(model: nn.Module, scale: float = 1.0, *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
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
    norms = []
    for step in range(4):
        give_gradients(ours, 1.5 * (step + 1), seed=step)
        norm, skipped = optimizer.step(lr=0.01, weight_sum=torch.tensor(5.0), clip=2.0)
        give_gradients(theirs, 0.3 * (step + 1), seed=step)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)
        reference.step()
        norms.append(expected)
        torch.testing.assert_close(norm, expected)
        assert skipped == 0
    assert min(norms) < 2.0 < max(norms), "all are clipped, or none"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("gradient", "weight"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (0.0, 0.0)],
    ids=["nan", "inf", "no-anchor"],
)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(gradient, weight, kind):
    model = Model()
    optimizer = Optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), kind=kind, ema=0.9)
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
    saved = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    theirs.load(saved.__getitem__)
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_equals_torch(weight_decay):
    ours, theirs = Model(), Model()
    optimizer = Optimizer(ours, weight_decay=weight_decay, betas=(0.9, 0.95), kind="muon")
    muon = torch.optim.Muon(
        [theirs.matrix], lr=0.01, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW([theirs.vector], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        give_gradients(ours, 10.0 * (step + 1), seed=step)
        optimizer.step(lr=0.01, weight_sum=torch.tensor(1.0), clip=1e9)
        for parameter, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            parameter.grad = other.grad.clone()
        muon.step()
        adam.step()
    # Theirs iterates in bfloat16, ours in float32 on a CPU: a step is 0.4 * 0.01 long.
    torch.testing.assert_close(ours.matrix, theirs.matrix, rtol=0, atol=4 * 0.004 * 2**-6)
    torch.testing.assert_close(ours.vector, theirs.vector)
    assert set(optimizer.tensors()) == {
        *("step", "master.matrix", "momentum.matrix"),
        *("master.vector", "exp_avg.vector", "exp_avg_sq.vector"),
    }


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (63, 10)], ids=str)
def test_orthogonal(shape):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.25
    # The same directions: every singular value of the product with U V^T's parts is positive.
    assert torch.diagonal(left.T @ found @ right.T).min() > 0.3


def test_the_running_average():
    model = Model()
    optimizer = Optimizer(model, weight_decay=0.0, betas=(0.9, 0.95), ema=0.5)
    expected = model.matrix.detach().clone()
    for step in range(1, 20):
        give_gradients(model, 1.0 if step % 2 else -0.5)
        optimizer.step(lr=0.1, weight_sum=torch.tensor(1.0), clip=1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.matrix.detach()
    masters = model.matrix.detach().clone()
    assert not torch.allclose(masters, expected, atol=1e-3)
    with optimizer.averaged():
        torch.testing.assert_close(model.matrix.detach(), expected)
    assert torch.equal(model.matrix.detach(), masters)
    give_gradients(model, float("nan"))
    optimizer.step(lr=0.1, weight_sum=torch.tensor(1.0), clip=1.0)
    with optimizer.averaged():
        torch.testing.assert_close(model.matrix.detach(), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_parameters_are_owned_whole_and_do_not_overlap(world_size):
    sizes = {"fc": 5000, "norm": 7, **{f"mlp{i}": 1290 for i in range(9)}, "q": 400, "k": 129}
    plan = Plan.of(sizes, world_size)
    taken = sorted((plan.start[name], plan.start[name] + size) for name, size in sizes.items())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
    for name, size in sizes.items():
        owner = plan.owner[name]
        assert plan.start[name] >= owner * plan.shard
        assert plan.start[name] + size <= (owner + 1) * plan.shard
        assert plan.start[name] % 128 == 0
    # Nobody holds much more than his share, unless one parameter alone is larger than that.
    assert plan.shard <= max(5120, 1.34 * sum(sizes.values()) / world_size + 1408)
