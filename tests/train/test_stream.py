"""From a store to passes: what a step holds, at any world size, and what is left out."""

import threading

import numpy as np
import pytest
import torch

from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import DamagedStore
from dflash_offline.common.store import LossMask
from dflash_offline.train.anchors import BlockLayout
from dflash_offline.train.order import SampleOrder, StoreSamples, StreamState
from dflash_offline.train.stream import (
    StepBuilder,
    Stream,
    StreamOptions,
    cut_into_passes,
)

LAYOUT = BlockLayout(block_size=4, mask_token_id=96)


def options(**changes) -> StreamOptions:
    values = {
        "layout": LAYOUT,
        "layers": (1, 3),
        "num_anchors": 6,
        "rows_per_pass": 4096,
        "seed": 0,
        "dtype": torch.float32,
    }
    return StreamOptions(**values | changes)


def order_of(cache) -> SampleOrder:
    indices = cache.training_samples
    return SampleOrder(
        [StoreSamples(indices=indices, packs=cache.plan.column("pack")[indices])], seed=0
    )


def stream_of(cache, counts, *, rank=0, world_size=1, state=None, **changes) -> Stream:
    builder = StepBuilder([cache], options(**changes), [cache.training_samples])
    return Stream(
        order_of(cache),
        builder,
        state=state or StreamState(),
        samples_per_step=counts,
        rank=rank,
        world_size=world_size,
    )


def decoded(given):
    return given.to(torch.device("cpu"), torch.float32)


def blocks(step) -> list[tuple]:
    """Return every block of a step as plain values: tokens, labels, context."""
    found = []
    for given in step.passes:
        given, tables = decoded(given), given.tables
        for a in range(tables.num_anchors):
            rows = slice(4 * a, 4 * a + 4)
            lo, hi = int(tables.attention.host_lo[a]), int(tables.attention.host_hi[a])
            found.append(
                (
                    tuple(tables.block_tokens[rows].tolist()),
                    tuple(tables.labels[rows].tolist()),
                    tuple(tables.positions_block[rows].tolist()),
                    given.features[lo:hi].numpy().tobytes(),
                )
            )
    return found


