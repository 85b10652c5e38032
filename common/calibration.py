"""What an int store is standardised with: which samples it is fitted on, and the fit.

Runs once, before the first pack, on the states of a few samples; the result is stored and read back
by every worker. Letters: K captured layers, S slots (the K layers, then the final state where the
store has one), T tokens, H hidden.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dflash_offline.common.quantize import Calibration
from dflash_offline.common.store import Plan

MIN_SAMPLES, MIN_TOKENS = 64, 4096
# Keeps the rows of 64 long samples of a wide target under 1 GB of host memory.
MAX_ROWS_PER_SAMPLE = 256
# In standard deviations; see docs/benchmarks.md, "Codecs", for the share of rows above it.
EXACT_BOUND = 32.0
# A channel quieter than this against its layer is standardised as if it were that loud.
_MIN_RELATIVE_SCALE, _MIN_FIRST_SCALE = 1e-3, 0.1
_MIN_KEPT_FRAC = 0.9
_MAX_ROUNDS = 8
_BLOCK_ROWS = 1024


def calibration_batches(plan: Plan, seed: int, *, batch_tokens: int) -> list[list[int]]:
    """Return forward batches of the samples to calibrate on, as sample indices.

    Sources take turns, each in an order drawn from the seed, until there are `MIN_SAMPLES` samples
    and `MIN_TOKENS` tokens, or no more. Held-out samples are used only where nothing else is.

    Args:
        batch_tokens: padded tokens of a batch at most; a longer sample is a batch of its own.
    """
    lengths, held_out = plan.column("length"), plan.column("held_out").astype(bool)
    usable = np.flatnonzero(~held_out if not held_out.all() else np.ones_like(held_out))
    sources = plan.column("source")[usable]
    rng = np.random.default_rng(seed)
    queues = [rng.permutation(usable[sources == name]).tolist() for name in np.unique(sources)]
    chosen: list[int] = []
    num_tokens = 0
    for turn in range(max((len(queue) for queue in queues), default=0)):
        for queue in queues:
            if turn < len(queue) and (len(chosen) < MIN_SAMPLES or num_tokens < MIN_TOKENS):
                chosen.append(queue[turn])
                num_tokens += int(lengths[queue[turn]])
    batches: list[list[int]] = []
    for index in sorted(chosen, key=lambda i: (lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


class CalibrationRows:
    """States of the chosen samples, gathered in host memory."""

    def __init__(self) -> None:
        self._features: list[Tensor] = []
        self._final: list[Tensor] = []
        self._is_first: list[Tensor] = []
        self.num_samples = 0

    def add(self, features: Tensor, final: Tensor | None = None) -> None:
        """Take a sample, bfloat16 [K, T, H] and [T, H]; keeps evenly spaced rows of a long one."""
        num_tokens = features.shape[1]
        count = min(num_tokens, MAX_ROWS_PER_SAMPLE)
        rows = torch.linspace(0, num_tokens - 1, count, dtype=torch.float64).long()
        on_device = rows.to(features.device)
        self._features.append(features[:, on_device].to("cpu", torch.bfloat16))
        if final is not None:
            self._final.append(final[on_device].to("cpu", torch.bfloat16))
        self._is_first.append(rows == 0)
        self.num_samples += 1

    @property
    def features(self) -> Tensor:
        """All rows, bfloat16 [K, T, H]."""
        return torch.cat(self._features, dim=1)

    @property
    def final(self) -> Tensor | None:
        """All rows of the final state, bfloat16 [T, H]."""
        return torch.cat(self._final) if self._final else None

    @property
    def is_first(self) -> Tensor:
        """Which rows are position 0 of their sample, bool [T]."""
        return torch.cat(self._is_first)

    def fit(self, codec: str) -> Calibration:
        """Return means and scales of the rows that will not be stored exactly."""
        features, final, is_first = self.features, self.final, self.is_first
        slots = [*features] if final is None else [*features, final]
        moments = [_fit_slot(x, ~is_first) for x in slots]
        mean = torch.stack([m for m, _ in moments]).float()
        scale = torch.stack([s for _, s in moments]).float()
        if codec == "int3":
            # The rotation mixes channels; random signs keep correlated ones from adding up.
            signs = np.random.default_rng(0).integers(0, 2, features.shape[2]) * 2 - 1
            scale[: len(features)] *= torch.from_numpy(signs).float()
        return Calibration(
            codec=codec,
            mean=mean,
            reciprocal=1.0 / scale,
            scale=scale,
            exact_bound=EXACT_BOUND,
            num_tokens=len(is_first),
            num_samples=self.num_samples,
        )


def _fit_slot(x: Tensor, is_usable: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp64 mean and standard deviation [H] of the rows that do not pass the bound.

    Starts from quantiles, which a few massive rows cannot move, and fits again until the set of
    rows stands still.
    """
    mean, scale = _quantile_moments(x, is_usable)
    kept = torch.zeros_like(is_usable)
    for _ in range(_MAX_ROUNDS):
        peaks = [((rows.double() - mean) / scale).abs().amax(1) for rows in x.split(_BLOCK_ROWS)]
        inside = is_usable & (torch.cat(peaks) <= EXACT_BOUND)
        if torch.equal(inside, kept):
            break
        if inside.sum() < _MIN_KEPT_FRAC * is_usable.sum():
            return _moments(x, is_usable)
        kept = inside
        mean, scale = _moments(x, kept)
    return mean, scale


def _quantile_moments(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    rows = x[kept].float()
    if len(rows) == 0:
        return _moments(x, kept)
    centre = rows.median(dim=0).values
    deviation = (rows - centre).abs_()
    scale = deviation.kthvalue(max(1, round(0.99 * len(rows))), dim=0).values / 2.576
    return centre.double(), _floored(scale.double(), _MIN_FIRST_SCALE)


def _moments(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    count = max(1, int(kept.sum()))
    mean = sum(rows.sum(0) for rows in _kept_rows(x, kept)) / count
    variance = sum((rows - mean).square().sum(0) for rows in _kept_rows(x, kept)) / count
    return mean, _floored(variance.sqrt(), _MIN_RELATIVE_SCALE)


def _floored(scale: Tensor, relative: float) -> Tensor:
    typical = float(scale.square().mean().sqrt())
    return scale.clamp_min(relative * typical) if typical > 0 else torch.ones_like(scale)


def _kept_rows(x: Tensor, kept: Tensor) -> Iterator[Tensor]:
    for block, some in zip(x.split(_BLOCK_ROWS), kept.split(_BLOCK_ROWS), strict=True):
        yield block[some].double()
