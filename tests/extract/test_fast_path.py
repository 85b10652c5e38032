"""The fast kernels are found where they are, and their absence is noticed."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig

from dflash_offline.common.errors import BadInput
from dflash_offline.common.target import load_target
from dflash_offline.extract import fast_path
from dflash_offline.extract.fast_path import check_fast_path, is_slow

HYBRID = Qwen3_5TextConfig(num_hidden_layers=4)
GPU = torch.device("cuda")


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flash-linear-attention that says on import what it would like, as the real one does."""

    def make(code: str) -> None:
        folder = tmp_path / "fla/ops/gated_delta_rule"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fast_kernels_are_used_on_a_gpu(make_target):
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    check_fast_path(HYBRID, GPU, allow_slow_path=False)
    target = load_target(
        make_target("qwen3.5-hybrid"), dtype=torch.bfloat16, device="cuda", head=False
    )
    assert not is_slow(target)
