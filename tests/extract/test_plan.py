"""Plans as properties: every sample once, whole, in seeded order, whatever the batches are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask, Plan
from dflash_offline.extract.corpus import CorpusReport
from dflash_offline.extract.plan import (
    PlanOptions,
    cut_batches,
    frequent_shapes,
    held_out_rows,
    make_batches,
    make_plan,
    padded_fraction,
    seeded_order,
)
from dflash_offline.extract.token_rows import TokenRow, TokenRows

REPORT = CorpusReport(num_rows=0, num_kept=0, num_truncated=0, skipped={}, examples={})


def make_rows(count: int, *, seed: int = 0, longest: int = 200) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(1, longest + 1))
        mask = np.full(length, LossMask.OTHER, np.uint8)
        tokens = rng.integers(0, 99, length).astype(np.int32)
        tokens[0] = index  # so that no row is a prefix of another
        rows.append(
            TokenRow(
                id=str(index),
                source="set",
                licence="",
                conversation=f"talk {index // 2}",
                tokens=tokens,
                mask=mask,
            )
        )
    return rows


def plan_of(rows: list[TokenRow], **changes) -> tuple[Plan, list[int]]:
    options = {"seed": 0, "pack_tokens": 256, "batch_tokens": 512, "holdout": 0.1, "unit_packs": 4}
    plan, order = make_plan(TokenRows.of(rows), REPORT, PlanOptions(**{**options, **changes}))
    return plan, order.tolist()


SIZES = pytest.mark.parametrize("count", [1, 2, 12, 33, 150])


@SIZES
def test_every_sample_once_and_whole(count: int):
    rows = make_rows(count)
    plan, order = plan_of(rows)
    assert sorted(order) == list(range(count))
    assert [s.id for s in plan.samples] == [rows[i].id for i in order]
    assert [s.length for s in plan.samples] == [len(rows[i].tokens) for i in order]
    filled: dict[int, int] = {}
    for sample in plan.samples:
        # Samples of a pack follow each other without a gap, and none reaches past its end.
        assert sample.start == filled.get(sample.pack, 0)
        filled[sample.pack] = sample.start + sample.length
    assert sorted(filled) == list(range(plan.num_packs))
    assert max(filled.values()) <= 256


@SIZES
def test_batches_cover_their_unit(count: int):
    plan, _ = plan_of(make_rows(count))
    for number, unit in enumerate(plan.batches):
        packs = range(number * 4, number * 4 + 4)
        members = [i for i, s in enumerate(plan.samples) if s.pack in packs]
        assert sorted(i for batch in unit for i in batch) == members
        for batch in unit:
            lengths = [plan.samples[i].length for i in batch]
            assert lengths == sorted(lengths, reverse=True)
            assert len(batch) * max(lengths) <= 512
    assert len(plan.batches) == -(-plan.num_packs // 4)


@SIZES
def test_held_out_packs_hold_nothing_else(count: int):
    rows = make_rows(count)
    plan, order = plan_of(rows)
    kinds = {(s.pack, s.held_out) for s in plan.samples}
    assert len(kinds) == plan.num_packs
    held = {pack for pack, is_held in kinds if is_held}
    assert held == set(range(plan.num_packs - plan.num_held_out_packs, plan.num_packs))
    assert bool(held) == (count > 2)  # one conversation alone is for training
    for talk in {row.conversation for row in rows}:
        fates = {
            s.held_out
            for s, i in zip(plan.samples, order, strict=True)
            if rows[i].conversation == talk
        }
        assert len(fates) == 1, "a conversation is held out whole"


def test_order_is_a_function_of_the_seed_alone():
    rows = make_rows(150)
    _, order = plan_of(rows, holdout=0.0)
    assert order == plan_of(rows, holdout=0.0)[1] != list(range(150))
    assert order == plan_of(rows, holdout=0.0, pack_tokens=400, batch_tokens=999)[1]
    assert order != plan_of(rows, holdout=0.0, seed=1)[1]
    # Holding samples out leaves the order of the others as it is.
    plan, with_held_out = plan_of(rows)
    held = {int(s.id) for s in plan.samples if s.held_out}
    assert [i for i in order if i not in held] == [i for i in with_held_out if i not in held]


def test_order_is_the_same_on_every_machine():
    """Stored plans outlive releases of numpy: the first places are written down here."""
    assert sorted(seeded_order(1000, 3)) == list(range(1000))
    assert seeded_order(6, 0).tolist() == [0, 2, 1, 5, 4, 3]


def test_holdout_does_not_depend_on_other_data():
    talks = [f"talk {i}" for i in range(2000)]
    held = held_out_rows(talks, 0.05)
    assert 60 < held.sum() < 140
    np.testing.assert_array_equal(held_out_rows(talks[:500], 0.05), held[:500])
    assert not held_out_rows(talks, 0.0).any()


def test_who_is_held_out_is_the_same_in_every_version():
    """Data that is appended later must share the fate of what a store has of it already."""
    held = held_out_rows([f"talk {i}" for i in range(60)], 0.1)
    assert np.flatnonzero(held).tolist() == [22, 31, 46, 47]
    assert held_out_rows(["a", "b", "c"], 1e-9).tolist() == [False, True, False]


def test_some_conversation_is_held_out_of_a_small_corpus():
    assert held_out_rows(["a", "b", "c"], 1e-9).sum() == 1
    with pytest.raises(BadInput, match="--holdout .* every conversation"):
        held_out_rows(["a", "b", "c"], 0.9999999)


def test_batch_below_the_longest_sample():
    with pytest.raises(BadInput, match="--batch-tokens 64 is below the longest sample"):
        plan_of(make_rows(20), batch_tokens=64)
    longest = max(len(row.tokens) for row in make_rows(20))
    assert plan_of(make_rows(20), batch_tokens=longest)[0].num_packs


def test_padding_is_small_on_real_lengths():
    """Units of 16 packs waste a tenth at most where lengths vary tenfold."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.3, 0.7, 2000), 8, 4096).astype(int)
    rows = [
        TokenRow(
            id=str(i),
            source="set",
            licence="",
            conversation=str(i),
            tokens=np.full(length, i, np.int32),
            mask=np.full(length, LossMask.OTHER, np.uint8),
        )
        for i, length in enumerate(lengths)
    ]
    plan, _ = plan_of(rows, pack_tokens=16384, batch_tokens=32768, unit_packs=16)
    assert padded_fraction(plan) < 0.1
    assert len(plan.batches) > 3


