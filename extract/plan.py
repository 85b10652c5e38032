"""Which sample stands where: seeded order, packs of whole samples, held-out packs, forward batches.

A function of the rows and of the options; nothing here depends on how many processes will do the
work.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import Plan, SampleTable, supervised
from dflash_offline.extract.corpus import CorpusReport
from dflash_offline.extract.prefixes import merge_prefixes
from dflash_offline.extract.token_rows import TokenRows, digest

UNIT_PACKS = 16
# A batch costs as much as this share of a full one, beside its tokens.
_BATCHES_WORTH_ONE = 32
_NEVER = np.iinfo(np.int64).max
# So many batches of one shape save what it takes to plan attention for it: on an H200 60 ms against
# 14 a batch of 8 x 2,048 tokens of an 8B target, on each of a few GPUs.
_WORTH_A_PLAN = 16


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides a plan, besides the samples.

    Attributes:
        seed: of the order.
        pack_tokens: tokens that a pack holds at most.
        batch_tokens: padded tokens that a forward batch holds at most.
        holdout: fraction of conversations whose samples are held out.
        unit_packs: consecutive packs from which a batch may draw.
    """

    seed: int
    pack_tokens: int
    batch_tokens: int
    holdout: float
    unit_packs: int = UNIT_PACKS


def make_plan(
    rows: TokenRows, report: CorpusReport, options: PlanOptions
) -> tuple[Plan, np.ndarray]:
    """Return the plan and, for each of its samples, the index of its row, int64.

    Rows that another row begins with become part of it; their supervised tokens are marked there,
    in `rows`.

    Raises:
        BadInput: a sample does not fit a batch, or everything would be held out.
    """
    longest = int(rows.lengths.max())
    if longest > options.batch_tokens:
        raise BadInput(
            f"--batch-tokens {options.batch_tokens} is below the longest sample of {longest} "
            "tokens; allow more, or lower --max-length"
        )
    merge = merge_prefixes(rows)
    kept, lengths = merge.kept, rows.lengths[merge.kept]
    talks = rows.column("conversation").take(kept).combine_chunks().dictionary_encode()
    held_out = held_out_rows(talks.dictionary.to_pylist(), options.holdout)[talks.indices]
    order = seeded_order(len(kept), options.seed)
    training, kept_back = order[~held_out[order]], order[held_out[order]]
    pack, start, num_packs = cut_packs(lengths[training], options.pack_tokens)
    pack_held, start_held, num_held = cut_packs(lengths[kept_back], options.pack_tokens)
    pack = np.concatenate([pack, pack_held + num_packs])
    order = kept[np.concatenate([training, kept_back])]
    batches = make_batches(
        rows.lengths[order], pack, unit_packs=options.unit_packs, batch_tokens=options.batch_tokens
    )
    samples = _samples(rows, order).append_column("pack", pa.array(pack))
    samples = samples.append_column("start", pa.array(np.concatenate([start, start_held])))
    is_held_out = np.arange(len(order)) >= len(training)
    plan = Plan(
        samples=SampleTable(samples.append_column("held_out", pa.array(is_held_out))),
        batches=batches,
        num_packs=num_packs + num_held,
        num_held_out_packs=num_held,
        unit_packs=options.unit_packs,
        report=report.as_dict()
        | {
            "held_out": len(kept_back),
            "merged": {"rows": merge.num_rows, "tokens": merge.num_tokens},
        },
    )
    return plan, order


def seeded_order(count: int, seed: int) -> np.ndarray:
    """Return a permutation of `range(count)`, int64, that `count` and `seed` alone decide."""
    # Raw bits of a counter-based generator: numpy promises their stream, not `permutation`'s.
    keys = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(keys, kind="stable")


def held_out_rows(conversations: Sequence[str], fraction: float) -> np.ndarray:
    """Return which rows are held out, bool [rows], by a hash of their conversation.

    Whole conversations go: rows that share a first user turn share their fate, whatever the seed
    and whatever else is in the data. At least one conversation is held out when `fraction` is
    above zero and there are two.
    """
    places = {each: _place(each) for each in conversations}
    chosen: set[str] = set()
    if fraction > 0 and len(places) > 1:
        chosen = {each for each, place in places.items() if place < fraction}
        chosen = chosen or {min(places, key=places.__getitem__)}
        if len(chosen) == len(places):
            raise BadInput(
                f"--holdout {fraction:.2%} holds out every conversation of the data; hold out less"
            )
    return np.array([each in chosen for each in conversations], bool)


