"""The fast kernels are found where they are, and their absence is noticed."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash_offline.common.errors import BadInput
from dflash_offline.common.target import load_target
from dflash_offline.extract import fast_path
from dflash_offline.extract.fast_path import (
    check_fast_path,
    fast_convolution,
    is_slow,
    use_fast_convolution,
)
from dflash_offline.extract.self_check import self_check

# As flash-linear-attention's: channels last, and a state that nobody asks for.
CONVOLUTION = """
import torch

def causal_conv1d(x, weight, bias=None, *, activation=None, backend="triton"):
    padded = torch.nn.functional.pad(x, (0, 0, weight.shape[1] - 1, 0))
    y = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(weight.shape[1]))
    y = y if bias is None else y + bias
    return (torch.nn.functional.silu(y) if activation == "silu" else y), None
"""
HYBRID = Qwen3_5TextConfig(num_hidden_layers=4)
GPU = torch.device("cuda")


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flash-linear-attention that says on import what it would like, as the real one does."""

    def make(code: str) -> None:
        for folder in ("fla/ops/gated_delta_rule", "fla/modules/causal_conv1d"):
            (tmp_path / folder).mkdir(parents=True)
            for package in (tmp_path / folder, (tmp_path / folder).parent):
                (package / "__init__.py").touch()
        (tmp_path / "fla/modules/causal_conv1d/__init__.py").write_text(CONVOLUTION)
        (tmp_path / "fla/__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(fast_path, "is_flash_linear_attention_available", lambda: True)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def test_no_package(monkeypatch):
    monkeypatch.setattr(fast_path, "is_flash_linear_attention_available", lambda: False)
    with pytest.raises(BadInput, match="3 of 4 layers with linear attention.*not installed"):
        check_fast_path(HYBRID, GPU, allow_slow_path=False)
    check_fast_path(HYBRID, GPU, allow_slow_path=True)
    check_fast_path(HYBRID, torch.device("cpu"), allow_slow_path=False)


def test_package_that_warns_is_imported(fake_package):
    """Warnings are errors here; transformers would silently take its slow path for one."""
    fake_package("import warnings\nwarnings.warn('no flash-attn', ImportWarning)\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fast_path(HYBRID, GPU, allow_slow_path=False)
    assert "fla.ops.gated_delta_rule" in sys.modules


def test_broken_package(fake_package):
    fake_package("raise ImportError('wrong build')\n")
    with pytest.raises(BadInput, match="its import fails: wrong build"):
        check_fast_path(HYBRID, GPU, allow_slow_path=False)


@pytest.mark.parametrize(("family", "slow"), [("qwen3", False), ("qwen3.5-hybrid", True)])
def test_what_was_chosen_is_seen(family, slow, make_target):
    """Without the package here, a hybrid target has transformers' own version."""
    target = load_target(make_target(family), dtype=torch.float32, device="cpu", head=False)
    assert is_slow(target) == slow


@pytest.fixture
def convolution(monkeypatch: pytest.MonkeyPatch):
    """Put transformers' own function back after a test."""
    own = modeling_qwen3_5.causal_conv1d_fn
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", own)


@pytest.mark.usefixtures("convolution")
def test_convolutions_are_replaced(fake_package, make_target):
    """The same states, by way of the other package; on a CPU the target keeps its own."""
    fake_package("")
    folder = make_target("qwen3.5-hybrid")
    target = load_target(folder, dtype=torch.float64, device="cpu", head=False)
    ids = torch.randint(5, 250, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own = target.base(input_ids=ids, use_cache=False).last_hidden_state
        assert not use_fast_convolution(target)
        on_gpu = replace(target, device=torch.device("cuda"))
        assert use_fast_convolution(on_gpu)
        assert not use_fast_convolution(on_gpu)
        replaced = target.base(input_ids=ids, use_cache=False).last_hidden_state
    assert "fla.modules.causal_conv1d" in sys.modules
    torch.testing.assert_close(replaced, own, rtol=1e-10, atol=1e-10)


def test_broken_package_is_left_alone(fake_package, make_target):
    """As --allow-slow-path has it: slow, but it runs."""
    fake_package("raise ImportError('wrong build')\n")
    folder = make_target("qwen3.5-hybrid")
    target = load_target(folder, dtype=torch.float32, device="cpu", head=False)
    assert not use_fast_convolution(replace(target, device=torch.device("cuda")))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_targets_have_no_convolution(family, fake_package, make_target):
    fake_package("")
    target = load_target(make_target(family), dtype=torch.float32, device="cpu", head=False)
    assert not use_fast_convolution(replace(target, device=torch.device("cuda")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 3, 96), (3, 200, 80), (2, 65, 10240)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_on_a_gpu(shape, activation):
    """Nearer to float64 than transformers' version, which rounds before the activation."""
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    x = x.transpose(1, 2)  # [B, D, T], as a projection leaves it
    weight = torch.randn(shape[2], 4, device="cuda", dtype=torch.bfloat16, generator=generator)
    got = fast_convolution(x, weight, None, activation=activation)
    assert got.stride() == x.stride()
    wanted = torch.nn.functional.conv1d(
        x.double(), weight.double()[:, None], padding=3, groups=shape[2]
    )[..., : shape[1]]
    wanted = torch.nn.functional.silu(wanted) if activation else wanted
    # One rounding to bfloat16: half a unit in the last of eight places.
    assert ((got.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-5).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("convolution")
def test_fast_kernels_are_used_on_a_gpu(make_target):
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    check_fast_path(HYBRID, GPU, allow_slow_path=False)
    target = load_target(
        make_target("qwen3.5-hybrid"), dtype=torch.bfloat16, device="cuda", head=False
    )
    assert not is_slow(target)
    assert use_fast_convolution(target)
    checks = self_check(target, (0, 1, 4), [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 70)])
    assert [check for check in checks if not check.is_good] == []
