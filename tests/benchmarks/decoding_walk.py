"""How decoding would go, told from what every block of a stored greedy answer gains.

Letters: A anchors of a sample.
"""

from collections.abc import Iterator

import numpy as np

from dflash_offline.common.cache import Document
from dflash_offline.common.store import supervised
from dflash_offline.train.anchors import AnchoredDocument, candidates
from dflash_offline.train.evaluate import AnchoredSample


def every_block(document: Document) -> AnchoredSample:
    """Return a sample with all its anchors, and states that hold no pack in memory."""
    mask = supervised(document.loss_mask, "all")
    own = Document(**vars(document) | {"features": document.features.copy()})
    anchored = AnchoredDocument(tokens=own.tokens, supervised=mask, anchors=candidates(mask))
    return AnchoredSample(document=own, anchored=anchored)


def walk(sample: AnchoredSample, produced: np.ndarray, limit: int | None = None) -> Iterator[int]:
    """Yield the gains of the blocks at which greedy decoding would stand.

    Args:
        sample: with the anchors of every block; each of its answers is walked through.
        produced: int64 [A], what the blocks gain.
        limit: most tokens of an answer, of which the prefill writes the first.
    """
    ends = np.flatnonzero(np.diff(sample.anchored.anchors) != 1) + 1
    for gains in np.split(produced, ends):
        length = len(gains) if limit is None else min(len(gains), limit - 1)
        place = 0
        while place < length:
            gain = min(int(gains[place]), length - place)
            yield gain
            place += gain
