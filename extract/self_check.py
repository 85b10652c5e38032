"""A few samples through the hot path, and read back at the end, against an independent forward.

Off-by-one layers, a missing norm, shifted ids, rows of another sample and padding that leaks give
plausible states and a drafter that is a third worse; here they give a table with a red line.
Letters: T tokens of a sample, H hidden, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from dflash_offline.common.cache import Cache
from dflash_offline.common.errors import FoundProblems
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.plain_console import plain_console
from dflash_offline.common.target import Target
from dflash_offline.extract.forward import StateForward

NUM_SAMPLES = 4
MAX_TOKENS = 256
# Relative error of a row: bfloat16 storage alone gives 0.002. A forward in bfloat16 adds the
# rounding of every layer, differently for other batch shapes.
_ROW_BOUND = {torch.float32: 0.01}
_ROW_BOUND_BFLOAT16 = 0.15
_LOGIT_BOUND = {torch.float32: 0.02}
_LOGIT_BOUND_BFLOAT16 = 0.15
# What a codec adds; the errors of its report are after the norm.
_CODEC_BOUND = {"int8": 0.05, "int4": 0.25, "int3": 0.4}
_ROWS_WITHIN = 0.98
_NOTHING = "nothing is extracted"
_CLEARLY = 2.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table: `value` must not exceed `bound`."""

    name: str
    value: float
    bound: float

    @property
    def is_good(self) -> bool:
        """Return whether the check holds; NaN does not."""
        return self.value <= self.bound


def self_check(
    target: Target, layers: tuple[int, ...], samples: Sequence[np.ndarray]
) -> list[Check]:
    """Compare the hot path with an unbatched forward.

    Args:
        target: as extraction uses it.
        layers: captured layer ids.
        samples: token ids int32 [T], of several lengths.

    Returns:
        For every layer, the relative error of the rows and the share that is nearer to another
        layer's state; for the final state, the error of the log-probabilities that the head makes
        of it. Of samples whose states the target itself does not make finite, which extraction
        quarantines, nothing is compared.

    Raises:
        FoundProblems: no sample is left.
    """
    places = checked_samples(np.array([len(sample) for sample in samples]))
    chosen = [samples[at][:MAX_TOKENS] for at in places]
    with StateForward(target, layers, keep_final=True) as forward:
        states = forward(chosen)
    assert states.final is not None
    first, errors = 0, []
    for sample in chosen:
        rows = slice(first, first + len(sample))
        given = states.features[:, rows], states.final[rows]
        errors.append(_sample_errors(target, layers, sample, *given))
        first = rows.stop
    if chosen and not any(errors):
        raise FoundProblems(
            f"the target's states of all {len(chosen)} samples of the self-check are not finite, "
            f"so {_NOTHING}; check the target's weights and its precision, {target.dtype}"
        )
    return _checks(target, errors, codec_bound=0.0)


def stored_check(target: Target, cache: Cache) -> list[Check]:
    """Compare a few samples of a store, read back, with an unbatched forward.

    What a check before the run cannot see: rows in another sample's place, memory that was used
    again too early, codes of another calibration.

    Args:
        target: that the store was made with.
        cache: the store; its samples are read from the beginning.
    """
    layers, lengths = cache.schema.layers, cache.plan.column("length")
    indices = [*cache.training_samples, *cache.held_out_samples]
    chosen = [indices[at] for at in _spread([int(lengths[index]) for index in indices])]
    errors = []
    for document in cache.read_many(chosen):
        final = None if document.final is None else document.final[:MAX_TOKENS]
        features = document.features[:, :MAX_TOKENS]
        sample = document.tokens[:MAX_TOKENS]
        errors.append(_sample_errors(target, layers, sample, features, final))
    return _checks(target, errors, codec_bound=_CODEC_BOUND.get(cache.schema.codec, 0.0))


def report(checks: Sequence[Check], *, what: str = "self-check", remedy: str = _NOTHING) -> None:
    """Print the table, if there is one.

    Args:
        checks: its lines.
        what: was checked.
        remedy: what to do where it does not hold.

    Raises:
        FoundProblems: a check does not hold.
    """
    if not checks:
        return
    table = Table(what, "value", "bound", "", box=None)
    for check in checks:
        verdict = "ok" if check.is_good else Text("wrong", style="red")
        table.add_row(check.name, f"{check.value:.2g}", f"{check.bound:.2g}", verdict)
    plain_console(sys.stderr).print(table)
    if bad := [check.name for check in checks if not check.is_good]:
        raise FoundProblems(
            f"the {what} failed ({', '.join(bad)}): the states are not the target's, so {remedy}; "
            "please report target, versions and the table"
        )


