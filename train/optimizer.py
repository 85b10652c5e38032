"""AdamW on fp32 masters that normalises, clips and skips on the device, without a host wait."""

from collections.abc import Mapping

import torch
from torch import nn

MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"


class Optimizer:
    """Fused AdamW over a module's named parameters, its state addressed by their names.

    Args:
        module: its parameters are the masters; matrices decay, vectors do not.
        weight_decay: decoupled decay a step, in units of the learning rate.
        betas: decay rates of the two moments.
    """

    def __init__(
        self, module: nn.Module, *, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        self._named = dict(module.named_parameters())
        for parameter in self._named.values():
            parameter.grad = torch.zeros_like(parameter)
        matrices = [each for each in self._named.values() if each.dim() > 1]
        vectors = [each for each in self._named.values() if each.dim() <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=betas,
            fused=True,
        )
        for parameter in self._named.values():
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                FIRST: torch.zeros_like(parameter),
                SECOND: torch.zeros_like(parameter),
            }

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The accumulated gradients, in the module's order."""
        return [each.grad for each in self._named.values() if each.grad is not None]

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        torch._foreach_zero_(self.gradients)

    def step(
        self, *, lr: float, weight_sum: torch.Tensor, clip: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide the gradients by `weight_sum`, clip their norm, and update unless non-finite.

        Args:
            lr: learning rate of this step.
            weight_sum: [], sum of the weights behind the gradients, over the whole job.
            clip: largest norm; longer gradients are scaled to it.

        Returns:
            The norm before clipping and 1.0 if the step was skipped, both [] on the device.
        """
        gradients = self.gradients
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        norm = total / weight_sum
        skipped = (~torch.isfinite(norm)).float()
        factor = torch.clamp(clip / norm, max=1.0) / weight_sum
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        for group in self._adam.param_groups:
            group["lr"] = lr
        # The hook through which GradScaler tells the fused kernel to leave everything as it is.
        self._adam.found_inf = skipped  # type: ignore[attr-defined]
        self._adam.step()
        return norm, skipped

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return masters and moments by `<kind>.<parameter name>`, and the step count."""
        out = {"step": self._state(next(iter(self._named)))["step"]}
        for name, parameter in self._named.items():
            out[f"{MASTER}.{name}"] = parameter.detach()
            out[f"{FIRST}.{name}"] = self._state(name)[FIRST]
            out[f"{SECOND}.{name}"] = self._state(name)[SECOND]
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take masters, moments and step count from what `tensors` returned."""
        for name, parameter in self._named.items():
            parameter.copy_(tensors[f"{MASTER}.{name}"])
            state = self._state(name)
            state["step"].copy_(tensors["step"])
            state[FIRST].copy_(tensors[f"{FIRST}.{name}"])
            state[SECOND].copy_(tensors[f"{SECOND}.{name}"])

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        return self._adam.state[self._named[name]]
