"""The outputs of chosen decoder layers of a target, one forward at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dflash_offline.common.target import Target


class Capture:
    """Keep the outputs of chosen decoder layers of one forward at a time.

    ```python
    with Capture(target, (1, 9, 17)) as capture:
        final = target.base(input_ids=ids, use_cache=False).last_hidden_state
        states = capture.take()  # three tensors [batch, T, H]
    ```
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        *,
        keep: Callable[[int, torch.Tensor], torch.Tensor] = lambda _at, state: state,
    ) -> None:
        """Prepare hooks.

        Args:
            keep: what is kept of a state, given its place in `layers`; called as soon as the layer
                is done, so that the state itself need not outlive it.
        """
        self.layers = layers
        self._keep = keep
        self._modules = [target.layers[i] for i in layers]
        self._states: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Capture":
        for at, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(self._hook(at)))
        return self

    def __exit__(self, *_exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._states.clear()

    def _hook(self, at: int):
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            self._states[self.layers[at]] = self._keep(at, state)

        return keep

    def take(self) -> list[torch.Tensor]:
        """Hand over and forget what was kept of the K states of the last forward, in order."""
        missing = [layer for layer in self.layers if layer not in self._states]
        assert not missing, f"no forward ran through layers {missing} since the last take"
        states = [self._states[layer] for layer in self.layers]
        self._states.clear()
        return states
