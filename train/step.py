"""One pass and one step: states in, gradients and sums out. No I/O and no host synchronisation.

Letters: A anchors, B block size, N = A*B rows, H hidden, P predicting slots.
"""

from collections.abc import Sequence

import torch

from dflash_offline.kernels.feature_noise import feature_noise
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.feed import feed_of
from dflash_offline.train.objective import Objective, PassSums, pass_sums, scatter_rows
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.row_loss import BestTokens, row_losses
from dflash_offline.train.stream import PassInput
from dflash_offline.train.target_head import TargetHead


def run_pass(
    drafter: Drafter, head: TargetHead, objective: Objective, given: PassInput
) -> PassSums:
    """Run the drafter over one pass and weigh its cross-entropies.

    Args:
        drafter: parameters of any float dtype.
        head: embedding and head in the dtype of the states.
        objective: which weights the slots get.
        given: the pass, on the drafter's device, with `final` where the objective needs it.

    Returns:
        Sums; `loss` is differentiable and not divided by anything.
    """
    tables = given.tables
    features = given.features
    if objective.noise:
        features = feature_noise(features, tables.noise_keys, width=objective.noise)
    hidden_NH = drafter(features, head.embeddings(tables.block_tokens), tables)
    rows = tables.label_rows
    result = row_losses(
        head,
        hidden_NH.index_select(0, rows),
        tables.labels.index_select(0, rows),
        _teacher(given),
        objective,
    )
    shape = (tables.num_anchors, tables.layout.block_size)
    loss_AP, nll_AP, correct_AP = (
        scatter_rows(values, rows, shape)[:, tables.layout.first_slot :]
        for values in (result.loss, result.nll, result.correct.to(result.loss.dtype))
    )
    valid_AP = tables.label_grid(tables.labels) >= 0
    return pass_sums(objective, loss_AP, nll_AP, correct_AP > 0, valid_AP)


def _teacher(given: PassInput) -> torch.Tensor | BestTokens | None:
    tables = given.tables
    if tables.topk_ids.shape[1]:
        return BestTokens(tables.topk_ids, tables.topk_logprobs)
    return given.final


def accumulate(
    drafter: Drafter,
    head: TargetHead,
    objective: Objective,
    passes: Sequence[PassInput],
    clock: PhaseClock | None = None,
) -> torch.Tensor:
    """Add the gradients of passes to the parameters' `.grad`, unnormalised.

    Returns:
        [3 + P] float64 sums over the passes: loss, weights, blocks, accepted by slot.
    """
    device = head.weight.device
    clock = clock or PhaseClock(device)
    layout = drafter.config.layout
    totals = torch.zeros(3 + layout.num_predictions, dtype=torch.float64, device=device)
    dtype = head.weight.dtype
    with drafter.cast_once(dtype):
        for given in feed_of(device).passes(passes, dtype):
            with clock.phase("forward"):
                sums = run_pass(drafter, head, objective, given)
            with clock.phase("backward"):
                sums.loss.backward()
            totals += sums.flat()
    return totals
