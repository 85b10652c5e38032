"""dflash-extract through the real command: what the store holds is what the target computes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.store import FEATURES, shard_key
from dflash_offline.common.target import load_target
from dflash_offline.extract import forward as forward_module
from dflash_offline.extract import run as run_module
from dflash_offline.extract.cli import main as extract_command

SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--codec", "raw")


@torch.inference_mode()
def reference(folder: Path, tokens: np.ndarray, layers: tuple[int, ...]):
    """States [K, T, H] and final [T, H] of one document, unbatched, fp32, by hooks of their own."""
    target = load_target(folder, dtype=torch.float32, device="cpu", head=False)
    states: dict[int, torch.Tensor] = {}

    def keep(layer: int):
        def hook(_module, args, kwargs):
            states[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    for layer in layers:
        target.layers[layer + 1].register_forward_pre_hook(keep(layer), with_kwargs=True)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    final = target.base(input_ids=ids, use_cache=False).last_hidden_state[0]
    return torch.stack([states[layer] for layer in layers]), final


def as_float(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns).view(np.int16)).view(torch.bfloat16).float()


def assert_content(folder: Path, cache: Cache, limit: int | None = None) -> None:
    """Every sample's rows are the reference's, rounded to bfloat16."""
    samples = [*cache.training_samples, *cache.held_out_samples]
    for document in cache.read_many(samples[:limit]):
        states, final = reference(folder, document.tokens, cache.schema.layers)
        # bfloat16 keeps 8 bits; batching changes the last bits of fp32.
        torch.testing.assert_close(as_float(document.features), states, rtol=1 / 200, atol=1e-5)
        if document.final is not None:
            torch.testing.assert_close(as_float(document.final), final, rtol=1 / 200, atol=1e-5)


def lengths_of(cache: Cache) -> dict[str, int]:
    """Ids and lengths of the samples that a reader gets."""
    samples = [cache.plan.samples[index] for index in cache.samples]
    return {sample.id: sample.length for sample in samples}


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma3", "qwen3-moe", "qwen3.5-hybrid", "gpt-oss"]
)
def test_states_are_those_of_an_unbatched_forward(family, make_target, write_corpus, run, tmp_path):
    folder, data, out = make_target(family), write_corpus(7), tmp_path / "store"
    args = ("--target", folder, "--data", data, "--out", out, *SMALL, "--teacher", "final")
    assert run(extract_command, *args) == 0
    cache = open_cache(str(out))
    assert cache.schema.layers == (0, 1, 4)
    assert_content(folder, cache)


@pytest.mark.parametrize("count", [1, 12, 33])
def test_right_rows_under_right_ids(count, make_target, write_corpus, run, tmp_path):
    """Ids, tokens and states belong together, whatever the order of packs and batches is."""
    folder, data, out = make_target("llama"), write_corpus(count), tmp_path / "store"
    args = ("--target", folder, "--data", data, "--out", out, *SMALL, "--holdout", "20%")
    assert run(extract_command, *args) == 0
    cache = open_cache(str(out))
    texts = {json.loads(line)["id"]: json.loads(line) for line in data.read_text().splitlines()}
    assert set(lengths_of(cache)) == set(texts)
    assert bool(cache.held_out_samples) == (count > 1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for sample_id, row in texts.items():
        text = tokenizer.decode(cache[sample_id].tokens)
        assert row["messages"][1]["content"] in text
    assert_content(folder, cache, limit=12)
    assert run(cache_command, "verify", "--deep", out) == 0


def test_sample_of_a_whole_pack_and_of_two_tokens(make_target, run, tmp_path):
    folder, data, out = make_target("llama"), tmp_path / "ids.jsonl", tmp_path / "store"
    rows = [
        {"id": "whole", "input_ids": [i % 200 for i in range(256)], "loss_mask": [1] * 256},
        {"id": "two", "input_ids": [5, 6], "loss_mask": [1, 1]},
        {"id": "long", "input_ids": [i % 100 for i in range(300)], "loss_mask": [1] * 300},
        {"id": "one", "input_ids": [5], "loss_mask": [1]},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(extract_command, "--target", folder, "--data", data, "--out", out, *SMALL) == 0
    cache = open_cache(str(out))
    assert lengths_of(cache) == {"whole": 256, "two": 2, "long": 256}
    assert cache.plan.report["truncated"] == 1
    assert cache.plan.report["skipped"] == {"no two supervised tokens in a row": 1}
    assert_content(folder, cache)


def test_interrupted_run_resumes_to_the_same_bytes(
    make_target, write_corpus, run, state_files, tmp_path, sigterm_at_batch, capsys
):
    folder, data = make_target("qwen3"), write_corpus(33)
    args = ("--target", folder, "--data", data, *SMALL, "--teacher", "final")
    assert run(extract_command, *args, "--out", tmp_path / "whole") == 0
    with sigterm_at_batch(4):
        assert run(extract_command, *args, "--out", tmp_path / "again") == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "SIGTERM" in lines[0]
    partial = open_cache(str(tmp_path / "again"), partial=True)
    assert 0 < len(partial.packs) < partial.plan.num_packs
    assert_content(folder, partial, limit=4)
    assert run(extract_command, *args, "--out", tmp_path / "again") == 0
    assert state_files(tmp_path / "again") == state_files(tmp_path / "whole")
    assert run(cache_command, "verify", "--deep", tmp_path / "again") == 0


def test_finished_store_is_left_alone(make_target, write_corpus, run, tmp_path):
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", tmp_path / "s")
    assert run(extract_command, *args, *SMALL) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert run(extract_command, *args, *SMALL) == 0
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").rglob("*") if p.is_file()}
    changed = {p.name for p in after if after[p] != before.get(p)}
    assert changed <= {"extract.jsonl", ".owner"}


def test_plan_only_then_states(make_target, write_corpus, run, tmp_path):
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", tmp_path / "s")
    assert run(extract_command, *args, *SMALL, "--plan-only") == 0
    assert not list((tmp_path / "s/commit").glob("*.json"))
    assert run(extract_command, *args, *SMALL) == 0
    assert open_cache(str(tmp_path / "s")).is_complete


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma3", "qwen3-moe", "gpt-oss", "qwen3.5-hybrid"]
)
def test_plan_only_writes_what_a_run_does(
    family, make_target, write_corpus, run, tmp_path, monkeypatch
):
    loaded = []
    monkeypatch.setattr(
        run_module,
        "load_target",
        lambda *args, **options: loaded.append(load_target(*args, **options)) or loaded[-1],
    )
    # They are written down, and are not the same.
    monkeypatch.setattr(run_module, "config_as_dict", lambda config: {})
    args = ("--target", make_target(family), "--data", write_corpus(5), *SMALL)
    assert run(extract_command, *args, "--out", tmp_path / "plan", "--plan-only") == 0
    assert run(extract_command, *args, "--out", tmp_path / "whole") == 0
    read = [{not weight.is_meta for weight in target.layers.parameters()} for target in loaded]
    assert read == [{False}, {True}]
    planned, whole = (
        {
            str(path.relative_to(tmp_path / name)): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and path.name not in (".owner", "extract.jsonl")
        }
        for name in ("plan", "whole")
    )
    parts = ("manifest.json", "target/", "plan/", "tokens/", "loss_mask/")
    assert {name for name in whole if name.startswith(parts)} <= planned.keys()
    assert {name for name in planned if planned[name] != whole[name]} == set()


def test_append_adds_data(make_target, write_corpus, run, tmp_path):
    folder = make_target("qwen3")
    args = ("--target", folder, "--out", tmp_path / "s", *SMALL)
    assert run(extract_command, *args, "--data", write_corpus(5)) == 0
    more = write_corpus(9, "more.jsonl")
    assert run(extract_command, *args, "--data", more) == 2
    assert run(extract_command, *args, "--data", more, "--append") == 0
    cache = open_cache(str(tmp_path / "s"))
    assert len(cache.samples) == 14
    assert_content(folder, cache)


def test_samples_that_rm_took_are_not_bad(make_target, write_corpus, run, tmp_path):
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", tmp_path / "s")
    assert run(extract_command, *args, *SMALL) == 0
    assert run(cache_command, "rm", tmp_path / "s", "--yes", "--where", 'id == "row-1"') == 0
    assert run(extract_command, *args, *SMALL) == 0


def test_repaired_packs_are_made_again(make_target, write_corpus, run, tmp_path):
    """By the same bytes, whose record the index has given up."""
    out = tmp_path / "s"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(12), "--out", out, *SMALL)
    assert run(extract_command, *args) == 0
    whole = open_cache(str(out))
    shard = out / shard_key(FEATURES, 1)
    before = shard.read_bytes()
    shard.write_bytes(before[:10] + bytes([before[10] ^ 1]) + before[11:])
    assert run(cache_command, "repair", out) == 0
    assert open_cache(str(out), partial=True).packs == sorted({*whole.packs} - {1})
    assert run(extract_command, *args) == 0
    assert open_cache(str(out)).packs == whole.packs
    assert shard.read_bytes() == before
    assert run(cache_command, "verify", "--deep", out) == 0


def test_bias_of_the_final_norm_is_kept(make_target, write_corpus, run, tmp_path):
    folder, out = make_target("stablelm"), tmp_path / "s"
    args = ("--target", folder, "--data", write_corpus(5), "--out", out, *SMALL)
    assert run(extract_command, *args, "--plan-only") == 0
    kept = load_file(out / "target/tensors.safetensors")
    own = load_file(folder / "model.safetensors")
    for name in ("norm.weight", "norm.bias", "embed_tokens.weight"):
        torch.testing.assert_close(kept[name], own[f"model.{name}"], rtol=0, atol=0)


def test_dry_run_writes_nothing(make_target, write_corpus, run, tmp_path, capsys):
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", tmp_path / "s")
    assert run(extract_command, *args, *SMALL, "--dry-run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "tokens/s" in said
    assert "GB free" in said
    assert not (tmp_path / "s").exists()


def test_states_that_are_not_finite_are_quarantined(
    make_target, write_corpus, run, tmp_path, monkeypatch, capsys
):
    folder, data, out = make_target("qwen3"), write_corpus(12), tmp_path / "store"
    monkeypatch.setattr(run_module, "self_check", lambda *_args: [])
    take = forward_module.Capture.take
    num_batches = 0

    def poisoned(capture):
        nonlocal num_batches
        num_batches += 1
        states = take(capture)
        states[1][3] = float("nan")  # the longest sample of every batch
        return states

    monkeypatch.setattr(forward_module.Capture, "take", poisoned)
    args = ("--target", folder, "--data", data, "--out", out, *SMALL)
    assert run(extract_command, *args, "--batch-tokens", 4096) == 1
    assert "not finite in layer 1 at position 3" in " ".join(capsys.readouterr().err.split())
    cache = open_cache(str(out))
    assert len(cache.samples) == 12 - num_batches
    monkeypatch.setattr(forward_module.Capture, "take", take)
    assert_content(folder, cache)
    assert run(cache_command, "verify", "--deep", out) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_told(bad, make_target, monkeypatch):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    take = forward_module.Capture.take

    def spoiled(capture):
        states = take(capture)
        states[1][3, 5] = bad
        return states

    monkeypatch.setattr(forward_module.Capture, "take", spoiled)
    with forward_module.StateForward(target, (0, 1, 4), keep_final=True) as forward:
        states = forward([np.arange(5, 9, dtype=np.int32), np.arange(5, 8, dtype=np.int32)])
    assert np.argwhere(~states.is_finite).tolist() == [[1, 3]]


def test_target_part_of_the_store(make_target, write_corpus, run, tmp_path):
    """Training needs neither the target nor the hub: head, embedding, norm, tokenizer, licence."""
    folder = make_target("qwen3")
    (folder / "LICENSE").write_text("do what you like")
    args = ("--target", folder, "--data", write_corpus(3), "--out", tmp_path / "s", *SMALL)
    assert run(extract_command, *args) == 0
    cache = open_cache(str(tmp_path / "s"))
    target = load_target(folder, dtype=torch.float32, device="cpu", head=False)
    assert torch.equal(cache.target_tensor("embed_tokens"), target.embed_weight())
    assert torch.equal(cache.target_tensor("lm_head"), target.head_weight())
    assert torch.equal(cache.target_tensor("norm"), target.final_norm.weight)
    assert cache.target_config["num_hidden_layers"] == 6
    names = {path.name for path in (tmp_path / "s/target").iterdir()}
    assert {"LICENSE", "tokenizer.json", "chat_template.jinja", "config.json"} <= names