def test_blocks_hold_what_the_store_holds(small_store):
    url, corpus = small_store
    cache = open_cache(url)
    with stream_of(cache, [3, 2]) as stream:
        first, second = stream.next(), stream.next()
    assert (first.num_samples, second.num_samples) == (3, 2)
    assert first.state == StreamState(position=3)
    assert second.state == StreamState(epoch=1)
    assert sum(each.tables.num_anchors for each in first.passes) == 18
    assert first.num_tokens == 40 + 70 + 25
    tables = first.passes[0].tables
    for a in range(tables.num_anchors):
        sample, anchor = int(tables.document[a]), int(tables.anchors[a])
        tokens = corpus.tokens[sample]
        assert tables.block_tokens[4 * a : 4 * a + 4].tolist() == [tokens[anchor], 96, 96, 96]
        hi = int(tables.attention.host_hi[a])
        bits = corpus.features[sample][:, anchor - 1].reshape(-1)
        expected = (bits.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(decoded(first.passes[0]).features[hi - 1].numpy(), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_out_the_same_blocks(small_store, world_size):
    cache = open_cache(small_store[0])
    with stream_of(cache, [5, 5]) as stream:
        whole = [stream.next() for _ in range(2)]
    for number, step in enumerate(whole):
        shared = []
        for rank in range(world_size):
            with stream_of(cache, [5, 5], rank=rank, world_size=world_size) as stream:
                part = [stream.next() for _ in range(2)][number]
            assert part.state == step.state
            shared += blocks(part)
        assert shared == blocks(step)


def test_going_on_gives_the_same_blocks(small_store):
    cache = open_cache(small_store[0])
    with stream_of(cache, [2] * 6) as stream:
        whole = [stream.next() for _ in range(6)]
    with stream_of(cache, [2] * 3, state=whole[2].state) as stream:
        rest = [stream.next() for _ in range(3)]
    assert [blocks(step) for step in rest] == [blocks(step) for step in whole[3:]]
    assert rest[-1].state == whole[-1].state


def test_passes_are_bounded_and_hold_the_same_blocks(small_store):
    cache = open_cache(small_store[0])
    with stream_of(cache, [5]) as one, stream_of(cache, [5], rows_per_pass=16) as many:
        whole, cut = one.next(), many.next()
    assert len(whole.passes) == 1
    assert len(cut.passes) > 5
    assert max(given.tables.block_tokens.shape[0] for given in cut.passes) <= 16
    assert blocks(cut) == blocks(whole)


def test_a_subset_of_layers(small_store):
    url, corpus = small_store
    with stream_of(open_cache(url), [1], layers=(3,)) as stream:
        features = decoded(stream.next().passes[0]).features
    assert features.shape[1] == 64
    expected = (corpus.features[0][1, 0].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(features[0].numpy(), expected)


@pytest.mark.parametrize("layout", ["1+N", "anchor-first"])
def test_final_states_stand_before_their_labels(corpus_maker, tmp_path, layout):
    corpus = corpus_maker(teacher="final")
    corpus.write(tmp_path / "store")
    layout = BlockLayout(block_size=4, mask_token_id=96, sample_from_anchor=layout != "1+N")
    with stream_of(open_cache(str(tmp_path / "store")), [3], layout=layout, with_final=True) as s:
        given = s.next().passes[0]
    rows = given.tables.label_rows
    shift = int(layout.sample_from_anchor)
    for row, state in zip(rows.tolist(), given.final, strict=True):
        sample = int(given.tables.document[row // 4])
        label_at = int(given.tables.anchors[row // 4]) + row % 4 + shift
        assert int(given.tables.labels[row]) == corpus.tokens[sample][label_at]
        bits = corpus.final[sample][label_at - 1].astype(np.uint32) << 16
        assert np.array_equal(state.numpy(), bits.view(np.float32))


def test_a_sample_without_anchors_is_skipped_and_counted(corpus_maker, tmp_path):
    corpus = corpus_maker()
    corpus.masks[1][:] = 0
    corpus.masks[1][5] = LossMask.ASSISTANT  # one supervised token is no anchor
    corpus.write(tmp_path / "store")
    cache = open_cache(str(tmp_path / "store"))
    with stream_of(cache, [1, 1, 3]) as stream:
        steps = [stream.next() for _ in range(3)]
    assert [step.num_skipped for step in steps] == [0, 1, 0]
    assert [step.num_samples for step in steps] == [1, 0, 3]
    assert steps[1].passes == []


def test_supervision_rules(corpus_maker, tmp_path):
    corpus = corpus_maker(lengths=(40, 40, 30), num_held_out=1)
    for mask in corpus.masks:
        mask[8:20] = LossMask.ASSISTANT  # an earlier turn
        mask[20:30] |= LossMask.REASONING
    corpus.write(tmp_path / "store")
    cache = open_cache(str(tmp_path / "store"))
    ranges = {}
    for rule in ("all", "last", "no-reasoning"):
        with stream_of(cache, [2], supervise=rule, num_anchors=99) as stream:
            ranges[rule] = set(stream.next().passes[0].tables.anchors.tolist())
    assert ranges["all"] == set(range(8, 39))
    assert ranges["last"] == set(range(20, 39))
    assert ranges["no-reasoning"] == set(range(8, 19)) | set(range(30, 39))


def test_a_damaged_pack_is_raised_where_training_waits(small_store):
    url, _ = small_store
    (shard,) = open_cache(url).blobs.root.glob("features/c/0/0/0/0")
    raw = bytearray(shard.read_bytes())
    raw[1000] ^= 1
    shard.write_bytes(raw)
    with stream_of(open_cache(url), [1]) as stream, pytest.raises(DamagedStore, match="pack 0"):
        stream.next()


def test_the_thread_ends_with_the_block(small_store):
    with stream_of(open_cache(small_store[0]), [1] * 100) as stream:
        stream.next()
        assert any(thread.name == "stream" for thread in threading.enumerate())
    assert not any(thread.name == "stream" for thread in threading.enumerate())
    assert stream.wait_s > 0


@pytest.mark.parametrize(("rows", "waiting"), [(4096, 2), (16, 1)], ids=["one pass", "many"])
def test_few_passes_wait_in_memory(small_store, monkeypatch, rows, waiting):
    built = threading.Semaphore(0)
    build = StepBuilder.build

    def counted(self, draws, state):
        step = build(self, draws, state)
        built.release()
        return step

    monkeypatch.setattr(StepBuilder, "build", counted)
    with stream_of(open_cache(small_store[0]), [5] * 9, rows_per_pass=rows) as stream:
        for number in range(3):
            for _ in range(waiting if number == 0 else 1):
                assert built.acquire(timeout=20)
            # A step beyond those would be there by now.
            assert not built.acquire(timeout=0.2)
            assert len(stream.next().passes) == (1 if waiting == 2 else 10)


def test_a_long_context_ends_a_pass(toy_maker):
    toy = toy_maker()
    documents = [toy.document(40, anchors=[38], seed=n) for n in range(4)]
    # Two documents of 38 context tokens are more than four times eight rows.
    groups = list(cut_into_passes(documents, toy.layout, 8))
    assert [len(group) for group in groups] == [1, 1, 1, 1]
    assert [len(group) for group in cut_into_passes(documents, toy.layout, 20)] == [2, 2]
