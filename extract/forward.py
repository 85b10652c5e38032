"""One batch through the target: samples in, bfloat16 rows of the captured layers out.

Samples are right-padded without an attention mask: a causal model's rows do not see what follows
them. Letters: K captured layers, R rows (the samples' tokens, one after the other), T padded
tokens of a sample, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_offline.common.quantize import Calibration, EncodedStates, encode_slots
from dflash_offline.common.target import Capture, Target


@dataclass(frozen=True, kw_only=True)
class BatchStates:
    """Rows of one batch's samples, in the batch's order, without padding.

    Attributes:
        features: uint16 [K, R, H], bfloat16 bit patterns; None when there are codes.
        final: uint16 [R, H] post final norm, or None.
        is_finite: bool [K or K + 1, R], the final state last.
        encoded: codes of all states, in host memory, once the forward has a calibration.
    """

    features: np.ndarray | None
    final: np.ndarray | None
    is_finite: np.ndarray
    encoded: EncodedStates | None = None


class StateForward:
    """The target's decoder with hooks on the chosen layers; makes no logits.

    Use as a context manager.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], *, keep_final: bool) -> None:
        self._target = target
        self._capture = Capture(target, layers)
        self._keep_final = keep_final
        self._calibration: Calibration | None = None

    def __enter__(self) -> "StateForward":
        self._capture.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._capture.__exit__(*exception)

    def encode_with(self, calibration: Calibration | None) -> None:
        """Encode on the target's device from here on, so that only codes leave it."""
        self._calibration = calibration and calibration.to(self._target.device)

    @torch.inference_mode()
    def __call__(self, samples: Sequence[np.ndarray]) -> BatchStates:
        """Return the states of samples, each int32 [length]."""
        ids, rows = _right_padded(samples)
        device = self._target.device
        rows = rows.to(device)
        final = self._target.base(input_ids=ids.to(device), use_cache=False).last_hidden_state
        states = self._capture.take()
        if self._keep_final:
            states.append(final)
        del final
        finite: list[np.ndarray] = []

        def taken() -> Iterator[torch.Tensor]:
            while states:
                # Popped, so that each padded [batch, T, H] dies as soon as its rows are out.
                out = states.pop(0).flatten(0, 1).index_select(0, rows).to(torch.bfloat16)
                finite.append(out.isfinite().all(dim=1).cpu().numpy())
                yield out  # [R, H]

        if self._calibration is not None:
            is_first = torch.zeros(len(rows), dtype=torch.bool)
            is_first[np.cumsum([0, *map(len, samples[:-1])])] = True
            encoded = encode_slots(
                taken(), is_first.to(device), self._calibration, has_final=self._keep_final
            ).to("cpu")
            return BatchStates(
                features=None, final=None, is_finite=np.stack(finite), encoded=encoded
            )
        patterns = [x.view(torch.int16).cpu().numpy().view(np.uint16) for x in taken()]
        kept = patterns.pop() if self._keep_final else None
        return BatchStates(features=np.stack(patterns), final=kept, is_finite=np.stack(finite))


def _right_padded(samples: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [batch, T], and where the samples' rows are in it flattened, int64 [R]."""
    lengths = np.array([len(sample) for sample in samples])
    width = int(lengths.max())
    ids = np.zeros((len(samples), width), np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
    rows = np.concatenate([i * width + np.arange(n) for i, n in enumerate(lengths)])
    return torch.from_numpy(ids), torch.from_numpy(rows)
