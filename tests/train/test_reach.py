"""Options that decide what is learned reach what they are about."""

import numpy as np
import torch

from dflash_offline.train.distributed import World
from dflash_offline.train.noise import noise_key, row_keys
from dflash_offline.train.order import StreamState
from dflash_offline.train.setup import prepare
from dflash_offline.train.stream import StepBuilder


def test_the_seed_decides_weights_order_and_anchors(config, small_store, tmp_path):
    first, second = (
        prepare(config(small_store[0], tmp_path / "run", seed=seed), World()) for seed in (1, 2)
    )
    assert not torch.equal(first.drafter.fc.weight, second.drafter.fc.weight)
    orders = [
        [draw.index for draw in run.order.take(StreamState(), 15)[0]] for run in (first, second)
    ]
    assert orders[0][:5] == orders[1][:5], "epoch one is not the plan's order"
    assert orders[0] != orders[1]
    assert [run.stream_options.seed for run in (first, second)] == [1, 2]


def test_options_reach_passes(config, small_store, tmp_path):
    given = {"seed": 5, "num_anchors": 3, "supervise": "last", "rows_per_pass": 16}
    run = prepare(
        config(small_store[0], tmp_path / "run", noise=0.25, weight=(2.0,), **given), World()
    )
    options = run.stream_options
    assert {name: vars(options)[name] for name in given} == given
    assert run.objective.noise == 0.25
    # Samples of the second epoch, which come twice in it.
    start = StreamState(epoch=1)
    draws, state = run.order.take(start, run.order.epoch_length(1))
    assert [draw.occurrence for draw in draws] == [0] * 5 + [1] * 5
    step = StepBuilder(run.caches, options, run.wanted).build(draws, state)
    expected = []
    for draw in draws:
        sample = run.caches[0].plan.samples[draw.index]
        key = noise_key(seed=5, epoch=1, occurrence=draw.occurrence, sample_id=sample.id)
        expected.append(row_keys(key, sample.length).tolist())
    found = []
    for each in step.passes:
        assert each.tables.num_anchors <= 4
        found += np.split(
            each.tables.noise_keys.numpy(), np.cumsum(each.tables.context_lengths)[:-1]
        )
    assert len(found) == len(expected) == 10
    assert all(keys.tolist() == row[: len(keys)] for keys, row in zip(found, expected, strict=True))
    anchors = torch.cat([each.tables.anchors for each in step.passes])
    assert len(anchors) == 30
    assert not torch.equal(anchors[:15], anchors[15:])
