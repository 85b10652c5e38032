"""A run's evaluation on its held-out samples, each process on its part of them."""

from dflash_offline.common.errors import BadInput, DamagedStore
from dflash_offline.train.announce import say
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate import CacheEvaluation, evaluate_cache, merge
from dflash_offline.train.setup import Setup

# Most anchors of a sample: enough for a curve, and seconds for a store of the usual size.
_EVAL_ANCHORS = 64


def evaluate(setup: Setup, drafter: Drafter) -> CacheEvaluation | DamagedStore | None:
    """Evaluate a drafter on this process's part of the held-out samples; None if it has none.

    Returns damage that ends the run instead of raising it, so that all processes hear of it.
    """
    parts = []
    for cache in setup.caches:
        mine = cache.held_out_samples[setup.world.rank :: setup.world.size]
        if not mine:
            continue
        try:
            part = evaluate_cache(
                drafter,
                cache,
                embed=setup.head.embed,
                head=setup.head.weight,
                supervise=setup.config.supervise,
                samples=mine,
                max_anchors=_EVAL_ANCHORS,
                rows_per_pass=setup.config.rows_per_pass,
                dtype=setup.dtype,
            )
        except DamagedStore as problem:
            if setup.config.damaged == "stop":
                return problem
            say(f"not evaluated: {cache.blobs.url}: {problem}")
            continue
        except BadInput:
            # None of these few samples has an anchor; others may.
            continue
        parts.append(part)
    return merge(parts) if parts else None
