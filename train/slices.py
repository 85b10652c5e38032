"""A module's parameters in slices: every process owns some rows of each.

What `flat.py` does for parameters that are owned whole. Values and gradients come and go with the
passes (`sharding.py`); what is left to do here is what needs a parameter whole.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dflash_offline.train.distributed import World, gather_rows, scatter_rows, with_the_others
from dflash_offline.train.flat import FlatParameters


class SlicedParameters:
    """Parameters whose weights are shared out; see `FlatParameters` for what is not said here.

    Attributes:
        own: this process's slices, by name, in the module's order; some may be empty.
        gradients: of the slices, flat.
    """

    def __init__(self, named: dict[str, DTensor], world: World) -> None:
        self._world = world
        self._named = named
        own = {name: each.to_local().detach() for name, each in named.items()}
        sizes = [each.numel() for each in own.values()]
        first = next(iter(own.values()))
        self.gradients = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.own: dict[str, nn.Parameter] = {}
        for (name, values), part in zip(own.items(), self.gradients.split(sizes), strict=True):
            gradient = part.view(values.shape)
            # Backward adds to a gradient that is there.
            named[name].grad = self._like(name, gradient)
            self.own[name] = nn.Parameter(values)
            self.own[name].grad = gradient

    @property
    def own_gradients(self) -> torch.Tensor:
        """The gradients, summed over the job."""
        return self.gradients

    def sum_gradients(self) -> None:
        """Do nothing: backward has done it."""

    def share_values(self) -> None:
        """Do nothing: the next pass does it."""

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter, whole, on every process."""
        with with_the_others():
            return self._named[name].detach().full_tensor()

    def whole_state(self, name: str, mine: torch.Tensor | None) -> torch.Tensor:
        """Return what belongs to a parameter, whole; `mine` is this process's slice of it."""
        assert mine is not None, f"no slice of {name}"
        with with_the_others():
            return self._like(name, mine).full_tensor()

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's slice of what belongs to a parameter.

        Raises:
            RuntimeError: it is of another shape than the parameter.
        """
        if whole.shape != self._named[name].shape:
            raise RuntimeError(
                f"{name} has shape {tuple(whole.shape)}, not {tuple(self._named[name].shape)}"
            )
        rows = self._rows(name)
        return whole[self._world.rank * rows :][:rows]

    def on_whole(
        self,
        names: Sequence[str],
        part_of: Callable[[str], torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this process's slice of `function` of each matrix; a process makes one a round.

        Args:
            names: of matrices, in the same order on every process.
            part_of: returns this process's slice of a matrix.
            function: of a whole matrix.
        """
        for first in range(0, len(names), self._world.size):
            names_of_round = names[first : first + self._world.size]
            mine = None
            for rank, name in enumerate(names_of_round):
                given = gather_rows(part_of(name), self._world, rows=self._rows(name), to=rank)
                if given is not None:
                    mine = given[: self._named[name].shape[0]]
            made = None if mine is None else function(mine).to(mine.dtype)
            for rank, name in enumerate(names_of_round):
                rows, own = self._rows(name), self.own[name].detach()
                given = made if rank == self._world.rank else None
                yield name, scatter_rows(given, own, self._world, rows=rows, source=rank)

    def _rows(self, name: str) -> int:
        """Return how many rows the first process holds; the last ones may hold fewer."""
        return -(-self._named[name].shape[0] // self._world.size)

    def _like(self, name: str, mine: torch.Tensor) -> DTensor:
        parameter = self._named[name]
        return DTensor.from_local(
            mine,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def parts_of(module: nn.Module, world: World) -> FlatParameters | SlicedParameters:
    """Return a module's parameters as they lie: in slices, or each whole with its owner."""
    named = dict(module.named_parameters())
    slices = {name: each for name, each in named.items() if isinstance(each, DTensor)}
    if not slices:
        return FlatParameters(module, world)
    assert len(slices) == len(named), "some parameters are shared out and some are not"
    return SlicedParameters(slices, world)
