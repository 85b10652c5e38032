"""The context of a pass while some of it is codes: copied as codes, decoded where training runs.

Letters: T context tokens, K captured layers, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.kernels.gather_dequant import gather_dequant


@dataclass(frozen=True)
class CodedContext:
    """Documents one after the other, in host memory.

    Attributes:
        parts: for each document codes, or rows [T, K*H] where its store has none.
    """

    parts: tuple[CodedStates | Tensor, ...]

    def decoded(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return all rows [T, K*H] on a device; codes give what a reader of the store gives."""
        rows = [
            part.to(device, non_blocking=True)
            if isinstance(part, Tensor)
            else gather_dequant(part.to(device))
            for part in self.parts
        ]
        return torch.cat([each.to(dtype) for each in rows])


def coded_context(
    documents: Sequence[CodedStates | Tensor], lengths: Sequence[int], *, pinned: bool
) -> CodedContext:
    """Cut documents to their context.

    Args:
        documents: codes, or bfloat16 [K, T, H].
        lengths: tokens of each that a pass reads.
        pinned: copy into page-locked memory.
    """
    parts: list[CodedStates | Tensor] = []
    for document, length in zip(documents, lengths, strict=True):
        if isinstance(document, Tensor):
            rows = document[:, :length].transpose(0, 1).flatten(1)
            parts.append(rows.pin_memory() if pinned else rows)
        else:
            part = document.first(length)
            parts.append(part.pinned() if pinned else part)
    return CodedContext(tuple(parts))
