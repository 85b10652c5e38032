"""What `--fp8` needs, said before anything is written."""

import dataclasses

import pytest
import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.train.fp8 import use_fp8
from dflash_offline.train.loss_spec import Terms
from dflash_offline.train.objective import DECAY, Objective

OBJECTIVE = Objective(loss=DECAY, gamma=4.0)
CUDA = torch.device("cuda")


def call(toy, choice="all", objective=OBJECTIVE, device=CUDA, dtype=torch.bfloat16):
    return use_fp8(choice, toy.head, toy.drafter, objective, device=device, dtype=dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))


def test_none_changes_nothing(toy_maker):
    toy = toy_maker()
    assert call(toy, "none", device=torch.device("cpu")) is toy.head


def test_a_cpu_and_an_old_gpu_are_refused(toy_maker, monkeypatch):
    with pytest.raises(BadInput, match=r"--fp8 head needs .* training is on a CPU"):
        call(toy_maker(), "head", device=torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(BadInput, match="NVIDIA A100"):
        call(toy_maker())


@pytest.mark.usefixtures("hopper")
def test_other_dtypes_and_losses_are_refused(toy_maker):
    with pytest.raises(BadInput, match="not float32"):
        call(toy_maker(), dtype=torch.float32)
    with_teacher = dataclasses.replace(OBJECTIVE, terms=Terms(kl=1.0))
    with pytest.raises(BadInput, match="--loss asks for a divergence"):
        call(toy_maker(), objective=with_teacher)


@pytest.mark.usefixtures("hopper")
def test_head_and_drafter_get_copies(toy_maker):
    toy = toy_maker(torch.float32)
    head = call(toy)
    assert head.fp8 is not None
    for parameter in toy.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    first = toy.drafter.layers[0]
    with toy.drafter.cast_once(torch.bfloat16):
        assert first.mlp.up_proj.fp8 is not None
        assert first.self_attn.k_proj.fp8 is None
    assert first.mlp.up_proj.fp8 is None


def test_scales_of_the_target_reach_the_copy(toy_maker):
    plain = dataclasses.replace(toy_maker(torch.float32).head, logit_scale=0.5, softcap=3.0)
    states = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20)
    wanted, found = (head.cross_entropy(states, labels).nll for head in (plain, plain.with_fp8()))
    # Four significant bits in both operands, of logits up to 3; without the scales losses are
    # several times as large.
    assert 0 < (found - wanted).abs().max() < 0.2


@pytest.mark.usefixtures("hopper")
def test_a_width_that_is_no_multiple_of_16_is_refused(toy_maker):
    with pytest.raises(BadInput, match="multiples of 16; drop it"):
        call(toy_maker(torch.float32, intermediate_size=40))
