"""Truth tables of the position weights and of joint acceptance."""

import math

import pytest
import torch

from dflash_offline.train.loss_spec import DECAY, DPACE
from dflash_offline.train.objective import (
    Objective,
    PassSums,
    decay_gamma,
    decay_weights,
    dpace_weights,
    pass_sums,
    scatter_rows,
)


@pytest.mark.parametrize(
    ("block_size", "gamma"),
    [(16, 7.0), (10, 5.0), (8, 4.0), (9, 4.5), (13, 6.0), (4, 2.0), (32, 14.0)],
)
def test_decay_gamma(block_size, gamma):
    assert decay_gamma(block_size) == pytest.approx(gamma)


def test_decay_weights_of_the_reference():
    valid = torch.ones(1, 15, dtype=torch.bool)
    weights = decay_weights(valid, 7.0, torch.float64)
    assert weights[0, 0] == 1.0
    assert weights[0, 14].item() == pytest.approx(0.135, abs=5e-4)
    eight = decay_weights(valid[:, :7], 4.0, torch.float64)
    assert eight[0, 6].item() == pytest.approx(0.223, abs=5e-4)


def test_decay_counts_slots_after_an_unlabelled_one():
    valid = torch.tensor([[True, False, True]])
    weights = decay_weights(valid, 2.0, torch.float64)
    assert weights[0].tolist() == pytest.approx([1.0, 0.0, math.exp(-1.0)])


def test_dpace_weights_by_hand():
    # q̃ = 0.75, 1 (unlabelled), 0.625, so P = 0.75, 0.75, 0.46875.
    nll = torch.tensor([[-math.log(0.5), 123.0, -math.log(0.25)]], dtype=torch.float64)
    valid = torch.tensor([[True, False, True]])
    weights = dpace_weights(nll, valid, alpha=0.5)
    assert weights[0].tolist() == pytest.approx([0.75 + 0.46875, 0.0, 0.46875])


def test_dpace_equals_the_written_sum():
    generator = torch.Generator().manual_seed(3)
    nll = torch.rand(5, 7, generator=generator, dtype=torch.float64) * 4
    valid = torch.rand(5, 7, generator=generator) < 0.7
    weights = dpace_weights(nll, valid)
    for a in range(5):
        for j in range(7):
            expected = 0.0
            for m in range(j, 7):
                product = 1.0
                for i in range(m + 1):
                    product *= 0.5 * math.exp(-nll[a, i]) + 0.5 if valid[a, i] else 1.0
                expected += product * bool(valid[a, m])
            assert weights[a, j].item() == pytest.approx(expected * bool(valid[a, j]))


def test_dpace_is_detached_and_minimises_the_raw_cross_entropy():
    nll = torch.tensor([[0.3, 2.0]], dtype=torch.float64, requires_grad=True)
    valid = torch.ones(1, 2, dtype=torch.bool)
    sums = pass_sums(Objective(loss=DPACE, gamma=4.0), nll, nll, valid, valid)
    sums.loss.backward()
    assert torch.equal(nll.grad, dpace_weights(nll.detach(), valid))


def test_acceptance_is_joint_and_stops_at_the_first_gap():
    correct = torch.tensor(
        [[True, True, False, True], [True, True, True, True], [False, True, True, True]]
    )
    valid = torch.tensor(
        [[True, True, True, True], [True, False, True, True], [True, True, True, True]]
    )
    zeros = torch.zeros(3, 4)
    sums = pass_sums(Objective(loss=DECAY, gamma=4.0), zeros, zeros, correct, valid)
    assert sums.accepted.tolist() == [2, 1, 0, 0]
    assert sums.blocks.item() == 3


def test_sums_add_over_any_split_of_the_blocks():
    generator = torch.Generator().manual_seed(5)
    nll = torch.rand(6, 3, generator=generator, dtype=torch.float64)
    valid = torch.rand(6, 3, generator=generator) < 0.8
    objective = Objective(loss=DPACE, gamma=4.0)
    whole = pass_sums(objective, 2 * nll, nll, valid, valid).flat()
    parts = [
        pass_sums(objective, 2 * nll[p], nll[p], valid[p], valid[p]).flat()
        for p in ([0, 1, 2, 3], [4, 5])
    ]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-13, atol=0)


def test_flat_sums_are_exact_and_without_a_graph():
    many = torch.tensor([2**24 + 1])
    loss = torch.zeros((), requires_grad=True)
    sums = PassSums(loss=loss, weight=loss.detach(), blocks=loss.detach(), accepted=many)
    assert sums.flat().tolist() == [0.0, 0.0, 0.0, 2**24 + 1]
    assert not sums.flat().requires_grad


def test_scatter_rows_keeps_the_gradient():
    values = torch.tensor([2.0, 3.0], requires_grad=True)
    grid = scatter_rows(values, torch.tensor([1, 4]), (2, 3))
    assert grid.tolist() == [[0.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    (grid * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad.tolist() == [1.0, 4.0]
