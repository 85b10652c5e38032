"""Norms, rotary positions and SwiGLU: values and gradients against plain PyTorch in float64."""

import pytest
import torch

from dflash_offline.kernels import norm_rope as ops

POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 40_000, 5])


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta):
    """Qwen3's form: halves of a head are the two coordinates; frequencies and angles in float32."""
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angles = (positions.float()[:, None] * inverse).repeat(1, 2)[:, None]
    half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * angles.cos().double() + half * angles.sin().double()


def table(x, theta=1e4):
    positions = POSITIONS.to(x.device)
    return ops.rotary_table(positions, ops.inverse_frequencies(x.shape[-1], theta).to(x.device))


def silu_product(gate, up):
    return gate / (1 + (-gate).exp()) * up


# Name: (function of the op, function in float64, shapes of the differentiable inputs). Odd sizes:
# 63 and 1000 are not powers of two, 5 heads leave a tile's rows empty.
CASES = {
    "rms_norm": (
        lambda x, w, **k: ops.rms_norm(x, w, 1e-5, **k),
        lambda x, w: rms(x, w, 1e-5),
        [(5, 63), (63,)],
    ),
    "rms_norm, three axes": (
        lambda x, w, **k: ops.rms_norm(x, w, 1e-5, **k),
        lambda x, w: rms(x, w, 1e-5),
        [(3, 2, 64), (64,)],
    ),
    "add_rms_norm": (
        lambda x, r, w, **k: torch.cat(ops.add_rms_norm(x, r, w, 1e-5, **k)),
        lambda x, r, w: torch.cat([rms(x + r, w, 1e-5), x + r]),
        [(6, 1000), (6, 1000), (1000,)],
    ),
    "add_rms_norm, sum unused": (
        lambda x, r, w, **k: ops.add_rms_norm(x, r, w, 1e-5, **k)[0],
        lambda x, r, w: rms(x + r, w, 1e-5),
        [(6, 63), (6, 63), (63,)],
    ),
    "norm_rope": (
        lambda x, w, **k: ops.norm_rope(x, w, table(x, 1e6), eps=1e-6, **k),
        lambda x, w: rotate(rms(x, w, 1e-6), POSITIONS, 1e6),
        [(7, 5, 64), (64,)],
    ),
    "norm_rope, 96 channels": (
        lambda x, w, **k: ops.norm_rope(x, w, table(x, 1e4), eps=1e-6, **k),
        lambda x, w: rotate(rms(x, w, 1e-6), POSITIONS, 1e4),
        [(7, 1, 96), (96,)],
    ),
    "rope": (
        lambda x, **k: ops.rope(x, table(x, 1e6), **k),
        lambda x: rotate(x, POSITIONS, 1e6),
        [(7, 3, 16)],
    ),
    "swiglu": (lambda g, u, **k: ops.swiglu(g, u, **k), silu_product, [(7, 63), (7, 63)]),
    "swiglu_linear": (
        lambda g, u, w, **k: ops.swiglu_linear(g, u, w, **k),
        lambda g, u, w: silu_product(g, u) @ w.t(),
        [(7, 63), (7, 63), (11, 63)],
    ),
}


def errors(case, dtype, *, device="cpu", **kwargs):
    """Return relative errors of the value and of every gradient."""
    op, truth, shapes = case
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    given = [x.to(device, dtype).requires_grad_() for x in exact]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    out, wanted = op(*given, **kwargs), truth(*exact)
    upstream = torch.randn(wanted.shape, dtype=torch.float64, generator=generator).to(dtype)
    got = [out, *torch.autograd.grad(out, given, upstream.to(device))]
    want = [wanted, *torch.autograd.grad(wanted, exact, upstream.double())]
    return [
        ((a.detach().cpu().double() - b).norm() / b.norm()).item()
        for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_reference(case):
    assert all(e < 1e-13 for e in errors(case, torch.float64, implementation="reference"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels(case):
    assert all(e < 1e-6 for e in errors(case, torch.float32, implementation="triton"))


def test_strided_heads():
    """norm_rope reads heads out of one wide product."""
    wide = torch.randn(7, 3 * 64)
    weight = torch.rand(64)
    x = wide[:, 64:].unflatten(1, (2, 64)).detach().requires_grad_()
    grads = []
    for implementation in ("triton", "reference"):
        out = ops.norm_rope(x, weight, table(x), implementation=implementation)
        grads.append(torch.autograd.grad(out, x, torch.ones(1).expand_as(out))[0])
    torch.testing.assert_close(*grads)


def test_strided_weights_and_tables():
    x, weight = torch.randn(7, 2, 64), torch.rand(64, 2)[:, 0]
    wide = torch.cat([table(x), torch.zeros(7, 64)], 1)
    for op in (
        lambda *a, **k: ops.norm_rope(*a, wide[:, :64], **k),
        ops.rms_norm,
        lambda a, b, **k: ops.add_rms_norm(a, a, b, **k)[0],
    ):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        got = op(given[0], torch.stack([given[1]] * 2, 1)[:, 0], implementation="triton")
        wanted = op(*given, implementation="reference")
        torch.testing.assert_close(got, wanted)
        grads = (torch.autograd.grad(out.square().sum(), given) for out in (got, wanted))
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_no_rows(implementation):
    x, weight = torch.zeros(0, 2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    for out in (
        ops.rms_norm(x, weight, implementation=implementation),
        ops.norm_rope(x, weight, torch.zeros(0, 8), implementation=implementation),
    ):
        grads = torch.autograd.grad(out.sum(), [x, weight])
        assert grads[0].shape == x.shape
        assert not grads[1].any()


def test_bad_shapes():
    with pytest.raises(ValueError, match="weight has shape"):
        ops.rms_norm(torch.zeros(2, 8), torch.zeros(7), implementation="triton")
    with pytest.raises(ValueError, match="wide"):
        ops.rms_norm(torch.zeros(2, 20_000), torch.zeros(20_000), implementation="triton")
    with pytest.raises(ValueError, match="residual"):
        ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(8), torch.zeros(8), implementation="triton")
    # What would read behind a tensor's end.
    x, weight, one = torch.zeros(2, 1, 8), torch.zeros(8), torch.zeros(1, 8)
    for implementation in ("triton", "reference"):
        with pytest.raises(ValueError, match="table is for"):
            ops.norm_rope(x, weight, one, implementation=implementation)
        with pytest.raises(ValueError, match="table is for"):
            ops.rope(x, one, implementation=implementation)
        with pytest.raises(ValueError, match="even"):
            ops.rope(x[..., :7], torch.zeros(2, 7), implementation=implementation)
    with pytest.raises(ValueError, match="as gate"):
        ops.swiglu(torch.zeros(2, 8), torch.zeros(1, 8), implementation="triton")
    with pytest.raises(ValueError, match="as gate"):
        ops.swiglu_linear(x[0], x[0, :, :4], torch.zeros(3, 8), implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_in_bfloat16(case):
    got = errors(case, torch.bfloat16, device="cuda")
    # One rounding to 8 bits of a value: 2 ** -9 at most, about half of it on average.
    assert all(e < 4e-3 for e in got)
