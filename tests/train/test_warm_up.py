"""A warm-up runs every part of a step and changes nothing."""

import pytest
import torch

from dflash_offline.kernels import gather_dequant
from dflash_offline.train.objective import DECAY, Objective
from dflash_offline.train.stream import StreamOptions
from dflash_offline.train.warm_up import warm_up_step

OBJECTIVE = Objective(loss=DECAY, gamma=4.0)


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "int4", "int3"])
def test_states_of_every_codec(toy_maker, monkeypatch, codec):
    decoded = []
    decode = gather_dequant.gather_dequant

    def gather(states):
        decoded.append((states.codec, None if states.exact is None else len(states.exact)))
        return decode(states)

    monkeypatch.setattr("dflash_offline.train.coded_context.gather_dequant", gather)
    toy = toy_maker(torch.float32, hidden_size=64)
    toy.head.embed.resize_(53, 64).normal_()
    before = [each.detach().clone() for each in toy.drafter.parameters()]
    for parameter in toy.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    options = StreamOptions(
        layout=toy.layout, layers=(1, 3), num_anchors=2, rows_per_pass=64, seed=0, with_final=True
    )
    warm_up_step(toy.drafter, toy.head, OBJECTIVE, options, codecs=[codec, codec])
    coded = codec.startswith("int")
    assert decoded == ([(codec, 0), (codec, 1)] if coded else [("raw", None)])
    for parameter, value in zip(toy.drafter.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert not parameter.grad.any()
