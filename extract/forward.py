"""One batch through the target: samples in, bfloat16 rows of the captured layers out.

Samples are right-padded without an attention mask: a causal model's rows do not see what follows
them. A layer's output becomes rows as soon as the layer is done, so no padded state outlives its
layer. Letters: K captured layers, S slots (the K layers, then the final state if it is kept),
R rows (the samples' tokens, one after the other), T padded tokens of a sample, H hidden.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_offline.common.capture import Capture
from dflash_offline.common.pack_arrays import bits_of
from dflash_offline.common.target import Target
from dflash_offline.common.unplanned_attention import unplanned_attention


@dataclass(frozen=True, kw_only=True)
class BatchStates:
    """Rows of one batch's samples in host memory, in the batch's order, without padding.

    Attributes:
        features: uint16 [K, R, H], bfloat16 bit patterns.
        final: uint16 [R, H] post final norm, or None.
        is_finite: bool [S, R].
    """

    features: np.ndarray
    final: np.ndarray | None
    is_finite: np.ndarray


class StateForward:
    """The target's decoder with hooks on the chosen layers; makes no logits.

    Use as a context manager.

    Args:
        layers: whose outputs to keep.
        keep_final: the state after the final norm too.
        frequent_shapes: (batch, T) that come so often that attention may be planned for them.
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        *,
        keep_final: bool,
        frequent_shapes: Collection[tuple[int, int]] = (),
    ) -> None:
        self.device = target.device
        self.shared_by = target.shared_by
        self._target = target
        self._capture = Capture(target, layers, keep=self._keep)
        self._num_layers = len(layers)
        self._num_slots = len(layers) + keep_final
        self._frequent_shapes = frozenset(frequent_shapes)
        self._out = torch.empty(0)
        self._row_of = torch.empty(0, dtype=torch.long)

    def __enter__(self) -> "StateForward":
        self._capture.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._capture.__exit__(*exception)

    @property
    def has_final(self) -> bool:
        """Whether the last slot is the final state."""
        return self._num_slots > self._num_layers

    def new_rows(self, num_rows: int) -> Tensor:
        """Return memory on the device for the states of a batch, bfloat16 [S, num_rows, H]."""
        shape = (self._num_slots, num_rows, self._target.hidden_size)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    @torch.inference_mode()
    def states(self, samples: Sequence[np.ndarray], out: Tensor) -> Tensor:
        """Put the states of samples, each int32 [length], into `out`; does not wait for a GPU.

        Args:
            out: bfloat16 [S, at least R, H], from `new_rows`.

        Returns:
            Which rows are finite, bool [S, R], on the device.
        """
        ids, row_of = _right_padded(samples)
        self._out, self._row_of = out, self._to_device(row_of)
        is_frequent = tuple(ids.shape) in self._frequent_shapes
        with nullcontext() if is_frequent else unplanned_attention():
            result = self._target.base(input_ids=self._to_device(ids), use_cache=False)
        final = result.last_hidden_state
        slots = self._capture.take()
        if self.has_final:
            slots.append(self._keep(self._num_layers, final))
        self._out = torch.empty(0)
        # The largest magnitude is finite if and only if every value is: one pass.
        largest = [torch.linalg.vector_norm(rows, torch.inf, dim=1) for rows in slots]
        return torch.stack(largest).isfinite()

    def __call__(self, samples: Sequence[np.ndarray]) -> BatchStates:
        """Return the states of a few samples, each int32 [length], copied to host memory."""
        rows = self.new_rows(sum(map(len, samples)))
        is_finite = self.states(samples, rows)
        patterns = bits_of(rows.cpu())
        return BatchStates(
            features=patterns[: self._num_layers],
            final=patterns[-1] if self.has_final else None,
            is_finite=is_finite.cpu().numpy(),
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        # From page-locked memory the copy waits for nothing that runs there.
        on_host = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return on_host.to(self.device, non_blocking=True)

    def _keep(self, slot: int, state: Tensor) -> Tensor:
        """Copy a padded state [batch, T, H] into its slot; returns the rows [R, H]."""
        out, flat = self._out[slot, : len(self._row_of)], state.flatten(0, 1)
        if flat.dtype == out.dtype:
            torch.index_select(flat, 0, self._row_of, out=out)
        else:
            out.copy_(flat.index_select(0, self._row_of))
        return out


def _right_padded(samples: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return int64 [batch, T], and where the samples' rows are in it flattened, int64 [R]."""
    lengths = np.array([len(sample) for sample in samples])
    width = int(lengths.max())
    ids = np.zeros((len(samples), width), np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
    rows = np.concatenate([i * width + np.arange(n) for i, n in enumerate(lengths)])
    return torch.from_numpy(ids), torch.from_numpy(rows)
