"""A module's parameters and gradients in two flat buffers, cut by the process that updates them.

Every process holds all values and all gradients, and owns some parameters, whole, so that a matrix
is never cut. Parameters of one owner lie together: gradients reach it by one reduce-scatter, and
its new values reach the others by one all-gather.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dflash_offline.train.distributed import (
    World,
    from_rank,
    gather_from_owners,
    sum_to_owners,
)

# Every parameter starts at a multiple of so many elements: vector loads and descriptors want it.
_ALIGNMENT = 128


@dataclass(frozen=True)
class Plan:
    """Who owns which parameter, and where it lies; the same on every process."""

    owner: dict[str, int]
    start: dict[str, int]
    shard: int  # elements of one process's part

    @classmethod
    def of(cls, sizes: Mapping[str, int], world_size: int) -> "Plan":
        """Give each parameter, the largest first, to the process with the least so far."""
        held = [0] * world_size
        owner, start = {}, {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            rank = min(range(world_size), key=held.__getitem__)
            owner[name], start[name] = rank, held[rank]
            held[rank] += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        shard = max(held)
        return cls(owner, {name: owner[name] * shard + at for name, at in start.items()}, shard)


class FlatParameters:
    """Moves a module's parameters and gradients into flat buffers.

    Attributes:
        own: the parameters that this process updates, by name, in the module's order.
        plan: who owns what.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        named = dict(module.named_parameters())
        first = next(iter(named.values()))
        self.plan = Plan.of({name: each.numel() for name, each in named.items()}, world.size)
        self._world = world
        self._named = named
        kind = {"dtype": first.dtype, "device": first.device}
        self._values = torch.zeros(self.plan.shard * world.size, **kind)
        self.gradients = torch.zeros_like(self._values)
        for name, parameter in named.items():
            part = slice(self.plan.start[name], self.plan.start[name] + parameter.numel())
            values = self._values[part].view(parameter.shape)
            values.copy_(parameter.detach())
            parameter.data = values
            parameter.grad = self.gradients[part].view(parameter.shape)
        self.own = {name: each for name, each in named.items() if self._is_mine(name)}

    @property
    def own_gradients(self) -> torch.Tensor:
        """This process's part of the gradients, flat."""
        return self._mine(self.gradients)

    def sum_gradients(self) -> None:
        """Replace this process's part of the gradients by its sum over the job."""
        if self._world.size > 1:
            sum_to_owners(self.gradients, self._mine(self.gradients))

    def share_values(self) -> None:
        """Hand the values that this process owns to all others, and take theirs."""
        if self._world.size > 1:
            gather_from_owners(self._values, self._mine(self._values))

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter, which every process has."""
        return self._named[name].detach()

    def whole_state(self, name: str, mine: torch.Tensor | None) -> torch.Tensor:
        """Return what belongs to a parameter, on every process; `mine` on its owner only."""
        if self._world.size == 1:
            assert mine is not None
            return mine
        given = torch.empty_like(self.whole(name)) if mine is None else mine
        from_rank(given, self.plan.owner[name])
        return given

    def part(self, _name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what an owner keeps of what belongs to its parameter: all of it."""
        return whole

    def on_whole(
        self,
        names: Sequence[str],
        part_of: Callable[[str], torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `function(part_of(name))` for the parameters that this process owns."""
        for name in names:
            if name in self.own:
                yield name, function(part_of(name))

    def _is_mine(self, name: str) -> bool:
        return self.plan.owner[name] == self._world.rank

    def _mine(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._world.rank * self.plan.shard :][: self.plan.shard]
