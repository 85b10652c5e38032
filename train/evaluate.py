"""How many tokens a drafter gains per target step, measured on a store, without the target.

At every supervised position of held-out samples the drafter proposes a block as it does in serving.
What the target would say is known: its own text follows in the store. Slots after the first miss
are never looked at, so each slot costs a product with the head only where all before it were right.

Letters: T context tokens, A anchors, B block size, N = A*B rows, P predicting slots (B-1), V
vocabulary, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_offline.common.cache import Cache, Document
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import supervised
from dflash_offline.train.anchors import (
    AnchoredDocument,
    build_pass,
    candidates,
    sample_anchors,
)
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.stream import cut_into_passes

# Rows of one product with the head; 1,024 rows of 150,000 logits are 600 MB in fp32.
_HEAD_ROWS = 1024
# Samples read at a time; they share the buffers of the packs they come from.
_SAMPLES_PER_READ = 64


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What was counted on the samples of one source."""

    num_anchors: int
    produced: int  # tokens gained, over all anchors
    judged: np.ndarray  # int64 [P], anchors whose text reaches that slot
    accepted: np.ndarray  # int64 [P], of those: this slot and all before it right

    def plus(self, other: "SourceCounts") -> "SourceCounts":
        """Add two counts."""
        return SourceCounts(
            num_anchors=self.num_anchors + other.num_anchors,
            produced=self.produced + other.produced,
            judged=self.judged + other.judged,
            accepted=self.accepted + other.accepted,
        )


@dataclass(frozen=True, kw_only=True)
class CacheEvaluation:
    """Result of `evaluate_cache`; counts, so that parts evaluated apart can be merged."""

    counts: dict[str, SourceCounts]  # by source

    @property
    def num_anchors(self) -> int:
        """Blocks drafted."""
        return sum(each.num_anchors for each in self.counts.values())

    @property
    def acceptance_length(self) -> float:
        """Mean tokens gained per target step: accepted and the target's own one."""
        return sum(each.produced for each in self.counts.values()) / max(1, self.num_anchors)

    @property
    def accepted_by_position(self) -> list[float]:
        """For each slot, the share of blocks in which it and all before it are right, [P].

        Out of the blocks whose text reaches the slot; NaN where none does.
        """
        judged = sum(each.judged for each in self.counts.values())
        accepted = sum(each.accepted for each in self.counts.values())
        return [float(a / j) if j else float("nan") for a, j in zip(accepted, judged, strict=True)]

    @property
    def by_source(self) -> dict[str, float]:
        """Acceptance length of every source."""
        return {name: each.produced / each.num_anchors for name, each in self.counts.items()}


def merge(parts: Sequence[CacheEvaluation]) -> CacheEvaluation:
    """Join evaluations of different samples by the same drafter."""
    counts: dict[str, SourceCounts] = {}
    for part in parts:
        for source, each in part.counts.items():
            counts[source] = counts[source].plus(each) if source in counts else each
    return CacheEvaluation(counts=counts)


@torch.no_grad()
def evaluate_cache(
    drafter: Drafter,
    cache: Cache,
    *,
    embed: Tensor,
    head: Tensor,
    supervise: str = "all",
    samples: Sequence[int] | None = None,
    max_anchors: int | None = None,
    rows_per_pass: int = 8192,
    dtype: torch.dtype | None = None,
) -> CacheEvaluation:
    """Measure the joint greedy acceptance at the supervised anchors of samples.

    A block's gain is the number of leading slots that agree with the text, and one for the token
    the target adds itself, but never more than the text has left. In a text that the target wrote
    greedily this is what decoding gains when it stands at that anchor.

    Args:
        drafter: on the device to use.
        cache: an open store that holds the drafter's layers.
        embed: [V, H] the target's embedding, on the drafter's device.
        head: [V, H] the target's output weight, on the drafter's device.
        supervise: which tokens count, a rule of `common.store.supervised`.
        samples: indices into the plan; the held-out samples when None.
        max_anchors: most anchors of one sample, chosen evenly at random; all when None.
        rows_per_pass: most block rows of one forward, or one block.
        dtype: compute dtype; that of the drafter's parameters when None.

    Raises:
        BadInput: there are no held-out samples, or none has two supervised tokens in a row.
    """
    wanted = cache.held_out_samples if samples is None else list(samples)
    if not wanted:
        raise BadInput(
            "the store has no held-out samples to evaluate on: extract with --holdout above 0"
        )
    dtype = dtype or next(drafter.parameters()).dtype
    judge = BlockJudge(drafter, embed.to(dtype), head.to(dtype))
    parts = []
    anchored = _samples(drafter.config, cache, wanted, supervise, max_anchors)
    for documents in cut_into_passes(anchored, drafter.config.layout, rows_per_pass):
        gains = judge.run(documents)
        parts += [_counted(d.document.source, g) for d, g in zip(documents, gains, strict=True)]
    evaluation = merge(parts)
    if evaluation.num_anchors == 0:
        raise BadInput(
            f"--supervise {supervise} leaves no sample with two supervised tokens in a row; "
            "choose another rule"
        )
    return evaluation


@dataclass(frozen=True, kw_only=True)
class AnchoredSample:
    """One sample with the anchors to evaluate."""

    document: Document
    anchored: AnchoredDocument


