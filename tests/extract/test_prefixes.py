"""Rows that another row begins with: merged exactly, whatever their order, and never by mistake."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflash_offline.common.store import LossMask, supervised
from dflash_offline.extract import prefixes
from dflash_offline.extract.corpus import CorpusReport
from dflash_offline.extract.plan import PlanOptions, make_plan
from dflash_offline.extract.prefixes import Merge, merge_prefixes, union
from dflash_offline.extract.token_rows import TokenRow, TokenRows

A, END, LAST = LossMask.ASSISTANT, LossMask.END_OF_TURN, LossMask.LAST_TURN


def row(tokens: list[int], on: list[int], *, name: str = "", source: str = "chat") -> TokenRow:
    """Supervise the tokens at places `on`."""
    mask = np.zeros(len(tokens), np.uint8)
    mask[on] = A | LAST
    return TokenRow(
        id=name or str(tokens),
        source=source,
        licence="",
        conversation=str(tokens[:1]),
        tokens=np.array(tokens, np.int32),
        mask=mask,
    )


def merged(*rows: TokenRow) -> tuple[TokenRows, Merge]:
    kept = TokenRows.of(rows)
    return kept, merge_prefixes(kept)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_chain_of_three(order: tuple[int, ...]):
    """A conversation of three turns, expanded: each row supervises the turn that it ends with."""
    chain = [row([5, 6, 7], [1, 2]), row([5, 6, 7, 8, 9], [4]), row([5, 6, 7, 8, 9, 3, 4], [5, 6])]
    rows, merge = merged(*(chain[i] for i in order))
    assert merge.kept.tolist() == [order.index(2)]
    assert (merge.num_rows, merge.num_tokens) == (2, 8)
    assert np.flatnonzero(supervised(rows.mask_of(order.index(2)))).tolist() == [1, 2, 4, 5, 6]


def test_equal_rows_become_the_first():
    rows, merge = merged(row([1, 2, 3], [0]), row([1, 2, 3], [1]), row([1, 2, 3], [2]))
    assert (merge.kept.tolist(), merge.num_rows, merge.num_tokens) == ([0], 2, 6)
    assert supervised(rows.mask_of(0)).all()


def test_equal_rows_and_a_longer_one():
    rows, merge = merged(row([1, 2], [0]), row([1, 2], [1]), row([1, 2, 3], [2]))
    assert (merge.kept.tolist(), merge.num_rows, merge.num_tokens) == ([2], 2, 4)
    assert supervised(rows.mask_of(2)).all()


def test_near_prefixes_stay():
    """The same tokens but for one, at the end, at the start or in the middle, or in other order."""
    long = [1, 2, 3, 4, 5, 6]
    near = [[1, 2, 3, 9], [9, 2, 3, 4], [1, 9, 3, 4], [2, 1, 3, 4], [2, 3, 4, 5, 6], [1, 3]]
    rows, merge = merged(row(long, [5]), *(row(tokens, [0]) for tokens in near))
    assert merge.kept.tolist() == list(range(7))
    assert (merge.num_rows, merge.num_tokens) == (0, 0)
    assert np.flatnonzero(rows.mask_of(0)).tolist() == [5]


def test_two_ways_on():
    """A prefix of two rows goes into the longer one, once; both of them stay."""
    rows, merge = merged(row([1, 2], [1]), row([1, 2, 3], [2]), row([1, 2, 4, 5], [3]))
    assert merge.kept.tolist() == [1, 2]
    assert np.flatnonzero(rows.mask_of(1)).tolist() == [2]
    assert np.flatnonzero(rows.mask_of(2)).tolist() == [1, 3]


def test_sources_are_kept_apart():
    short = row([1, 2], [1], source="code")
    _, merge = merged(short, row([1, 2, 3], [2]))
    assert merge.kept.tolist() == [0, 1]
    _, merge = merged(short, row([1, 2, 3], [2]), row([1, 2, 3], [2], source="code"))
    assert merge.kept.tolist() == [1, 2]


def test_licences_are_kept_apart():
    """By which samples are chosen, and which the samples of another must not come under."""
    free = [replace(each, licence="MIT") for each in (row([1, 2], [1]), row([7, 8], [1]))]
    _, merge = merged(free[0], row([1, 2, 3], [2]), free[1], row([7, 8], [0]))
    assert merge.kept.tolist() == [0, 1, 2, 3]


def test_same_sums_do_not_merge(monkeypatch: pytest.MonkeyPatch):
    """Sums only propose: with one sum for everything, tokens decide."""
    monkeypatch.setattr(
        prefixes, "_prefix_sums", lambda rows, i, _w: np.zeros(rows.lengths[i], np.uint64)
    )
    _, merge = merged(row([1, 2], [1]), row([3, 4], [1]), row([3, 5, 6], [2]), row([1, 2, 3], [2]))
    assert merge.kept.tolist() == [1, 2, 3]


def test_many_rows_against_brute_force():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(300)]
    rows, merge = merged(*(row(each, [0], name=str(i)) for i, each in enumerate(tokens)))
    expected = [
        i
        for i, each in enumerate(tokens)
        if not any(
            other[: len(each)] == each and (len(other) > len(each) or j < i)
            for j, other in enumerate(tokens)
            if j != i
        )
    ]
    assert merge.kept.tolist() == expected
    assert merge.num_rows == 300 - len(expected)
    assert merge.num_tokens == rows.lengths.sum() - rows.lengths[merge.kept].sum()


def test_union_of_masks():
    """Supervised is what either supervises; template and reasoning bits follow the supervisor."""
    template, reasoning = A | LossMask.TEMPLATE, A | LossMask.REASONING
    ours = np.array([0, A, template, A | LAST, reasoning, template, 0], np.uint8)
    theirs = np.array([A, 0, A | LAST, A, A, template, END], np.uint8)
    both = union(ours, theirs)
    assert both.tolist() == [A, A, A | LAST, A | LAST, reasoning, template, END]
    np.testing.assert_array_equal(supervised(both), supervised(ours) | supervised(theirs))


def test_plan_has_the_longer_row_and_says_what_is_saved():
    rows = TokenRows.of(
        [row([1, 2, 3], [2]), row([7, 8], [0, 1]), row([1, 2, 3, 4, 5], [4], name="whole")]
    )
    report = CorpusReport(num_rows=3, num_kept=3, num_truncated=0, skipped={}, examples={})
    options = PlanOptions(seed=0, pack_tokens=64, batch_tokens=64, holdout=0.0)
    plan, order = make_plan(rows, report, options)
    assert sorted(order.tolist()) == [1, 2]
    assert plan.report["merged"] == {"rows": 1, "tokens": 3}
    (whole,) = (sample for sample in plan.samples if sample.id == "whole")
    assert (whole.length, whole.supervised) == (5, 2)
