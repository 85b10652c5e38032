"""The context of a pass as the store holds it: copied as codes, decoded where training runs.

Letters: T context tokens, K captured layers, H hidden.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.kernels.gather_dequant import gather_dequant


@dataclass(frozen=True)
class CodedContext:
    """Documents one after the other.

    Attributes:
        parts: layer-major states, one for each run of documents that are decoded alike.
    """

    parts: tuple[CodedStates, ...]

    def decoded(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return all rows [T, K*H] on a device; codes give what a reader of the store gives."""
        return rows_of([part.to(device) for part in self.parts], dtype)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "CodedContext":
        """Return the same with every buffer moved."""
        return CodedContext(tuple(_moved(part, move) for part in self.parts))


def rows_of(parts: Sequence[CodedStates], dtype: torch.dtype) -> Tensor:
    """Decode states token-major, [T, K*H], on their device."""
    rows = [gather_dequant(part) for part in parts]
    # Rounded to bfloat16 first, in any dtype: what a reader of the store gives.
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)


def coded_context(
    documents: Sequence[CodedStates], lengths: Sequence[int], *, pinned: bool
) -> CodedContext:
    """Cut documents to their context and lay it out in as few buffers as possible.

    Args:
        documents: states of the same layers.
        lengths: tokens of each that a pass reads.
        pinned: in page-locked memory, from which a GPU copies on its own.
    """
    pairs = list(zip(documents, lengths, strict=True))
    runs = itertools.groupby(pairs, lambda pair: (pair[0].codec, id(pair[0].mean)))
    return CodedContext(tuple(_joined(list(run), pinned=pinned) for _, run in runs))


def _joined(run: Sequence[tuple[CodedStates, int]], *, pinned: bool) -> CodedStates:
    """Copy the first tokens of documents, and the rows stored exactly, side by side."""
    first = run[0][0]

    def rows(parts: Sequence[Tensor]) -> Tensor:
        shape = list(parts[0].shape)
        shape[1] = sum(part.shape[1] for part in parts)
        out = torch.empty(shape, dtype=parts[0].dtype, pin_memory=pinned)
        start = 0
        for part in parts:
            out[:, start : start + part.shape[1]].copy_(part)
            start += part.shape[1]
        return out

    values = rows([document.values[:, :length] for document, length in run])
    if first.codec == "raw":
        return replace(first, values=values)
    slots, exact, held = [], [], 0
    for document, length in run:
        assert document.exact_slot is not None, "codes come with their exact rows"
        assert document.exact is not None, "codes come with their exact rows"
        slot = document.exact_slot[:, :length]
        slots.append(torch.where(slot < 0, slot, slot + held))
        exact.append(document.exact[None])
        held += len(document.exact)
    return replace(
        first,
        values=values,
        scales=rows([document.scales[:, :length] for document, length in run]),
        exact_slot=rows(slots),
        exact=rows(exact)[0],
    )


def _moved(states: CodedStates, move: Callable[[Tensor], Tensor]) -> CodedStates:
    tensors = {name: each for name, each in vars(states).items() if isinstance(each, Tensor)}
    return replace(states, **{name: move(each) for name, each in tensors.items()})
