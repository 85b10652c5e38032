"""Projections in FP8: the kernels quantise as the definition does, and a product is near."""

import pytest
import torch

from dflash_offline.kernels.linear_fp8 import Fp8Weight, product, quantize_rows


def assert_same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare float8 values as Triton's interpreter makes them.

    It loses the carry where a number is rounded up to a power of two, and ties go elsewhere.
    """
    got, wanted = got.float(), wanted.float()
    is_power = wanted.abs().clamp_min(1e-9).log2().frac() == 0
    assert is_power.float().mean() < 0.3
    assert (got == wanted)[~is_power].float().mean() > 0.98
    assert (got - wanted)[~is_power].abs().le(wanted[~is_power].abs() / 8).all()


@pytest.mark.parametrize(("rows", "width"), [(5, 16), (3, 80), (2, 2064)])
def test_quantize_rows(rows, width):
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width)[:, :width].mul_(torch.logspace(-3, 3, rows)[:, None])
    wanted = quantize_rows(x)
    torch.testing.assert_close(wanted.scales * 448, x.abs().amax(1, keepdim=True))
    error = (wanted.values.float() * wanted.scales - x).abs()
    # Three bits of mantissa, and steps of 2^-9 below 2^-6.
    assert (error <= x.abs() / 16 + wanted.scales * 2**-10).all()
    got = quantize_rows(x, implementation="triton")
    torch.testing.assert_close(got.scales, wanted.scales)
    assert_same_numbers(got.values, wanted.values)


def test_a_row_of_zeros_stays_zero():
    for implementation in ("reference", "triton"):
        got = quantize_rows(torch.zeros(2, 16), implementation=implementation)
        assert not got.values.float().any()
        assert (got.scales > 0).all()


@pytest.mark.parametrize("shape", [(16, 32), (80, 144)])
def test_weight_has_both_forms(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    wanted, got = (Fp8Weight.empty_like(weight) for _ in range(2))
    wanted.fill(weight)
    got.fill(weight, implementation="triton")
    for form in (
        wanted.by_output.float() * wanted.output_scale.t(),
        (wanted.by_input.float() * wanted.input_scale.t()).t(),
    ):
        assert ((form - weight.float()).norm() / weight.float().norm()) < 0.04
    assert_same_numbers(got.by_output, wanted.by_output)
    assert_same_numbers(got.by_input, wanted.by_input)


def test_product_is_near():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 48), torch.randn(32, 48)
    fp8 = Fp8Weight.empty_like(weight)
    fp8.fill(weight)
    y = product(quantize_rows(x), fp8.by_output, fp8.output_scale, torch.float32)
    assert ((y - x @ weight.t()).norm() / (x @ weight.t()).norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["forward", "input gradient"])
def test_on_a_gpu(form):
    torch.manual_seed(0)
    weight = torch.randn(1536, 512, device="cuda").bfloat16()
    fp8 = Fp8Weight.empty_like(weight)
    fp8.fill(weight)
    if form == "forward":
        x = torch.randn(1000, 512, device="cuda").bfloat16()
        y = product(quantize_rows(x), fp8.by_output, fp8.output_scale, torch.bfloat16)
        expected = x.double() @ weight.double().t()
    else:
        x = torch.randn(1000, 1536, device="cuda").bfloat16()
        y = product(quantize_rows(x), fp8.by_input, fp8.input_scale, torch.bfloat16)
        expected = x.double() @ weight.double()
    assert (y.double() - expected).norm() < 0.05 * expected.norm()
