"""Projections on copies of their weights: the same results, gradients summed in fp32."""

import contextlib

import pytest
import torch

from dflash_offline.train.projections import (
    Copies,
    Gathered,
    Linear,
    project,
    project_shared,
    project_wide,
    share,
)
from dflash_offline.train.stream import assemble

SIZES = (6, 10, 4)


@pytest.fixture
def projections() -> list[Linear]:
    torch.manual_seed(0)
    made = [Linear(8, size) for size in SIZES]
    for each in made:
        torch.nn.init.normal_(each.weight)
        each.weight.grad = torch.ones_like(each.weight)
    return made


@pytest.fixture
def gathered() -> list[Linear]:
    """Projections whose weights are there in bfloat16, as while a layer of slices runs."""
    torch.manual_seed(0)
    made = [Linear(32, size).bfloat16() for size in (48, 16)]
    for each in made:
        torch.nn.init.normal_(each.weight)
        each.weight.grad_dtype = torch.float32
    return made


@pytest.mark.parametrize("form", ["apart", "shared"])
def test_gradients_of_gathered_weights_leave_unrounded(gathered, form):
    Gathered(gathered)
    x = torch.randn(37, 32, dtype=torch.bfloat16, requires_grad=True)
    if form == "apart":
        given = project(x, *gathered)
    else:
        shared = share(x)
        given = [project_shared(shared, each)[0] for each in gathered]
    upstream = [torch.randn_like(each) for each in given]
    torch.autograd.backward(given, upstream)
    dx = torch.zeros(37, 32, dtype=torch.float64)
    for each, y, dy in zip(gathered, given, upstream, strict=True):
        assert torch.equal(y, torch.nn.functional.linear(x.detach(), each.weight))
        exact = dy.double().t() @ x.detach().double()
        torch.testing.assert_close(each.weight.grad.double(), exact, rtol=1e-6, atol=1e-5)
        rounded = exact.bfloat16().double()
        assert (rounded - exact).abs().max() > 1e-3, "the bound above would let rounding pass"
        dx += dy.double() @ each.weight.detach().double()
    if form == "apart":
        assert (x.grad.double() - dx).norm() < 1e-2 * dx.norm()
    else:
        # Rounded once, and a few sums that lie between two numbers the other way.
        assert (x.grad != dx.bfloat16()).float().mean() < 0.01


