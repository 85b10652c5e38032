"""The order of samples over epochs, stores and resumes."""

import itertools
from collections import Counter

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.train.order import SampleOrder, StoreSamples, StreamState


def store(count: int, *, per_pack: int = 4, weight: float = 1.0, first: int = 0) -> StoreSamples:
    indices = list(range(first, first + count))
    return StoreSamples(
        indices=indices, packs=[index // per_pack for index in range(count)], weight=weight
    )


def epoch_of(order: SampleOrder, epoch: int):
    draws, state = order.take(StreamState(epoch=epoch), order.epoch_length(epoch))
    assert state == StreamState(epoch=epoch + 1)
    return draws


def test_first_epoch_is_the_plans_order():
    draws = epoch_of(SampleOrder([store(50)], seed=3), 0)
    assert [draw.index for draw in draws] == list(range(50))
    assert {draw.occurrence for draw in draws} == {0}


def test_later_epochs_permute_windows():
    order = SampleOrder([store(64)], seed=3)
    second, third = ([draw.index for draw in epoch_of(order, n)] for n in (1, 2))
    assert sorted(second) == sorted(third) == list(range(64))
    assert second != third != list(range(64))
    # A window is four packs of four samples, and stays together.
    windows = [[index // 16 for index in second[at : at + 16]] for at in range(0, 64, 16)]
    assert [len(set(window)) for window in windows] == [1, 1, 1, 1]
    assert sorted(windows) != windows
    assert SampleOrder([store(64)], seed=4).take(StreamState(epoch=1), 64)[0] != epoch_of(order, 1)


def test_any_cut_gives_the_same_sequence():
    order = SampleOrder([store(10)], seed=0)
    whole, end = order.take(StreamState(), 37)
    parts, state = [], StreamState()
    # Also up to one before the end of an epoch.
    for count in (1, 8, 11, 3, 14):
        draws, state = SampleOrder([store(10)], seed=0).take(state, count)
        parts += draws
    assert parts == whole
    assert state == end == StreamState(epoch=3, position=7)
    assert order.num_before(end) == 37


def test_weights_are_rounds_an_epoch():
    order = SampleOrder([store(8, weight=2.0), store(6, weight=0.5, first=100)], seed=0)
    assert order.epoch_length(0) == 16 + 3
    for epoch in range(4):
        counts = Counter((draw.store, draw.index) for draw in epoch_of(order, epoch))
        assert all(counts[0, index] == 2 for index in range(8))
    # Two epochs make one round of the half-weight store.
    halves = [draw.index for epoch in (0, 1) for draw in epoch_of(order, epoch) if draw.store == 1]
    assert sorted(halves) == list(range(100, 106))


def test_a_sample_never_comes_twice_under_one_name():
    order = SampleOrder([store(5, weight=2.5)], seed=0)
    names = Counter(
        (draw.epoch, draw.occurrence, draw.index)
        for epoch in range(6)
        for draw in epoch_of(order, epoch)
    )
    assert set(names.values()) == {1}
    assert {occurrence for _, occurrence, _ in names} == {0, 1, 2}


def test_stores_are_interleaved_evenly():
    order = SampleOrder([store(40), store(10, first=100)], seed=0)
    stores = [draw.store for draw in epoch_of(order, 0)]
    places = [at for at, number in enumerate(stores) if number == 1]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert gaps <= {4, 5, 6}


def test_stores_are_shuffled_apart():
    draws = epoch_of(SampleOrder([store(20), store(20)], seed=0), 1)
    first, second = ([draw.index for draw in draws if draw.store == number] for number in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_an_empty_store_is_refused():
    with pytest.raises(BadInput, match="number 2"):
        SampleOrder([store(3), store(0)], seed=0)


def test_epochs_without_a_sample_are_refused():
    with pytest.raises(BadInput, match="--weight: an epoch would have less than one sample"):
        SampleOrder([store(3, weight=1e-12), store(9, weight=0.1)], seed=0)
    SampleOrder([store(3, weight=1e-12), store(10, weight=0.1)], seed=0)
