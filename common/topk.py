"""A teacher kept as its best tokens: what a store holds of them, and how they are computed.

Row t is the target's prediction of the token after t, as its final state at t gives it. It is kept
where that token is supervised in the same sample; every other row is zeros in both arrays, which no
prediction is, because a second-best token never has probability 1. Letters: T tokens, R rows,
k tokens kept, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.common.store import supervised

if TYPE_CHECKING:
    import torch

# Rows of logits that exist at a time.
HEAD_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Best tokens of each row and their log-probabilities over the whole vocabulary.

    Attributes:
        ids: int32 [T, k], the likeliest first.
        logprobs: float32 [T, k], natural logarithms.
    """

    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def zeros(cls, num_tokens: int, k: int) -> "TopK":
        """Return rows that hold nothing."""
        shape = num_tokens, k
        return cls(ids=np.zeros(shape, np.int32), logprobs=np.zeros(shape, np.float32))

    @classmethod
    def joined(cls, parts: Sequence["TopK"]) -> "TopK":
        """Return the rows of several, one after the other."""
        return cls(
            ids=np.concatenate([part.ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "TopK":
        return TopK(ids=self.ids[rows], logprobs=self.logprobs[rows])

    def is_kept(self) -> np.ndarray:
        """Return which rows hold a prediction, bool [T]."""
        return self.logprobs.any(axis=1)


def joined_topk(parts: "Sequence[TopK | None]") -> TopK | None:
    """Return the rows of several documents, None for a store without this teacher."""
    known = [part for part in parts if part is not None]
    return TopK.joined(known) if known else None


def predicts(mask: np.ndarray) -> np.ndarray:
    """Return which tokens of a sample are followed by a supervised one, bool [T].

    Args:
        mask: uint8 [T] of `LossMask` bits.
    """
    return np.append(supervised(mask)[1:], False)


def top_logprobs(
    final: "torch.Tensor", logits: "Callable[[torch.Tensor], torch.Tensor]", k: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the k best tokens of final states, and their log-probabilities.

    Equivalent to `log_softmax(logits(final)).topk(k)`, of which at most 2,048 rows exist at a time.

    Args:
        final: [R, H], post final norm.
        logits: gives fp32 logits [rows, V] of final states [rows, H].
        k: at most V.

    Returns:
        ids int32 [R, k] and fp32 log-probabilities [R, k], the likeliest first.
    """
    import torch

    ids = torch.empty(len(final), k, dtype=torch.int32, device=final.device)
    logprobs = torch.empty(len(final), k, dtype=torch.float32, device=final.device)
    for first in range(0, len(final), HEAD_ROWS):
        rows = slice(first, first + HEAD_ROWS)
        z = logits(final[rows])  # [rows, V]
        best, at = z.topk(k, dim=1)
        logprobs[rows] = best - z.logsumexp(dim=1, keepdim=True)
        ids[rows] = at.to(torch.int32)
        del z
    return ids, logprobs
