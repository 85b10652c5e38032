"""Useful FLOPs against counts made one by one."""

import numpy as np
import pytest
import torch

from dflash_offline.kernels.reference import context_mask, own_mask
from dflash_offline.train.anchors import AnchoredDocument, build_pass
from dflash_offline.train.flops import datasheet_rate, pass_flops, visible_pairs

SLIDING = ("sliding_attention", "full_attention")


def tables_of(config):
    documents = [
        AnchoredDocument(
            tokens=np.arange(length, dtype=np.int32),
            supervised=np.ones(length, bool),
            anchors=np.asarray(anchors),
        )
        for length, anchors in ((20, [2, 7, 18]), (9, [0, 4]))
    ]
    return build_pass(documents, config.layout)


@pytest.mark.parametrize("window", [4, 6, 100])
def test_visible_pairs_are_those_of_the_mask(config_maker, window):
    config = config_maker(layer_types=SLIDING, sliding_window=window, layer_causal=(True, False))
    tables = tables_of(config)
    lo, hi = tables.attention.host_lo, tables.attention.host_hi
    lo, hi = torch.as_tensor(lo), torch.as_tensor(hi)
    counted = []
    for layer in range(2):
        reach, causal = config.window(layer), config.layer_causal[layer]
        seen = context_mask(
            lo, hi, 4, start=0, stop=int(tables.positions_ctx.shape[0]), window=reach
        )
        own = own_mask(4, window=reach, causal=causal)
        counted.append(int(seen.expand(-1, 4, -1).sum()) + 5 * int(own.sum()))
    assert visible_pairs(config, tables) == counted


def test_products_are_counted_with_their_backward(config_maker):
    config = config_maker()
    tables = tables_of(config)
    rows, context, labelled = 20, 18 + 4, len(tables.label_rows)
    hidden, middle, q, kv, vocab = 32, 48, 32, 16, 53
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * middle
    expected = 6 * rows * 2 * layer
    expected += 4 * context * 2 * hidden**2 + 6 * context * 2 * 2 * hidden * kv
    expected += 12 * q * sum(visible_pairs(config, tables))
    head = 2 * labelled * hidden * vocab
    assert pass_flops(config, tables, with_teacher=False) == expected + 2 * head
    assert pass_flops(config, tables, with_teacher=True) == expected + 3 * head


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A1000", None),
        ("Something else", None),
    ],
)
def test_rates_that_are_known(monkeypatch, name, rate):
    assert datasheet_rate(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert datasheet_rate(torch.device("cuda", 0)) == rate
