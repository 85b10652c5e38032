"""Plans of samples with random tokens, of given lengths, as `dflash-extract` would make them."""

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_offline.common.store import Plan, Sample
from dflash_offline.extract.plan import cut_packs, make_batches

PACK_TOKENS = 16384


def make_plan(
    lengths: Sequence[int], *, unit_packs: int, batch_tokens: int, vocab: int
) -> tuple[Plan, list[np.ndarray]]:
    packs, starts, num_packs = cut_packs(np.array(lengths), PACK_TOKENS)
    batches = make_batches(
        np.array(lengths), packs, unit_packs=unit_packs, batch_tokens=batch_tokens
    )
    plan = Plan(
        samples=random_samples(lengths, packs, starts),
        batches=batches,
        num_packs=num_packs,
        num_held_out_packs=0,
        unit_packs=unit_packs,
    )
    rng = np.random.default_rng(0)
    return plan, [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def random_samples(
    lengths: Iterable[int], packs: Iterable[int], starts: Iterable[int]
) -> list[Sample]:
    """Return samples of these lengths in these places, every token supervised."""
    return [
        Sample(
            id=f"random:{i}",
            source="random",
            licence="",
            content_hash=str(i),
            length=int(length),
            supervised=int(length),
            pack=int(pack),
            start=int(start),
            held_out=False,
        )
        for i, (length, pack, start) in enumerate(zip(lengths, packs, starts, strict=True))
    ]


def real_lengths(num_packs: int) -> list[int]:
    rng, lengths, room = np.random.default_rng(0), [], num_packs * PACK_TOKENS * 0.95
    while sum(lengths) < room:
        lengths.append(int(np.clip(rng.lognormal(np.log(800) - 0.32, 0.8), 16, 4096)))
    return lengths
