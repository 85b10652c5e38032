"""A target over several processes: what is refused, and states as those of one process."""

import json
import re

import pytest
import torch
from transformers import Qwen3Config

from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.launch import check_group_size
from dflash_offline.extract.tensor_parallel import check_tensor_parallel

CONFIG = Qwen3Config(num_attention_heads=12, num_key_value_heads=6)


def test_any_target_by_itself() -> None:
    check_tensor_parallel(1, "model.gguf", CONFIG)
    check_group_size(1, 3)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_sizes_that_divide_the_heads(size: int) -> None:
    check_tensor_parallel(size, "folder", CONFIG)


@pytest.mark.parametrize(
    ("size", "target", "message"),
    [
        (4, "folder", "--tp 4 does not divide .* 12 attention and 6 .* allowed are 1, 2, 3, 6"),
        (2, "model.gguf", "--tp 2 needs a Hugging Face checkpoint; --target model.gguf is GGUF"),
    ],
)
def test_refused_targets(size: int, target: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_tensor_parallel(size, target, CONFIG)


def test_refused_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=re.escape("pip install 'dflash-offline[tp]'")):
        check_tensor_parallel(2, "folder", CONFIG)


def test_refused_number_of_processes() -> None:
    with pytest.raises(BadInput, match="--tp 2 cannot be had with 3 worker process"):
        check_group_size(2, 3)


def test_planned_and_estimated_by_one_process(make_target, write_corpus, run, tmp_path, capsys):
    """The group need not be here, but a run needs it."""
    args = ("--target", make_target("qwen3"), "--data", write_corpus(9), "--out", tmp_path / "s")
    args += ("--layers", "0,1", "--pack-tokens", 256, "--batch-tokens", 512, "--tp", 2)
    assert run(extract_command, *args, "--dry-run") == 0
    text = " ".join(capsys.readouterr().err.split())
    assert "tokens/s of 2 cpu" in text
    assert not (tmp_path / "s").exists()
    assert run(extract_command, *args, "--plan-only") == 0
    assert "plan with --dtype bfloat16" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "s" / "manifest.json").exists()
    assert run(extract_command, *args) == 2
    assert "--tp 2 cannot be had with 1 worker" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3.5-hybrid"])
def test_states_are_those_of_one_process(family, make_target, write_corpus, run, tmp_path):
    """To rounding: sums over parts have another order. Two groups of two share the units."""
    options = ("--target", make_target(family), "--data", write_corpus(60, "chat.jsonl"))
    options += ("--codec", "raw", "--layers", "0,1,4", "--allow-slow-path")
    options += ("--pack-tokens", 256, "--batch-tokens", 512)
    stores = {}
    for name, workers in {"alone": (), "shared": ("--gpus", 4, "--tp", 2)}.items():
        assert run(extract_command, *options, "--out", tmp_path / name, *workers) == 0
        stores[name] = open_cache(str(tmp_path / name))
    alone, shared = stores["alone"], stores["shared"]
    assert len(shared.samples) == len(alone.samples) == 60
    for index in shared.training_samples:
        given, wanted = shared.read(index), alone.read(index)
        assert (given.tokens == wanted.tokens).all()
        # bfloat16 keeps eight bits; a sum near a boundary may fall on its other side.
        torch.testing.assert_close(
            given.features_torch(), wanted.features_torch(), rtol=2**-7, atol=1e-3
        )
    record = json.loads((tmp_path / "shared/commit/00000000.json").read_text())
    assert record["run"]["tp"] == "2"
    for name in ("embed_tokens", "lm_head", "norm"):
        assert torch.equal(shared.target_tensor(name), alone.target_tensor(name))
