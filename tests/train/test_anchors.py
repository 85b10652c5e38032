"""Which anchors are drawn, and the truth tables of a pass."""

import numpy as np
import pytest
import torch

from dflash_offline.train.anchors import (
    AnchoredDocument,
    BlockLayout,
    build_pass,
    candidates,
    sample_anchors,
)

LAYOUT = BlockLayout(block_size=4, mask_token_id=99)
ANCHOR_FIRST = BlockLayout(block_size=4, mask_token_id=99, sample_from_anchor=True)


def draw(mask, **changes) -> np.ndarray:
    names = {"num_anchors": 10, "seed": 0, "epoch": 0, "occurrence": 0, "sample_id": "a:1"}
    return sample_anchors(mask, **names | changes)


def document(tokens, supervised, anchors) -> AnchoredDocument:
    return AnchoredDocument(
        tokens=np.asarray(tokens, np.int32),
        supervised=np.asarray(supervised, bool),
        anchors=np.asarray(anchors, np.int64),
    )


def test_candidates_need_the_next_token_too():
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], bool)
    assert candidates(mask).tolist() == [1, 6, 7]
    assert candidates(np.array([True])).tolist() == []
    assert candidates(np.zeros(0, bool)).tolist() == []


def test_all_candidates_are_taken_when_there_are_few():
    mask = np.array([0, 1, 1, 1, 0, 1, 1], bool)
    assert draw(mask, num_anchors=3).tolist() == [1, 2, 5]


def test_anchors_are_a_subset_without_repeats_in_order():
    mask = np.arange(200) > 20
    anchors = draw(mask, num_anchors=50)
    assert len(set(anchors.tolist())) == 50
    assert (np.diff(anchors) > 0).all()
    assert anchors.min() > 20
    assert anchors.max() <= 198


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"epoch": 1}, {"occurrence": 1}, {"sample_id": "a:2"}], ids=str
)
def test_anchors_depend_on_every_name(change):
    mask = np.ones(300, bool)
    assert draw(mask).tolist() == draw(mask).tolist()
    assert draw(mask).tolist() != draw(mask, **change).tolist()


def test_anchors_are_the_same_on_every_machine():
    # Drawn once and written down: a change of numpy or of the key must not change a run.
    assert draw(np.ones(40, bool), num_anchors=5).tolist() == [1, 16, 20, 28, 36]


def test_anchors_are_uniform():
    mask = np.ones(21, bool)  # 20 candidates
    counts = np.zeros(20)
    for epoch in range(4000):
        counts[draw(mask, num_anchors=5, epoch=epoch)] += 1
    # 1000 expected of each, standard deviation 27.
    assert np.abs(counts - 1000).max() < 140


def test_tables_by_hand():
    first = document([10, 11, 12, 13, 14, 15, 16], [0, 0, 1, 1, 1, 0, 1], [2, 3])
    second = document([20, 21, 22, 23], [0, 1, 1, 1], [1])
    tables = build_pass([first, second], LAYOUT)
    # The last anchor of each document bounds the context: 3 and 1 tokens.
    assert tables.context_lengths == (3, 1)
    assert tables.positions_ctx.tolist() == [0, 1, 2, 0]
    assert tables.attention.host_lo.tolist() == [0, 0, 3]
    assert tables.attention.host_hi.tolist() == [2, 3, 4]
    assert tables.block_tokens.view(3, 4).tolist() == [
        [12, 99, 99, 99],
        [13, 99, 99, 99],
        [21, 99, 99, 99],
    ]
    assert tables.positions_block.view(3, 4).tolist() == [[2, 3, 4, 5], [3, 4, 5, 6], [1, 2, 3, 4]]
    # Token 15 is not supervised; 16 after it is. The second document ends after 23.
    assert tables.labels.view(3, 4).tolist() == [
        [-1, 13, 14, -1],
        [-1, 14, -1, 16],
        [-1, 22, 23, -1],
    ]
    assert tables.label_rows.tolist() == [1, 2, 5, 7, 9, 10]
    assert tables.document.tolist() == [0, 0, 1]
    assert tables.anchors.tolist() == [2, 3, 1]
    assert tables.label_grid(tables.labels).shape == (3, 3)


def test_anchor_first_layout_shifts_labels_by_one():
    one = document([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1], [2, 3])
    tables = build_pass([one], ANCHOR_FIRST)
    assert tables.labels.view(2, 4).tolist() == [[13, 14, 15, -1], [14, 15, -1, -1]]
    assert tables.positions_block.view(2, 4).tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert tables.block_tokens.view(2, 4)[:, 0].tolist() == [12, 13]
    assert tables.label_grid(tables.labels).shape == (2, 4)


def test_an_anchor_at_the_start_has_an_empty_context():
    tables = build_pass([document([1, 2, 3], [1, 1, 1], [0])], LAYOUT)
    assert tables.context_lengths == (0,)
    assert tables.attention.num_ctx == 0
    assert tables.labels.tolist() == [-1, 2, 3, -1]


def test_a_document_without_anchors_adds_nothing():
    empty = document([1, 2, 3], [0, 0, 0], [])
    full = document([4, 5, 6], [1, 1, 1], [1])
    tables = build_pass([empty, full, empty], LAYOUT)
    assert tables.context_lengths == (0, 1, 0)
    assert tables.num_anchors == 1
    nothing = build_pass([empty], LAYOUT)
    assert nothing.num_anchors == 0
    assert nothing.labels.shape == (0,)


def test_every_anchor_has_a_label():
    rng = np.random.default_rng(0)
    documents = []
    for number in range(20):
        mask = rng.random(30) < 0.6
        anchors = draw(mask, sample_id=str(number), num_anchors=6)
        documents.append(document(rng.integers(0, 9, 30), mask, anchors))
    tables = build_pass(documents, LAYOUT)
    assert bool((tables.label_grid(tables.labels)[:, 0] >= 0).all())


def test_to_moves_every_tensor():
    tables = build_pass([document([1, 2, 3], [1, 1, 1], [0, 1])], LAYOUT).to("meta")
    moved = [value for value in vars(tables).values() if isinstance(value, torch.Tensor)]
    assert len(moved) == 10
    assert all(value.device.type == "meta" for value in moved)
