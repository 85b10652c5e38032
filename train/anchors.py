"""Anchors of a sample and the index tables of one pass, all made on the CPU.

An anchor is a supervised position whose next token is supervised too; a block of B slots starts at
each chosen anchor. Which positions are chosen depends on the seed, the epoch, how often the sample
already occurred in that epoch, and the sample: on nothing that has to do with memory or hardware.

Letters: T context tokens of a pass, A anchors, B block size, N = A·B block rows (anchor-major).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from dflash_offline.common.topk import TopK
from dflash_offline.kernels.block_attention import BlockTables, build_tables
from dflash_offline.train.noise import row_keys


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How a block of slots maps to tokens.

    In the 1+N layout slot k predicts the token at anchor + k and slot 0 predicts nothing; in the
    anchor-first layout slot k predicts the token at anchor + k + 1.
    """

    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False

    @property
    def num_predictions(self) -> int:
        """Tokens that a block proposes: B - 1, or B when the anchor's slot predicts too."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """First slot that predicts a token; the others follow without a gap."""
        return self.block_size - self.num_predictions


@dataclass(frozen=True, kw_only=True)
class AnchoredDocument:
    """What a pass needs to know of a document besides its features."""

    tokens: np.ndarray  # int32 [T]
    supervised: np.ndarray  # bool [T]
    anchors: np.ndarray  # int64 [A], ascending
    noise_key: int = 0  # see `noise`
    topk: TopK | None = None  # the target's best tokens after each, where the pass needs them

    @property
    def num_context(self) -> int:
        """Leading tokens that any block of the document may see: those before the last anchor."""
        return int(self.anchors[-1]) if len(self.anchors) else 0


@dataclass(frozen=True, kw_only=True)
class PassTables:
    """Every index that a forward and backward over one pass needs, on one device."""

    layout: BlockLayout
    attention: BlockTables
    context_lengths: tuple[int, ...]  # leading tokens of each document that make up the context
    positions_ctx: torch.Tensor  # int64 [T], inside the document
    noise_keys: torch.Tensor  # int32 [T], what the noise of a token's states depends on
    positions_block: torch.Tensor  # int64 [N], anchor + slot
    block_tokens: torch.Tensor  # int64 [N], the anchor's token, then the mask token
    labels: torch.Tensor  # int64 [N], -1 where nothing is supervised
    label_rows: torch.Tensor  # int64 [M], rows that carry a label, ascending
    document: torch.Tensor  # int64 [A], index into the pass's documents
    anchors: torch.Tensor  # int64 [A], positions inside the document
    topk_ids: torch.Tensor  # int32 [M, k], the target's best tokens where a label is; k may be 0
    topk_logprobs: torch.Tensor  # float32 [M, k]

    @property
    def num_anchors(self) -> int:
        """A, the number of blocks."""
        return self.anchors.shape[0]

    def label_grid(self, flat: torch.Tensor) -> torch.Tensor:
        """View a per-row tensor [N] as [A, P], the P slots that predict."""
        grid_AB = flat.view(-1, self.layout.block_size)
        return grid_AB[:, self.layout.first_slot :]

    def to(self, device: torch.device | str) -> "PassTables":
        """Copy every tensor to `device`; from page-locked memory without a host wait."""
        moved = replace(self, attention=self.attention.to(device))
        return moved._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PassTables":
        """Copy every tensor to page-locked memory."""
        return replace(self, attention=self.attention.pin_memory())._map(torch.Tensor.pin_memory)

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "PassTables":
        tensors = [field.name for field in fields(self) if field.type is torch.Tensor]
        return replace(self, **{name: move(vars(self)[name]) for name in tensors})


def candidates(supervised: np.ndarray) -> np.ndarray:
    """Return the positions that may be an anchor: supervised, with the next token supervised.

    Args:
        supervised: bool [T] of one document.

    Returns:
        int64 [C], ascending.
    """
    mask_T = np.asarray(supervised, dtype=bool)
    return np.flatnonzero(mask_T[:-1] & mask_T[1:])


def sample_anchors(
    supervised: np.ndarray,
    *,
    num_anchors: int,
    seed: int,
    epoch: int,
    occurrence: int,
    sample_id: str,
) -> np.ndarray:
    """Choose min(num_anchors, candidates) anchors of a document without replacement.

    Each candidate gets a 64-bit key from the Philox counter stream named by (seed, epoch,
    occurrence, sample); the smallest keys win. Only the raw stream is used, which numpy keeps
    the same over versions.

    Args:
        supervised: bool [T] of the document.
        num_anchors: most anchors wanted.
        seed: the run's seed.
        epoch: epoch of the run, from 0.
        occurrence: how often the sample already came up in this epoch.
        sample_id: the sample's id.

    Returns:
        int64 [A], ascending; empty when the document has no candidate.
    """
    possible = candidates(supervised)
    if len(possible) <= num_anchors:
        return possible
    keys = np.random.Philox(key=_stream_key(seed, epoch, occurrence, sample_id))
    order = np.argsort(keys.random_raw(len(possible)), kind="stable")
    return np.sort(possible[order[:num_anchors]])


def build_pass(
    documents: Sequence[AnchoredDocument],
    layout: BlockLayout,
    table_sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> PassTables:
    """Build the tables of one pass over the anchors of several documents.

    The context is the documents' leading tokens up to (not including) the last anchor of each,
    one document after the other; no block sees more.

    Args:
        documents: tokens, supervision and anchors; a document without anchors adds nothing.
        layout: block size, mask token and slot layout.
        table_sizes: work items that the attention kernels will want, prepared here; see
            `block_attention.table_sizes`.

    Returns:
        Tables on the CPU; N = B times the number of anchors.
    """
    size = layout.block_size
    lengths = [document.num_context for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    counts = [len(document.anchors) for document in documents]
    document_A = np.repeat(np.arange(len(documents), dtype=np.int64), counts)
    anchors_A = _joined([document.anchors for document in documents])
    lo_A = starts[:-1][document_A]
    blocks = [_block_arrays(document, layout) for document in documents]
    labels_AB = _joined([labels for _, labels in blocks]).reshape(-1, size)
    tokens_AB = _joined([tokens for tokens, _ in blocks]).reshape(-1, size)
    positions_AB = anchors_A[:, None] + np.arange(size)
    return PassTables(
        layout=layout,
        attention=build_tables(
            lo_A,
            lo_A + anchors_A,
            block_size=size,
            num_ctx=int(starts[-1]),
            **(table_sizes or {}),
        ),
        context_lengths=tuple(lengths),
        positions_ctx=torch.from_numpy(_joined([np.arange(n) for n in lengths])),
        noise_keys=torch.from_numpy(
            np.concatenate(
                [np.empty(0, np.int32)]
                + [row_keys(document.noise_key, document.num_context) for document in documents]
            )
        ),
        positions_block=torch.from_numpy(positions_AB.reshape(-1)),
        block_tokens=torch.from_numpy(tokens_AB.reshape(-1)),
        labels=torch.from_numpy(labels_AB.reshape(-1)),
        label_rows=torch.from_numpy(np.flatnonzero(labels_AB.reshape(-1) >= 0)),
        document=torch.from_numpy(document_A),
        anchors=torch.from_numpy(anchors_A),
        **_best_tokens(documents, labels_AB >= 0, layout),
    )


def _best_tokens(
    documents: Sequence[AnchoredDocument], labelled: np.ndarray, layout: BlockLayout
) -> dict[str, torch.Tensor]:
    """Gather the target's predictions of the labelled slots' tokens; `labelled` is bool [A, B]."""
    before_B = np.arange(layout.block_size) + int(layout.sample_from_anchor) - 1
    rows, first = [], 0
    for document in documents:
        is_labelled_AB = labelled[first : first + len(document.anchors)]
        first += len(document.anchors)
        if document.topk is not None:
            at = (document.anchors[:, None] + before_B)[is_labelled_AB]
            best = document.topk
            rows.append(TopK(ids=best.ids[at], logprobs=best.logprobs[at]))
    best = TopK.joined(rows) if rows else TopK.zeros(int(labelled.sum()), 0)
    return {
        "topk_ids": torch.from_numpy(best.ids),
        "topk_logprobs": torch.from_numpy(best.logprobs),
    }


def _block_arrays(document: AnchoredDocument, layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the input tokens and the labels (-1: none) of a document's blocks, both [A·B]."""
    tokens_T = document.tokens.astype(np.int64)
    num_tokens = len(tokens_T)
    slots_B = np.arange(layout.block_size)
    inputs_AB = np.full((len(document.anchors), layout.block_size), layout.mask_token_id, np.int64)
    inputs_AB[:, 0] = tokens_T[document.anchors]
    wanted_AB = document.anchors[:, None] + slots_B + int(layout.sample_from_anchor)
    inside_AB = wanted_AB < num_tokens
    clipped_AB = np.minimum(wanted_AB, num_tokens - 1)
    valid_AB = inside_AB & document.supervised[clipped_AB] & (slots_B >= layout.first_slot)
    labels_AB = np.where(valid_AB, tokens_T[clipped_AB], -1)
    return inputs_AB.reshape(-1), labels_AB.reshape(-1)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)


def _stream_key(seed: int, epoch: int, occurrence: int, sample_id: str) -> int:
    name = f"{seed}/{epoch}/{occurrence}/{sample_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