def test_batches_are_the_cheapest_that_fit():
    """Against every way to cut; a batch costs a 32nd of a full one beside its padded tokens."""
    assert cut_batches(np.array([33, 32]), 64) == [1], "two tokens too many for one batch"
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = np.sort(rng.integers(1, 65, rng.integers(1, 8)))[::-1]
        costs = {}
        for chosen in itertools.product([False, True], repeat=len(lengths) - 1):
            cuts = (np.flatnonzero(chosen) + 1).tolist()
            padded = [len(part) * int(part[0]) for part in np.split(lengths, cuts)]
            if max(padded) <= 64:
                costs[tuple(cuts)] = sum(padded) + 2 * len(padded)
        assert costs[tuple(cut_batches(lengths, 64))] == min(costs.values())


def test_samples_of_one_length_keep_their_order():
    """The order in a batch decides its rounding: it must not depend on how a machine sorts."""
    rng = np.random.default_rng(0)
    lengths, packs = rng.integers(1, 4, 500), np.repeat([0, 1, 2], [200, 200, 100])
    for unit in make_batches(lengths, packs, unit_packs=2, batch_tokens=16):
        members = [index for batch in unit for index in batch]
        assert members == sorted(members, key=lambda index: (-lengths[index], index))


def test_content_hash_follows_tokens_and_mask():
    rows = make_rows(4)
    for changed in ({"mask": rows[2].mask | LossMask.REASONING}, {"tokens": rows[2].tokens + 1}):
        other = [*rows[:2], replace(rows[2], **changed), rows[3]]
        plans = [plan_of(each)[0] for each in (rows, other)]
        first, second = ({s.id: s.content_hash for s in plan.samples} for plan in plans)
        assert {name for name in first if first[name] != second[name]} == {"2"}


def test_frequent_shapes_are_those_of_many_batches():
    """Equal lengths come in one shape, but for the last batch of a unit; real ones in many."""
    rows = [row for row in make_rows(600) if len(row.tokens) >= 64]
    equal = [replace(row, tokens=row.tokens[:64], mask=row.mask[:64]) for row in rows]
    plan, _ = plan_of(equal, batch_tokens=256, holdout=0.01)
    assert frequent_shapes(plan) == {(4, 64)}
    plan, _ = plan_of(equal[:60], batch_tokens=256, holdout=0.01)  # 15 batches
    assert not frequent_shapes(plan)
    plan, _ = plan_of(rows)
    assert len(plan.batches) > 50
    assert not frequent_shapes(plan)