def _place(conversation: str) -> float:
    digest = hashlib.sha256(f"held out {conversation}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def cut_packs(lengths: np.ndarray, pack_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut a sequence of samples into packs of at most `pack_tokens` tokens.

    Args:
        lengths: int64 [samples], none above `pack_tokens`.
        pack_tokens: tokens a pack may hold.

    Returns:
        Pack of each sample, first token inside it (both int64 [samples]), number of packs.
    """
    pack, start = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    at, filled = 0, 0
    for i, length in enumerate(lengths):
        if filled + length > pack_tokens:
            at, filled = at + 1, 0
        pack[i], start[i] = at, filled
        filled += length
    return pack, start, at + 1 if len(lengths) else 0


def make_batches(
    lengths: np.ndarray, packs: np.ndarray, *, unit_packs: int, batch_tokens: int
) -> list[list[list[int]]]:
    """Return the forward batches of every unit as sample indices, the longest samples first.

    Args:
        lengths: int64 [samples].
        packs: int64 [samples], ascending.
        unit_packs: packs in a unit.
        batch_tokens: padded tokens in a batch, at least the longest sample.
    """
    units: list[list[list[int]]] = []
    unit_of = packs // unit_packs
    ends = np.searchsorted(unit_of, np.arange(int(unit_of[-1]) + 1), side="right")
    for first, stop in zip([0, *ends[:-1]], ends, strict=True):
        by_length = first + np.argsort(-lengths[first:stop], kind="stable")
        cuts = cut_batches(lengths[by_length], batch_tokens)
        units.append([part.tolist() for part in np.split(by_length, cuts)])
    return units


def cut_batches(lengths: np.ndarray, batch_tokens: int) -> list[int]:
    """Return where to cut samples sorted by length into batches, so that least is padded.

    Full batches alone would pad twice as much: lengths fall steeply at the long end. Each batch
    counts as some tokens more than it has, because small ones use a GPU badly.

    Args:
        lengths: int64 [samples], descending.
        batch_tokens: padded tokens in a batch, at least the first length.
    """
    overhead = batch_tokens // _BATCHES_WORTH_ONE
    count = len(lengths)
    best = np.zeros(count + 1, np.int64)  # cost of the first i samples
    begins = np.zeros(count + 1, np.int64)  # where their last batch begins
    for stop in range(1, count + 1):
        first = max(0, stop - batch_tokens // int(lengths[stop - 1]))
        starts = np.arange(first, stop)
        padded = (stop - starts) * lengths[starts]
        costs = np.where(padded <= batch_tokens, best[starts] + padded + overhead, _NEVER)
        begins[stop] = first + int(np.argmin(costs))
        best[stop] = costs.min()
    cuts = []
    stop = count
    while stop := int(begins[stop]):
        cuts.append(stop)
    return cuts[::-1]


def padded_fraction(plan: Plan) -> float:
    """Return the share of forwarded tokens that is padding."""
    forwarded = sum(samples * tokens for samples, tokens in _padded_shapes(plan))
    return 1.0 - int(plan.column("length").sum()) / forwarded


def frequent_shapes(plan: Plan) -> set[tuple[int, int]]:
    """Return the padded shapes, (samples, tokens), that many of the plan's batches have."""
    counts = Counter(_padded_shapes(plan))
    return {shape for shape, count in counts.items() if count >= _WORTH_A_PLAN}


def _padded_shapes(plan: Plan) -> Iterator[tuple[int, int]]:
    lengths = plan.column("length")
    for unit in plan.batches:
        for batch in unit:
            yield len(batch), int(lengths[batch].max())


def _samples(rows: TokenRows, order: np.ndarray) -> pa.Table:
    """Return the fields of samples that only their rows decide."""
    count = len(rows)
    hashes, num_supervised = np.empty(count, "U16"), np.zeros(count, np.int64)
    # In the order of the file, which need not fit in memory.
    for index in np.sort(order):
        tokens, mask = rows.tokens_of(int(index)), rows.mask_of(int(index))
        hashes[index] = digest(tokens.tobytes() + mask.tobytes())
        num_supervised[index] = supervised(mask).sum()
    texts = {name: rows.column(name).take(order) for name in ("id", "source", "licence")}
    return pa.table(
        {
            **texts,
            "content_hash": pa.array(hashes[order], pa.string()),
            "length": rows.lengths[order],
            "supervised": num_supervised[order],
        }
    )
