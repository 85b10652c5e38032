"""Bias-free projections, alone or several of one input, and how their gradients are summed.

Weights are fp32 masters. Outside of `Copies.in_use` a projection casts them inside the graph;
inside, it reads copies in the compute dtype that were made once for the step, and backward adds
each weight's gradient to the master's own with one product that sums in fp32: no gradient is
rounded to the compute dtype, and none is stored before it is added. Where weights are shared out to
processes (`Gathered`), they come in the compute dtype for as long as a pass needs them, and their
gradients leave as fp32 tensors.

Letters: N rows, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_offline.kernels.linear_fp8 import Fp8Weight, product, quantize_rows


class Linear(nn.Module):
    """Bias-free projection; the weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        # Of the weight, while `Copies` are in use.
        self.copy: Tensor | None = None
        self.fp8: Fp8Weight | None = None
        self.gathered: Gathered | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return project(x, self)[0]


def project(x: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
    """Return x @ W.T for each projection's W.

    Args:
        x: [N, I]
        projections: of I inputs.

    Returns:
        [N, O] each.
    """
    weights = [each.weight for each in projections]
    gathered = projections[0].gathered
    if gathered is not None:
        return _GatheredProjections.apply(
            x, [each in gathered.fp8 for each in projections], *weights
        )
    copies = [each.copy for each in projections if each.copy is not None]
    if len(copies) < len(projections):
        return tuple(F.linear(x, weight.to(x.dtype)) for weight in weights)
    return _Projections.apply(x, copies, [each.fp8 for each in projections], *weights)


def project_wide(x: Tensor, projections: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Return what `project` does, made by one product; the results are columns of one tensor.

    Never in FP8: one product for all is as fast as several in FP8 and their sums.
    """
    copies = [each.copy for each in projections if each.copy is not None]
    sizes = [each.weight.shape[0] for each in projections]
    if len(copies) < len(projections):
        wide = torch.cat([each.weight.to(x.dtype) for each in projections])
        return F.linear(x, wide).split(sizes, dim=-1)
    wide = _neighbours(copies)
    return _WideProjection.apply(x, wide, *(each.weight for each in projections)).split(sizes, -1)


class Shared(NamedTuple):
    """What `share` returns: an input [N, I] of several calls of `project_shared`."""

    values: Tensor  # without a graph
    sum: Tensor  # one fp32 number in the shape of the values; its gradient is theirs


def share(x: Tensor) -> Shared:
    """Let x [N, I] be read by several; their gradients of it are summed in fp32, rounded once."""
    return Shared(x.detach(), _SumOfGradients.apply(x))


def project_shared(x: Shared, *projections: Linear) -> tuple[Tensor, ...]:
    """Return what `project` does, of gathered weights and never in FP8.

    What `project_wide` does in one product, several calls do apart, and round at the same places.
    """
    return _SharedProjections.apply(*x, *(each.weight for each in projections))


class _Projections(torch.autograd.Function):
    """Keeps x; copies and masters stay where they are until the step is over."""

    @staticmethod
    def forward(ctx, x, copies, fp8, *masters):
        ctx.save_for_backward(x)
        ctx.copies, ctx.fp8, ctx.masters = copies, fp8, masters
        rows = quantize_rows(x) if any(fp8) else None
        return tuple(
            F.linear(x, copy)
            if rows is None or weight is None
            else product(rows, weight.by_output, weight.output_scale, x.dtype)
            for copy, weight in zip(copies, fp8, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        dx = None
        for grad, copy, fp8, master in zip(grads, ctx.copies, ctx.fp8, ctx.masters, strict=True):
            if ctx.needs_input_grad[0]:
                dx = _add_input_grad(dx, grad, copy, fp8)
            _add_product(master.grad, grad.t(), x)
        return dx, None, None, *(None for _ in ctx.masters)


class _WideProjection(torch.autograd.Function):
    """`_Projections` with the copies side by side, and so one product for dx."""

    @staticmethod
    def forward(ctx, x, wide, *masters):
        ctx.save_for_backward(x)
        ctx.wide, ctx.masters = wide, masters
        return F.linear(x, wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        parts = grad.split([master.shape[0] for master in ctx.masters], dim=-1)
        for part, master in zip(parts, ctx.masters, strict=True):
            _add_product(master.grad, part.t(), x)
        dx = grad @ ctx.wide if ctx.needs_input_grad[0] else None
        return dx, None, *(None for _ in ctx.masters)


class _GatheredProjections(torch.autograd.Function):
    """Weights may be gone between forward and backward; what FP8 makes of them is made twice."""

    @staticmethod
    def forward(ctx, x, in_fp8, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.in_fp8 = in_fp8
        rows = quantize_rows(x) if any(in_fp8) else None
        return tuple(
            F.linear(x, weight)
            if fp8 is None
            else product(rows, fp8.by_output, fp8.output_scale, x.dtype)
            for weight, fp8 in zip(weights, _each_in_fp8(weights, in_fp8), strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            for grad, weight, fp8 in zip(
                grads, weights, _each_in_fp8(weights, ctx.in_fp8), strict=True
            ):
                dx = _add_input_grad(dx, grad, weight, fp8)
        return dx, None, *(_product(grad.t(), x) for grad in grads)


class _SumOfGradients(torch.autograd.Function):
    """Stands for x where gradients of it are added up."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad.to(ctx.dtype)


class _SharedProjections(torch.autograd.Function):
    """`_GatheredProjections` that leaves dx in fp32."""

    @staticmethod
    def forward(ctx, x, _sum, *weights):
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for grad, weight in zip(grads, weights, strict=True):
            _add_product(dx, grad, weight)
        return None, dx, *(_product(grad.t(), x) for grad in grads)


def _each_in_fp8(weights: Sequence[Tensor], in_fp8: Sequence[bool]) -> Iterator[Fp8Weight | None]:
    """Yield weights in FP8 one by one, None where not wanted."""
    for weight, wanted in zip(weights, in_fp8, strict=True):
        if not wanted:
            yield None
            continue
        fp8 = Fp8Weight.empty_like(weight)
        fp8.fill(weight)
        yield fp8


def _add_input_grad(dx: Tensor | None, grad: Tensor, copy: Tensor, fp8: Fp8Weight | None) -> Tensor:
    """Return dx + grad @ W, in place where there is a dx."""
    if fp8 is None:
        return grad @ copy if dx is None else dx.addmm_(grad, copy)
    added = product(quantize_rows(grad), fp8.by_input, fp8.input_scale, grad.dtype)
    return added if dx is None else dx.add_(added)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to an fp32 matrix; the product is not rounded in between."""
    if total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, not rounded in between."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _neighbours(copies: Sequence[Tensor]) -> Tensor:
    """View matrices that lie one after the other in memory as one."""
    rows = sum(copy.shape[0] for copy in copies)
    first = copies[0]
    last = copies[-1]
    end = first.storage_offset() + rows * first.shape[1]
    assert last.storage_offset() + last.numel() == end, "copies do not lie side by side"
    return first.as_strided((rows, first.shape[1]), first.stride())


class Copies:
    """Copies of projections' weights in the compute dtype, kept between steps.

    Args:
        projections: in the order in which the copies lie in memory.
        fp8: those of them that also have a copy in FP8, for two of their three products.
    """

    def __init__(self, projections: Sequence[Linear], fp8: Sequence[Linear] = ()) -> None:
        self._projections = list(projections)
        self._fp8 = [(each, Fp8Weight.empty_like(each.weight)) for each in fp8]
        self._flat: Tensor | None = None
        self._copies: list[Tensor] = []

    @contextmanager
    def in_use(self, dtype: torch.dtype) -> Iterator[None]:
        """Make the copies from the masters as they are, and have projections read them inside.

        Does nothing where masters need no cast, or where their gradients are not plain fp32
        tensors to add to, as with sharded parameters.
        """
        weights = [each.weight for each in self._projections]
        if not all(_is_master(weight, dtype) for weight in weights):
            yield
            return
        with torch.no_grad():
            self._allocate(dtype, weights)
            torch._foreach_copy_(self._copies, weights)
        try:
            for each, copy in zip(self._projections, self._copies, strict=True):
                each.copy = copy
            for each, fp8 in self._fp8:
                fp8.fill(each.copy)
                each.fp8 = fp8
            yield
        finally:
            for each in self._projections:
                each.copy = each.fp8 = None

    def _allocate(self, dtype: torch.dtype, weights: Sequence[Tensor]) -> None:
        device = weights[0].device
        if self._flat is not None and self._flat.dtype == dtype and self._flat.device == device:
            return
        sizes = [weight.numel() for weight in weights]
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = self._flat.split(sizes)
        self._copies = [p.view(w.shape) for p, w in zip(parts, weights, strict=True)]


class Gathered:
    """Takes the place of `Copies` where weights are shared out: whole for a while, in one dtype.

    Args:
        projections: their weights become so, for good.
        fp8: those of them that have two of their three products in FP8.

    Raises:
        ValueError: a width of those is not a multiple of 16.
    """

    def __init__(self, projections: Sequence[Linear], fp8: Sequence[Linear] = ()) -> None:
        for each in fp8:
            Fp8Weight.empty_like(torch.empty(each.weight.shape, device="meta"))
        self.fp8 = frozenset(fp8)
        for each in projections:
            each.gathered = self

    def in_use(self, _dtype: torch.dtype) -> AbstractContextManager[None]:
        """Do nothing: weights are in the compute dtype whenever they are there."""
        return nullcontext()


def _is_master(weight: Tensor, dtype: torch.dtype) -> bool:
    grad = weight.grad
    return (
        weight.dtype == torch.float32 != dtype
        and type(grad) is torch.Tensor
        and grad.dtype == torch.float32
        and grad.shape == weight.shape
    )