@dataclass(frozen=True, kw_only=True)
class Gains:
    """What each block of one sample gained."""

    judged: np.ndarray  # bool [A, P], the text goes on to that slot without a gap
    accepted: np.ndarray  # bool [A, P], this slot and all before it agree with the text
    produced: np.ndarray  # int64 [A], tokens gained


def _samples(
    config: DrafterConfig, cache: Cache, indices: list[int], supervise: str, most: int | None
) -> Iterator[AnchoredSample]:
    """Yield the samples that have anchors, at most so many each."""
    # Neighbours in a pack share what is read.
    order = sorted(indices, key=lambda i: (cache.plan.samples[i].pack, cache.plan.samples[i].start))
    for first in range(0, len(order), _SAMPLES_PER_READ):
        chunk = order[first : first + _SAMPLES_PER_READ]
        for document in cache.read_many(chunk, config.target_layer_ids):
            sample = _part(document, supervise, most)
            if len(sample.anchored.anchors):
                yield sample


def _part(document: Document, supervise: str, max_anchors: int | None) -> AnchoredSample:
    mask = supervised(document.loss_mask, supervise)
    anchors = candidates(mask)
    if max_anchors is not None and len(anchors) > max_anchors:
        anchors = sample_anchors(
            mask, num_anchors=max_anchors, seed=0, epoch=0, occurrence=0, sample_id=document.id
        )
    anchored = AnchoredDocument(tokens=document.tokens, supervised=mask, anchors=anchors)
    return AnchoredSample(document=document, anchored=anchored)


class BlockJudge:
    """Runs the drafter over samples and compares its best tokens with their text.

    Args:
        drafter: on the device to use.
        embed: [V, H] the target's embedding, on that device, in the compute dtype.
        head: [V, H] the target's output weight, the same.
    """

    def __init__(self, drafter: Drafter, embed: Tensor, head: Tensor) -> None:
        self._drafter = drafter
        self._embed = embed
        self._head = head
        self._scale = drafter.config.input_embedding_scale
        self._layout = drafter.config.layout

    @torch.no_grad()
    def run(self, parts: Sequence[AnchoredSample]) -> list[Gains]:
        """Return what the blocks of each sample gained, from one forward over all of them."""
        tables = build_pass([part.anchored for part in parts], self._layout)
        device = self._embed.device
        features = torch.cat([self._features(part, device) for part in parts])  # [T, K*H]
        moved = tables.to(device)
        embeddings = self._embed[moved.block_tokens] * self._scale  # [N, H]
        hidden = self._drafter(features, embeddings, moved)  # [N, H]
        hidden = hidden.view(tables.num_anchors, self._layout.block_size, -1)
        labels = tables.label_grid(tables.labels)  # [A, P]
        judged = (labels >= 0).long().cumprod(dim=1).bool()  # [A, P]
        accepted = self._accepted(hidden, labels.to(device), judged.to(device)).cpu()  # [A, P]
        owner = tables.document.numpy()
        return [
            _gains(part.anchored, judged.numpy()[owner == i], accepted.numpy()[owner == i])
            for i, part in enumerate(parts)
        ]

    def _features(self, part: AnchoredSample, device: torch.device) -> Tensor:
        states = part.document.features_torch()[:, : part.anchored.num_context]  # [K, T, H]
        rows = states.to(device).transpose(0, 1).flatten(1)
        return rows.to(self._embed.dtype)

    def _accepted(self, hidden: Tensor, labels: Tensor, judged: Tensor) -> Tensor:
        """Return bool [A, P]: this slot and all before it agree with the text."""
        accepted = torch.zeros_like(judged)
        alive = torch.arange(len(labels), device=labels.device)
        for slot in range(labels.shape[1]):
            alive = alive[judged[alive, slot]]
            rows = hidden[alive, slot + self._layout.first_slot]  # [a, H]
            right = self._best(rows) == labels[alive, slot]
            alive = alive[right]
            accepted[alive, slot] = True
        return accepted

    def _best(self, rows: Tensor) -> Tensor:
        # Scale and soft cap of the logits are monotonic and leave the best token where it is.
        parts = [(part @ self._head.T).argmax(dim=-1) for part in rows.split(_HEAD_ROWS)]
        return torch.cat(parts) if parts else rows.new_empty(0, dtype=torch.int64)


def _gains(document: AnchoredDocument, judged: np.ndarray, accepted: np.ndarray) -> Gains:
    produced = np.minimum(accepted.sum(axis=1) + 1, _text_left(document))
    return Gains(judged=judged, accepted=accepted, produced=produced)


def _counted(source: str, gains: Gains) -> CacheEvaluation:
    counts = SourceCounts(
        num_anchors=len(gains.produced),
        produced=int(gains.produced.sum()),
        judged=gains.judged.sum(axis=0),
        accepted=gains.accepted.sum(axis=0),
    )
    return CacheEvaluation(counts={source: counts})


def _text_left(document: AnchoredDocument) -> np.ndarray:
    """Return how many supervised tokens follow each anchor without a gap, int64 [A]."""
    ends = np.append(np.flatnonzero(~document.supervised), len(document.supervised))
    return ends[np.searchsorted(ends, document.anchors)] - document.anchors - 1
