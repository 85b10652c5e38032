"""A Hugging Face target's cache that can take back the tokens a verification refused.

Keys and values of full attention are cut, those of a sliding window are put together again from
before and after the forward, and recurrent layers (GatedDeltaNet, convolutions, state space), whose
state cannot be undone, go back to a snapshot from which the kept tokens are run again.

This is the one place that knows the cache classes of transformers.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class RollbackCache:
    """The state of one sequence in a target, with `mark` before and `take_back` after a forward.

    Args:
        config: the target's Hugging Face configuration; says what kind of state each layer has.
    """

    def __init__(self, config: Any) -> None:
        self.layers_state = DynamicCache(config=config)
        self._marks: list[_Mark] = []

    def mark(self) -> None:
        """Remember the present state; recurrent states are copied, keys and values are not."""
        self._marks = [_mark_of(layer) for layer in self.layers_state.layers]

    def take_back(self, fed: int, *, kept: int) -> bool:
        """Forget the last `fed - kept` tokens of the forward that ran since `mark`.

        Args:
            fed: tokens of that forward.
            kept: how many of them stay, counted from the first.

        Returns:
            True when the state is that after the kept tokens; False when some layer cannot do
            that and every layer is back at the mark, so that the kept tokens must be run again.
        """
        assert 0 <= kept <= fed
        if kept == fed:
            return True
        again = not all(mark.can_cut(fed) for mark in self._marks)
        for mark in self._marks:
            mark.cut(fed, kept=0 if again else kept)
        return not again


class _Mark:
    """A layer's state at `RollbackCache.mark`; this one is for layers without any state."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def can_cut(self, _fed: int) -> bool:
        return not _tensors_in(self.layer)

    def cut(self, _fed: int, *, kept: int) -> None:
        """Put the layer into the state after `kept` tokens."""


class _FullMark(_Mark):
    def can_cut(self, _fed: int) -> bool:
        return True

    def cut(self, fed: int, *, kept: int) -> None:
        if not self.layer.is_initialized:
            return
        end = self.layer.keys.shape[-2] - (fed - kept)
        self.layer.keys = self.layer.keys[..., :end, :]
        self.layer.values = self.layer.values[..., :end, :]


class _SlidingMark(_Mark):
    """The window before the forward; the layer itself has dropped what it pushed out."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.keys, self.values = layer.keys, layer.values
        self.length = layer.cumulative_length

    def can_cut(self, fed: int) -> bool:
        return self.keys is not None and self.layer.sliding_window - 1 >= fed

    def cut(self, fed: int, *, kept: int) -> None:
        self.layer.keys = self._put_together(self.keys, self.layer.keys, fed, kept)
        self.layer.values = self._put_together(self.values, self.layer.values, fed, kept)
        self.layer.cumulative_length = self.length + kept

    def _put_together(self, before: Tensor, after: Tensor, fed: int, kept: int) -> Tensor:
        if kept == 0:
            return before
        first = after.shape[-2] - fed
        window = torch.cat([before, after[..., first : first + kept, :]], dim=-2)
        return window[..., -(self.layer.sliding_window - 1) :, :]


class _SnapshotMark(_Mark):
    """A copy of everything the layer holds, because its states are overwritten in place."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.state = {name: _copy(value) for name, value in vars(layer).items()}

    def can_cut(self, _fed: int) -> bool:
        return False

    def cut(self, _fed: int, *, kept: int) -> None:
        assert kept == 0, "a recurrent state only goes back to the mark"
        vars(self.layer).update(self.state)


def _mark_of(layer: Any) -> _Mark:
    # Exact types: a subclass (indexed, quantised, hybrid) holds more than keys and values.
    if type(layer) is DynamicLayer:
        return _FullMark(layer)
    if type(layer) is DynamicSlidingWindowLayer:
        return _SlidingMark(layer)
    return _SnapshotMark(layer) if _tensors_in(layer) else _Mark(layer)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy(each) for each in value]
    return value


def _tensors_in(layer: Any) -> bool:
    def found(value: Any) -> bool:
        if isinstance(value, dict):
            return any(found(each) for each in value.values())
        if isinstance(value, list | tuple):
            return any(found(each) for each in value)
        return isinstance(value, Tensor)

    return any(found(value) for value in vars(layer).values())
