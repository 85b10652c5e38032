"""A target over several processes: what is refused, and states as those of one process."""

import json
import re
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from dflash_offline.common.cache import Document, open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.target import load_target
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.forward import BatchStates, StateForward
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
    with pytest.raises(BadInput, match=re.escape("pip install -e '.[tp]'")):
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("family", ["qwen3-wide", "qwen3.5-hybrid"])
def test_states_of_two_gpus_are_those_of_one(family, make_target, write_corpus, run, tmp_path):
    """To bfloat16 rounding: as near as a forward in bfloat16 is to one in float32."""
    folder, stores = make_target(family), {}
    options = ("--target", folder, "--data", write_corpus(60), "--dtype", "bfloat16")
    options += ("--codec", "raw", "--layers", "0,1,4", "--teacher", "final")
    options += ("--pack-tokens", 256, "--batch-tokens", 512)
    for name, workers in {"one": ("--gpus", 1), "two": ("--gpus", 2, "--tp", 2)}.items():
        assert run(extract_command, *options, "--out", tmp_path / name, *workers) == 0
        stores[name] = open_cache(str(tmp_path / name))
    for name, tp in {"one": "1", "two": "2"}.items():
        record = json.loads((tmp_path / name / "commit/00000000.json").read_text())
        assert record["run"]["tp"] == tp
        assert stores[name].identity.target["compute_dtype"] == "bfloat16"
    one, two = (rows_of(store.read_many(range(60))) for store in stores.values())
    target = load_target(folder, dtype=torch.float32, device="cuda", head=False)
    with StateForward(target, (0, 1, 4), keep_final=True) as forward:
        exact = rows_of(forward([each.tokens]) for each in stores["one"].read_many(range(60)))
    rounding, apart = (
        (a - b).norm(dim=-1) / exact.norm(dim=-1) for a, b in ((one, exact), (one, two))
    )
    spread = rounding.square().mean(1, keepdim=True).sqrt()
    # Sums over parts are rounded at other places. Of two forwards whose roundings had nothing in
    # common the distance would be 1.4 times that of either from the exact states.
    assert (apart.square().mean(1, keepdim=True).sqrt() < 1.5 * spread).all()
    assert (apart < 4 * spread).all()
    assert (apart > 0).any()


def rows_of(documents: Iterable[Document | BatchStates]) -> torch.Tensor:
    """Return all states, the final ones last: [layers + 1, tokens, H]."""
    parts = [np.concatenate([each.features, each.final[None]]) for each in documents]
    return as_bfloat16(np.concatenate(parts, 1)).float()
