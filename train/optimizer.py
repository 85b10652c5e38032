"""The optimiser: masters, their state, and a step that never makes the host wait.

Gradients come in unnormalised; the step sums them over the job, divides, clips, and skips what is
not finite, all on the device. Each process keeps the state of what it owns: some parameters whole,
or slices of all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from dflash_offline.train.distributed import World, sum_over_ranks
from dflash_offline.train.muon import follow, move, orthogonal
from dflash_offline.train.slices import parts_of

ADAMW, MUON = "adamw", "muon"
STEP, MASTER, FIRST, SECOND, MOMENTUM, EMA = (
    "step",
    "master",
    "exp_avg",
    "exp_avg_sq",
    "momentum",
    "ema",
)


class Optimizer:
    """Fused AdamW, or Muon for matrices and AdamW for the rest.

    Args:
        module: its parameters are the masters; they move into a flat buffer, or are slices of a
            module whose weights are shared out. Matrices decay, vectors do not.
        weight_decay: decoupled decay a step, in units of the learning rate.
        betas: decay rates of AdamW's two moments.
        kind: `adamw` or `muon`.
        ema: decay of the running average of the masters, None for none.
        world: this process's place; others own the rest.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        weight_decay: float,
        betas: tuple[float, float],
        kind: str = ADAMW,
        ema: float | None = None,
        world: World | None = None,
    ) -> None:
        self._world = world or World()
        self._named = dict(module.named_parameters())
        self._parts = parts_of(module, self._world)
        self._weight_decay = weight_decay
        self._ema_decay = ema
        device = next(iter(self._named.values())).device
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        own = self._parts.own
        muon = {name for name in self._named if kind == MUON and self._named[name].dim() == 2}
        self._kinds = {
            name: [MASTER]
            + ([MOMENTUM] if name in muon else [FIRST, SECOND])
            + ([EMA] if ema is not None else [])
            for name in self._named
        }
        self._state = {
            name: {each: torch.zeros_like(own[name]) for each in self._kinds[name][1:]}
            for name in own
        }
        if ema is not None:
            for name, parameter in own.items():
                self._state[name][EMA].copy_(parameter.detach())
        self._matrices = [name for name in self._named if name in muon]
        moved = [name for name in own if name not in muon and own[name].numel()]
        self._adam = self._make_adam(moved, betas)

    def _make_adam(self, names: list[str], betas: tuple[float, float]) -> torch.optim.AdamW | None:
        if not names:
            return None
        parameters = [self._parts.own[name] for name in names]
        adam = torch.optim.AdamW(
            [
                {
                    "params": [each for each in parameters if each.dim() > 1],
                    "weight_decay": self._weight_decay,
                },
                {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=betas,
            fused=True,
        )
        for name in names:
            adam.state[self._parts.own[name]] = {
                # One for each, because the fused step raises every one of them.
                "step": torch.zeros_like(self._step),
                FIRST: self._state[name][FIRST],
                SECOND: self._state[name][SECOND],
            }
        return adam

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self._parts.gradients.zero_()

    @torch.no_grad()
    def step(
        self, *, lr: float, weight_sum: torch.Tensor, clip: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients over the job, divide by `weight_sum`, clip, update unless non-finite.

        Args:
            lr: learning rate of this step.
            weight_sum: [], sum of the weights behind the gradients, over the whole job.
            clip: largest norm; longer gradients are scaled to it.

        Returns:
            The norm before clipping and 1.0 if the step was skipped, both [] on the device.
        """
        self._parts.sum_gradients()
        norm = self._norm() / weight_sum
        skipped = (~torch.isfinite(norm)).float()
        factor = torch.clamp(clip / norm, max=1.0) / weight_sum
        gradients = self._parts.own_gradients
        gradients.mul_(factor.to(gradients.dtype))
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = lr
            # The hook through which GradScaler tells the fused kernel to leave all as it is.
            self._adam.found_inf = skipped  # type: ignore[attr-defined]
            self._adam.step()
        self._muon(lr, skipped)
        self._step += 1.0 - skipped
        self._average(skipped)
        self._parts.share_values()
        return norm, skipped

    def _muon(self, lr: float, skipped: torch.Tensor) -> None:
        def followed(name: str) -> torch.Tensor:
            _, gradient = self._own(name)
            return follow(gradient, self._state[name][MOMENTUM], skipped=skipped)

        for name, direction in self._parts.on_whole(self._matrices, followed, orthogonal):
            matrix, _ = self._own(name)
            move(
                matrix,
                direction,
                longer=max(self._named[name].shape),
                lr=lr,
                weight_decay=self._weight_decay,
                skipped=skipped,
            )

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole job's gradient, not divided."""
        gradients = [gradient for _, gradient in map(self._own, self._parts.own)]
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros_like(self._step)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._world.size == 1:
            return norm
        squares = norm.square().reshape(1)
        sum_over_ranks([squares])
        return squares.sqrt()[0]

    def _average(self, skipped: torch.Tensor) -> None:
        """Move the running averages; early steps weigh more, so that the start is forgotten."""
        if self._ema_decay is None:
            return
        decay = torch.clamp((1.0 + self._step) / (10.0 + self._step), max=self._ema_decay)
        weight = (1.0 - decay) * (1.0 - skipped)
        for name, parameter in self._parts.own.items():
            self._state[name][EMA].lerp_(parameter.detach(), weight.to(parameter.dtype))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the running averages into the module for a while, if there are any; all processes."""
        if self._ema_decay is None:
            yield
            return
        masters = {name: each.detach().clone() for name, each in self._parts.own.items()}
        self._set_own(lambda name: self._state[name][EMA])
        try:
            yield
        finally:
            self._set_own(masters.__getitem__)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return masters and state by `<kind>.<parameter name>`, and the step count, on the CPU.

        All processes take part; only the first gets any. Tensors may share the masters' memory.
        """
        out = {STEP: self._step.cpu()}
        for name in self._named:
            for kind in self._kinds[name]:
                if kind == MASTER:
                    whole = self._parts.whole(name)
                else:
                    mine = self._state[name][kind] if name in self._state else None
                    whole = self._parts.whole_state(name, mine)
                if self._world.is_first:
                    out[f"{kind}.{name}"] = whole.cpu()
        return out if self._world.is_first else {}

    def load(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take what `tensors` returned, at whatever number of processes.

        Args:
            read: returns a tensor by its name; asked only for what this process owns.
        """
        with torch.no_grad():
            self._step.copy_(read(STEP))
            for name in self._parts.own:
                for kind, tensor in self._state[name].items():
                    tensor.copy_(self._parts.part(name, read(f"{kind}.{name}")))
        self._set_own(lambda name: self._parts.part(name, read(f"{MASTER}.{name}")))
        for state in self._adam.state.values() if self._adam is not None else ():
            state["step"].copy_(self._step)

    @torch.no_grad()
    def _set_own(self, value: Callable[[str], torch.Tensor]) -> None:
        for name, parameter in self._parts.own.items():
            parameter.copy_(value(name))
        self._parts.share_values()

    def _own(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter of this process, and its gradient."""
        parameter = self._parts.own[name]
        assert parameter.grad is not None, f"{name} lost its gradient"
        return parameter.detach(), parameter.grad


def exported(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights to export among `Optimizer.tensors`: running averages, if there are."""
    kind = EMA if any(name.startswith(f"{EMA}.") for name in tensors) else MASTER
    return {
        name.removeprefix(f"{kind}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{kind}.")
    }
