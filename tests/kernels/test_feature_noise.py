"""Noise by counter: what it looks like, and the same from the kernel as from plain PyTorch."""

import pytest
import torch

from dflash_offline.kernels.feature_noise import feature_noise

# Ragged against the kernel's tile of 4,096 columns, and more rows than the plain path's chunk.
SHAPE = (300, 63)


def keys_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num_rows,), generator=generator, dtype=torch.int32)


def test_it_is_uniform_and_not_correlated():
    noise = feature_noise(torch.zeros(400, 500), keys_of(400), width=0.5)
    assert noise.abs().max() < 0.5
    assert noise.mean().abs() < 0.002  # 0.29 / sqrt(200,000) = 0.0006
    assert noise.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.01)
    counts = torch.histc(noise, bins=10, min=-0.5, max=0.5)
    assert (counts / counts.mean() - 1).abs().max() < 0.05  # a sigma of 0.007
    for rolled in (noise.roll(1, 0), noise.roll(1, 1)):
        assert (noise * rolled).mean().abs() / noise.var() < 0.01


def test_a_row_depends_on_its_key_alone():
    x, keys = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), keys_of(300)
    whole = feature_noise(x, keys, width=0.1)
    part = slice(280, 295)
    assert torch.equal(feature_noise(x[part], keys[part], width=0.1), whole[part])
    assert not torch.equal(feature_noise(x, keys_of(300, 1), width=0.1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(5, 63), (3, 4097), (0, 8)], ids=str)
def test_feature_noise(shape, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    keys = keys_of(shape[0]).to(device)
    kernel = feature_noise(x, keys, width=0.05, implementation="triton")
    plain = feature_noise(x, keys, width=0.05, implementation="reference")
    # A fused multiply-add rounds once less.
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(kernel, plain, rtol=rtol, atol=1e-8)


def test_inputs_with_gaps():
    x, keys = torch.randn(63, 5).t(), keys_of(10)[::2]
    kernel = feature_noise(x, keys, width=0.5, implementation="triton")
    torch.testing.assert_close(kernel, feature_noise(x, keys, width=0.5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("keys", [keys_of(4), keys_of(5).long()], ids=["too few", "int64"])
def test_keys_that_do_not_fit(keys):
    with pytest.raises(ValueError, match=r"must be int32 \[5\]"):
        feature_noise(torch.zeros(5, 8), keys, width=0.5)


def test_double_precision_on_the_cpu():
    noise = feature_noise(torch.zeros(4, 9, dtype=torch.float64), keys_of(4), width=1.0)
    assert torch.equal(noise.float(), feature_noise(torch.zeros(4, 9), keys_of(4), width=1.0))