def _checks(
    target: Target, errors: Sequence[dict[str, np.ndarray]], *, codec_bound: float
) -> list[Check]:
    bounds = {
        "error": _ROW_BOUND.get(target.dtype, _ROW_BOUND_BFLOAT16) + codec_bound,
        "another": 1.0 - _ROWS_WITHIN,
        # The final state is never coded in fewer than eight bits.
        "log-probabilities": _LOGIT_BOUND.get(target.dtype, _LOGIT_BOUND_BFLOAT16)
        + min(codec_bound, _CODEC_BOUND["int8"]),
    }
    compared = [each for each in errors if each]
    names = compared[0] if compared else {}
    return [
        _check(name, np.concatenate([each[name] for each in compared]), bounds) for name in names
    ]


def _check(name: str, values: np.ndarray, bounds: dict[str, float]) -> Check:
    kind = name.split(" ")[-1]
    value = values.mean() if kind == "another" else np.quantile(values, _ROWS_WITHIN)
    return Check(name=name, value=float(value), bound=bounds[kind])


def checked_samples(lengths: np.ndarray) -> list[int]:
    """Return the places of the samples that `self_check` takes of many, int64 [samples]."""
    return _spread(np.minimum(lengths, MAX_TOKENS))


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return the places of a few samples, from the shortest to the longest; padding needs both."""
    ordered = np.argsort(lengths, kind="stable")
    places = np.linspace(0, len(ordered) - 1, min(NUM_SAMPLES, len(ordered)))
    return [int(ordered[int(place)]) for place in places]


def _sample_errors(
    target: Target,
    layers: tuple[int, ...],
    sample: np.ndarray,
    features: np.ndarray,
    final: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return the errors of one sample's patterns, uint16 [K, T, H] and [T, H], by name.

    None at all where the target itself makes states that are not finite: what the hot path made of
    them says nothing of it.
    """
    ids = torch.from_numpy(sample.astype(np.int64))[None]
    every = _reference_states(target, ids)  # N states [T, H]
    errors: dict[str, np.ndarray] = {}
    if not all(bool(state.isfinite().all()) for state in every):
        return errors
    for k, layer in enumerate(layers):
        captured = as_bfloat16(features[k]).float().to(target.device)
        distances = torch.stack([_row_error(captured, state) for state in every])  # [N, T]
        errors[f"layer {layer} error"] = distances[layer].cpu().numpy()
        # By a factor: rows with massive activations hardly change from one layer to the next.
        is_other = distances.amin(dim=0) * _CLEARLY < distances[layer]
        errors[f"layer {layer} rows nearer to another"] = is_other.float().cpu().numpy()
    if final is not None:
        states = as_bfloat16(final).float().to(target.device)
        errors["log-probabilities"] = _logit_error(target, ids, states)
    return errors


@torch.inference_mode()
def _reference_states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what every layer hands to its successor, fp32 [T, H] each, from a batch of one.

    Read on the way into the next module and copied at once, so neither the hooks of the hot path
    nor a successor that works in place can be wrong in the same way.
    """
    states: list[torch.Tensor] = []

    def keep(_module, args, kwargs) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        states.append(state[0].float().clone())

    successors = [*target.layers[1:], target.final_norm]
    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in successors]
    try:
        target.base(input_ids=ids.to(target.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states


def _row_error(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the relative error of every row, [T]; zero where both are zero."""
    norm = wanted.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return (given - wanted).norm(dim=1) / norm


@torch.inference_mode()
def _logit_error(target: Target, ids: torch.Tensor, final: torch.Tensor) -> np.ndarray:
    """Return the relative error [T] of the centred log-probabilities that `final` gives."""
    own = target.own_logits(ids)[0].float().log_softmax(dim=1)
    ours = target.head_logits(final).log_softmax(dim=1)
    centred = own - own.mean(dim=1, keepdim=True)
    return _row_error(ours - ours.mean(dim=1, keepdim=True), centred).cpu().numpy()