def test_gathered_weights_in_fp8_give_what_copies_give(gathered):
    masters = [Linear(32, each.weight.shape[0]) for each in gathered]
    for each, master in zip(gathered, masters, strict=True):
        master.weight.data.copy_(each.weight)
        master.weight.grad = torch.zeros_like(master.weight)
    Gathered(gathered, gathered[:1])
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    found = {}
    for name, projections in (("copies", masters), ("gathered", gathered)):
        given = x.clone().requires_grad_()
        with Copies(masters, masters[:1]).in_use(torch.bfloat16):
            out = project(given, *projections)
            torch.autograd.backward(out, [torch.ones_like(each) for each in out])
        grads = [each.weight.grad for each in projections]
        found[name] = [*out, given.grad, *grads]
    for ours, theirs in zip(found["gathered"], found["copies"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", ["apart", "wide"])
def test_gradients_reach_the_masters_unrounded(projections, form):
    x = torch.randn(37, 8, dtype=torch.bfloat16, requires_grad=True)
    upstream = [torch.randn(37, size, dtype=torch.bfloat16) for size in SIZES]
    with Copies(projections).in_use(torch.bfloat16):
        given = project(x, *projections) if form == "apart" else project_wide(x, projections)
        torch.autograd.backward(given, upstream)
    dx = torch.zeros(37, 8, dtype=torch.float64)
    for each, y, dy in zip(projections, given, upstream, strict=True):
        weight = each.weight.detach().bfloat16()
        assert torch.equal(y, torch.nn.functional.linear(x.detach(), weight)), "one rounding"
        expected = 1 + dy.double().t() @ x.detach().double()
        torch.testing.assert_close(each.weight.grad.double(), expected, rtol=1e-6, atol=1e-5)
        dx += dy.double() @ weight.double()
    assert (x.grad.double() - dx).norm() < 1e-2 * dx.norm()


def pair_with_input() -> tuple[list[Linear], torch.Tensor]:
    """Two projections of widths that FP8 products take, and bfloat16 rows for them."""
    made = [Linear(32, 48), Linear(32, 16)]
    for each in made:
        torch.nn.init.normal_(each.weight)
        each.weight.grad = torch.zeros_like(each.weight)
    return made, torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)


def test_fp8_rounds_two_products_and_not_the_weights_gradient():
    torch.manual_seed(1)
    projections, x = pair_with_input()
    found = {}
    for name, fp8 in (("bf16", ()), ("fp8", projections[:1])):
        x.grad = None
        with Copies(projections, fp8).in_use(torch.bfloat16):
            out = project(x, *projections)
            torch.autograd.backward(out, [torch.ones_like(each) for each in out])
        found[name] = (out[0].double(), out[1].double(), x.grad.double())
    for plain, rounded, limits in zip(
        found["bf16"], found["fp8"], ((0.01, 0.06), (0, 0), (1e-3, 0.06)), strict=True
    ):
        error = ((plain - rounded).norm() / plain.norm()).item()
        assert limits[0] <= error <= limits[1]
    # Twice the same gradient: it is made from x and dy as they are.
    expected = 2 * torch.ones(48, 64, dtype=torch.float64) @ x.detach().double()
    torch.testing.assert_close(projections[0].weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_fp8", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_of_an_input_add_up_in_fp8(in_fp8):
    torch.manual_seed(2)
    projections, x = pair_with_input()
    upstream = [torch.randn(64, each.weight.shape[0]).bfloat16() for each in projections]
    with Copies(projections, [projections[i] for i in in_fp8]).in_use(torch.bfloat16):
        torch.autograd.backward(project(x, *projections), upstream)
    dx = sum(
        grad.double() @ each.weight.detach().double()
        for grad, each in zip(upstream, projections, strict=True)
    )
    assert (x.grad.double() - dx).norm() < 0.06 * dx.norm()


def test_fp8_needs_widths_of_16():
    with pytest.raises(ValueError, match="multiples of 16"):
        Copies([], [Linear(8, 16)])
    with pytest.raises(ValueError, match="multiples of 16"):
        Gathered([], [Linear(8, 16)])


def test_outside_and_where_masters_need_no_cast_weights_are_read(projections):
    x = torch.randn(5, 8)
    copies = Copies(projections)
    with copies.in_use(torch.float32):
        assert all(each.copy is None for each in projections)
    with copies.in_use(torch.bfloat16):
        assert all(each.copy is not None for each in projections)
    with torch.no_grad():
        projections[0].weight.mul_(2)
    assert torch.equal(projections[0](x), x @ projections[0].weight.t())
    # A gradient that is not there yet, as before the first optimiser.
    projections[1].weight.grad = None
    with copies.in_use(torch.bfloat16):
        assert all(each.copy is None for each in projections)


def test_passes_with_copies_are_nearer_to_fp64(toy_maker):
    """Two passes in bfloat16 on fp32 masters, with copies and without, against fp64."""
    found = {}
    for name, dtype in (("exact", torch.float64), ("copies", None), ("graph", None)):
        toy = toy_maker(dtype or torch.float32)
        dtype = dtype or torch.bfloat16
        for parameter in toy.drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        copies = toy.drafter.cast_once(dtype) if name == "copies" else contextlib.nullcontext()
        with copies:
            for length in (19, 24):
                given = assemble([toy.document(length, seed=length)], toy.options())
                given = given.to(torch.device("cpu"), dtype)
                embeddings = toy.head.embed.to(dtype)[given.tables.block_tokens]
                hidden = toy.drafter(given.features, embeddings, given.tables)
                wanted = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
                (hidden * wanted.to(dtype)).sum().backward()
        found[name] = torch.cat([p.grad.double().flatten() for p in toy.drafter.parameters()])
    exact = found["exact"]
    errors = {name: float((each - exact).norm() / exact.norm()) for name, each in found.items()}
    assert 0 < errors["copies"] < 1.05 * errors["graph"] < 0.1
