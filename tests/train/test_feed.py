"""Passes arrive in order and whole, however far the host is ahead of the device."""

import pytest
import torch

from dflash_offline.train.feed import Feed
from dflash_offline.train.stream import assemble


def passes_of(toy, *, pinned: bool):
    options = toy.options(pinned=pinned, with_final=False)
    # Sizes go up and down, so that the buffer has to grow and is larger than it need be.
    lengths = (20, 31, 12, 60, 25, 400, 18)
    return [assemble([toy.document(n, seed=n)], options) for n in lengths]


def test_on_a_cpu(toy_maker):
    passes = passes_of(toy_maker(), pinned=False)
    cpu = torch.device("cpu")
    given = list(Feed(cpu).passes(passes, torch.float64))
    assert len(given) == len(passes)
    for got, want in zip(given, passes, strict=True):
        assert torch.equal(got.features, want.to(cpu, torch.float64).features)
    assert list(Feed(cpu).passes([], torch.float64)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(toy_maker):
    passes = passes_of(toy_maker(torch.float32), pinned=True)
    feed, cuda = Feed(torch.device("cuda")), torch.device("cuda")
    busy = torch.randn(4096, 4096, device=cuda)
    kept = []
    for _step in range(3):
        for given in feed.passes(passes, torch.bfloat16):
            for _ in range(20):
                # Work that keeps the device behind the host.
                busy = (busy @ busy).tanh()
            kept.append(given.features.clone())
    for number, got in enumerate(kept):
        want = passes[number % len(passes)].to(torch.device("cpu"), torch.bfloat16)
        assert torch.equal(got.cpu(), want.features), number
