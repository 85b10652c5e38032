"""Passes over nothing: to compile all kernels before the first step, or to keep others company.

Letters: T tokens, K captured layers, H hidden.
"""

from collections.abc import Iterable

import numpy as np
import torch

from dflash_offline.common.topk import TopK
from dflash_offline.kernels.coded_states import CODE_BYTES, GROUP, CodedStates
from dflash_offline.kernels.head_rows import warm_up_loss
from dflash_offline.train.anchors import AnchoredDocument
from dflash_offline.train.documents import LoadedDocument, StreamOptions
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.objective import Objective
from dflash_offline.train.row_loss import BestTokens, row_losses
from dflash_offline.train.step import accumulate
from dflash_offline.train.stream import PassInput, assemble
from dflash_offline.train.target_head import TargetHead


def warm_up_step(
    drafter: Drafter,
    head: TargetHead,
    objective: Objective,
    options: StreamOptions,
    *,
    codecs: Iterable[str],
) -> None:
    """Run a pass of two blocks for each kind of states; gradients are zero afterwards.

    Args:
        codecs: of the stores to come.
    """
    hidden = drafter.config.hidden_size
    for codec in set(codecs):
        kinds = (False, True) if codec in CODE_BYTES else (False,)
        passes = [
            blank_pass(options, codec, hidden=hidden, exact=exact, labelled=True) for exact in kinds
        ]
        accumulate(drafter, head, objective, passes)
    for parameter in drafter.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def warm_up_head(head: TargetHead, objective: Objective) -> None:
    """Run the losses of every number of rows that a chunk of logits may have kernels for."""
    k = objective.num_topk
    ids = torch.arange(k, dtype=torch.int32, device=head.weight.device).expand(head.chunk_rows, k)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        best = BestTokens(ids[: len(x)].contiguous(), -1.0 - ids[: len(x)].float())
        return row_losses(head, x, labels, best if k else x.detach(), objective).loss

    warm_up_loss(loss, head.weight, chunk_rows=head.chunk_rows)


def blank_pass(
    options: StreamOptions, codec: str, *, hidden: int, exact: bool, labelled: bool
) -> PassInput:
    """Return a pass of two blocks over states of zeros; without labels its gradient is zero.

    Args:
        codec: of the states.
        exact: whether one of their rows is stored exactly, as some codecs do.
    """
    size = options.layout.block_size
    length = 4 * size
    document = LoadedDocument(
        anchored=AnchoredDocument(
            tokens=np.zeros(length, np.int32),
            supervised=np.full(length, labelled),
            anchors=np.array([size, 2 * size]),
            topk=_some_tokens(length, options.num_topk),
        ),
        features=_blank(codec, len(options.layers), length, hidden, exact=exact),
        final=torch.zeros(length, hidden, dtype=torch.bfloat16),
    )
    return assemble([document], options)


def _some_tokens(tokens: int, k: int) -> TopK | None:
    if not k:
        return None
    ids = np.tile(np.arange(k, dtype=np.int32), (tokens, 1))
    return TopK(ids=ids, logprobs=-1.0 - ids.astype(np.float32))


def _blank(codec: str, layers: int, tokens: int, hidden: int, *, exact: bool) -> CodedStates:
    """Return states of zeros [K, T, H] as a store has them, with or without an exact row."""
    if codec not in CODE_BYTES:
        values = torch.zeros(layers, tokens, hidden, dtype=torch.bfloat16)
        return CodedStates(codec="raw", values=values)
    up, down = CODE_BYTES[codec]
    dtype = torch.int8 if codec == "int8" else torch.uint8
    groups = hidden // GROUP if codec == "int4" else 1
    return CodedStates(
        codec=codec,
        values=torch.zeros(layers, tokens, hidden * up // down, dtype=dtype),
        scales=torch.ones(layers, tokens, groups, dtype=torch.bfloat16),
        mean=torch.zeros(layers, hidden),
        gain=torch.ones(layers, hidden),
        codebook=torch.zeros(8) if codec == "int3" else None,
        exact_slot=torch.full((layers, tokens), -1, dtype=torch.int32),
        exact=torch.zeros(int(exact), hidden, dtype=torch.bfloat16),
    )
