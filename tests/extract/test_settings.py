"""Options as the program wants them: lengths, shares, precision, fast kernels."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig

from dflash_offline.common.device_choice import resolve_dtype
from dflash_offline.common.errors import BadInput
from dflash_offline.extract import fast_path
from dflash_offline.extract.fast_path import check_fast_path
from dflash_offline.extract.settings import parse_holdout, resolve_max_length

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("1%", 0.01), ("0.01", 0.01), ("0", 0.0), ("0%", 0.0), ("12.5%", 0.125), (".5", 0.5)],
)
def test_parse_holdout(text: str, fraction: float):
    assert parse_holdout(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["100%", "1", "-1%", "", "%", "1 %%", "many"])
def test_parse_holdout_refuses(text: str):
    with pytest.raises(BadInput, match="--holdout .* is not a share"):
        parse_holdout(text)


@pytest.mark.parametrize(
    ("given", "pack_tokens", "context", "expected"),
    [
        (None, 16384, 131072, 4096),
        (None, 2048, 131072, 2048),
        (None, 16384, 1024, 1024),
        (8192, 16384, 131072, 8192),
        (16384, 16384, 131072, 16384),
    ],
)
def test_resolve_max_length(given, pack_tokens, context, expected):
    config = LlamaConfig(max_position_embeddings=context)
    assert resolve_max_length(given, pack_tokens=pack_tokens, config=config) == expected


def test_resolve_dtype():
    assert resolve_dtype("auto", CUDA) == torch.bfloat16
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


def test_fast_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    hybrid, dense = Qwen3_5TextConfig(num_hidden_layers=8), LlamaConfig()
    monkeypatch.setattr(fast_path, "is_flash_linear_attention_available", lambda: False)
    check_fast_path(dense, CUDA, allow_slow_path=False)
    check_fast_path(hybrid, CPU, allow_slow_path=False)
    with pytest.raises(BadInput, match="6 of 8 layers .* pip install -U flash-linear-attention"):
        check_fast_path(hybrid, CUDA, allow_slow_path=False)
    assert capsys.readouterr().err == ""
    check_fast_path(hybrid, CUDA, allow_slow_path=True)
    assert "warning: --target has 6 of 8 layers" in capsys.readouterr().err


def test_fast_path_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch):
    """The package may be there and broken, and transformers would go on without a word."""
    monkeypatch.setattr(fast_path, "is_flash_linear_attention_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "fla", None)
    with pytest.raises(BadInput, match="its import fails"):
        check_fast_path(Qwen3_5TextConfig(), CUDA, allow_slow_path=False)
