"""What an extraction will take: the forward's peak against real tensors, sums, and refusals."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import Schema
from dflash_offline.common.target import load_config, load_target
from dflash_offline.extract import estimate, memory_model, meta_forward, planning
from dflash_offline.extract import run as run_module
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.memory_model import (
    FreeMemory,
    MemoryModel,
    check_memory,
    free_host_bytes,
)
from dflash_offline.extract.meta_forward import ForwardCost, forward_cost

GB = 10**9
SCHEMA = Schema(layers=(1, 9, 17), hidden=1024, vocab_size=1000, pack_tokens=16384, codec="raw")


def cost_of(config, **changes) -> ForwardCost:
    usual = {"dtype": torch.bfloat16, "num_tokens": 2048, "max_length": 256}
    return forward_cost(config, target="t", **{**usual, **changes})


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3-moe", "gpt-oss"])
def test_forward_on_meta_takes_what_a_real_one_takes(make_target, family: str):
    """The same sum over the storages of tensors that exist, attention's scores left out of both."""
    folder: Path = make_target(family)
    target = load_target(folder, dtype=torch.bfloat16, device="cpu", head=False)
    live = meta_forward._LiveBytes([*target.base.parameters(), *target.base.buffers()])
    ids = torch.zeros(8, 64, dtype=torch.int64)
    # Values exist here, so they are not made up.
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.no_grad(),
        meta_forward._FusedAttention(),
        live,
    ):
        patch.setattr(meta_forward, "_VALUES", ())
        target.base(input_ids=ids, use_cache=False)
    cost = cost_of(load_config(folder), num_tokens=512, max_length=64)
    assert cost.activation_bytes == pytest.approx(live.peak, rel=0.01)
    assert cost.num_parameters == sum(w.numel() for w in target.base.parameters())


def test_dense_forward_follows_the_formula():
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    tokens = 8 * 256
    cost = cost_of(config)
    assert cost.activation_bytes == pytest.approx(2 * tokens * (4 * 256 + 3 * 768), rel=0.03)
    # Twice the tokens, not a multiple of the longest sample.
    larger = cost_of(config, num_tokens=4100)
    assert larger.activation_bytes == pytest.approx(cost.activation_bytes * 4100 / 2048, rel=0.01)
    # A layer: q, o and k, v; gate, up, down; four norms are nothing.
    matrices = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
    assert cost.flops_per_token == pytest.approx(2 * matrices, rel=0.01)


def test_scores_that_are_kept_count(make_target):
    """gpt-oss's attention makes scores, which grow with the square of a sample."""
    config = load_config(make_target("gpt-oss"))
    short, long = (cost_of(config, num_tokens=4096, max_length=n) for n in (64, 1024))
    assert long.activation_bytes > 4 * short.activation_bytes


def test_target_that_needs_values(make_target, monkeypatch):
    """Where the target's code does not run on meta, that is said, and the rest still counts."""
    monkeypatch.setattr(meta_forward, "_VALUES", ())
    cost = cost_of(load_config(make_target("qwen3")))
    assert cost.activation_bytes is None
    parts = memory_model.device_bytes(SCHEMA, cost, dtype=torch.bfloat16, batch_tokens=64)
    assert parts["activations not known"] == 0
    assert parts["weights"] == 2 * cost.num_parameters > 0


def test_linear_attention_is_counted_as_fla_runs_it():
    config = Qwen3_5TextConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    keys, values = 2 * 32, 4 * 32
    elements = 2 * keys + values + values + 4 * 4 * 32 + 4 * 64 + 4 * 32 + 3 * values
    elements += 4 * 32 * 32 // 64
    # Beside them the embeddings, the layer's input, its norm and the output.
    expected = 2 * 2048 * (elements + 4 * 64)
    assert cost_of(config).activation_bytes == pytest.approx(expected, rel=0.1)


def cost_with(activation_bytes: int, *, is_tied: bool = False) -> ForwardCost:
    return ForwardCost(
        num_parameters=10**9, is_tied=is_tied, activation_bytes=activation_bytes, flops_per_token=1
    )


def model(codec: str = "raw", **changes) -> MemoryModel:
    cost = cost_with(3 * GB)
    options = {"batch_tokens": 32768, "pool_packs": 32, "num_workers": 2, "on_gpu": True}
    schema = dataclasses.replace(SCHEMA, codec=codec, teacher="final")
    return memory_model.memory_model(schema, cost, dtype=torch.bfloat16, **{**options, **changes})


def test_parts_of_a_gpu_and_its_host():
    found = model()
    assert found.device == {
        "weights": 2 * 10**9,
        "activations": 3 * GB,
        "rows": 2 * 32768 * 4 * 1024 * 2,
        "workspaces": 64 << 20,
    }
    assert found.host == {
        "packs": 2 * 32 * 16384 * 4 * 1024 * 2,
        "ring": 2 * 2 * 32768 * 4 * 1024 * 2,
        "head": 2 * 1000 * 1024 * 2,
    }
    assert found.per_token == -(-(3 * GB + 2 * 32768 * 8192) // 32768)
    few = model(pool_packs=1, batch_tokens=1024)
    assert few.host == {"weights while loading": 2 * (2 * 10**9 + 1000 * 1024 * 2)}


def test_codes_are_what_leaves_the_gpu():
    found = model("int8")
    codes = 32768 * 4 * (1024 + 2)
    assert found.device["codes"] == 2 * codes + (256 << 20)
    assert found.host["ring"] == 2 * 2 * codes
    assert found.host["packs"] == 2 * 32 * 16384 * 4 * (1024 + 2)


def test_best_tokens_need_the_head():
    """Its logits come after the forward, 2,048 rows at a time, so only the larger one counts."""
    cost = cost_with(10**6)
    schema = dataclasses.replace(SCHEMA, teacher="topk:64")
    options = {"batch_tokens": 4096, "pool_packs": 1, "num_workers": 1, "on_gpu": True}
    found = memory_model.memory_model(schema, cost, dtype=torch.bfloat16, **options)
    assert found.device["head"] == 2 * 1000 * 1024
    assert found.device["activations"] == 2048 * 1000 * 12
    assert found.device["rows"] == 2 * 4096 * 4 * 1024 * 2
    assert "head" not in found.host
    tied = cost_with(10**6, is_tied=True)
    found = memory_model.memory_model(schema, tied, dtype=torch.bfloat16, **options)
    assert found.device["head"] == 0


def test_shared_target():
    """Its head is dealt out too, and gathered with the embedding where it is needed whole."""
    table = 2 * 1000 * 1024
    alone, shared = model(num_workers=8), model(num_workers=8, shared_by=4)
    # Parameters and activations are given for one process.
    assert shared.device == {**alone.device, "head": table // 4}
    assert shared.host["head"] == 8 * 2 * table
    assert {**shared.host, "head": 0} == {**alone.host, "head": 0}
    best = dataclasses.replace(SCHEMA, teacher="topk:64")
    cost = cost_with(10**6)
    options = {"dtype": torch.bfloat16, "batch_tokens": 4096, "shared_by": 4}
    found = memory_model.device_bytes(best, cost, **options)
    assert found["head"] == 2 * table + table // 4
    tied = memory_model.device_bytes(best, cost_with(10**6, is_tied=True), **options)
    assert tied["head"] == table


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_dense_target(size: int):
    """What the plan deals out is divided: matrices of layers, heads, gate, up and product."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    whole, part = cost_of(config), cost_of(config, shared_by=size)
    matrices = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1536)
    assert part.num_parameters == whole.num_parameters - matrices + matrices // size
    expected = 2 * 2048 * (4 * 256 + 3 * 1536 // size)
    assert part.activation_bytes == pytest.approx(expected, rel=0.05)
    assert part.flops_per_token == whole.flops_per_token
    assert cost_of(config) == whole


def test_parts_of_experts():
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    config = Qwen3MoeConfig(vocab_size=1000, num_hidden_layers=2, **shape, **experts)
    whole, part = cost_of(config), cost_of(config, shared_by=2)
    # The router, the embedding and the norms stay whole.
    norms = 2 * (2 * 64 + 2 * 16) + 64
    stays = 1000 * 64 + norms + 2 * 8 * 64
    assert part.num_parameters == stays + (whole.num_parameters - stays) // 2
    assert 0.5 < part.activation_bytes / whole.activation_bytes < 0.6


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gpt-oss", "qwen3.5-hybrid"])
def test_parts_of_every_family(make_target, family: str):
    """Never less than a share; for linear attention and kept scores activations stay whole."""
    config = load_config(make_target(family))
    whole, part = cost_of(config, num_tokens=512), cost_of(config, num_tokens=512, shared_by=2)
    assert whole.num_parameters / 2 < part.num_parameters < whole.num_parameters
    if family in ("gpt-oss", "qwen3.5-hybrid"):
        assert part.activation_bytes == whole.activation_bytes
    else:
        assert 0.5 < part.activation_bytes / whole.activation_bytes < 1


def test_code_that_does_not_run_on_parts(make_target, monkeypatch):
    config = load_config(make_target("qwen3"))
    measure = meta_forward._peak_bytes

    def refuse_parts(base, ids):
        width = base.get_parameter("layers.0.mlp.down_proj.weight").shape[1]
        return measure(base, ids) if width == config.intermediate_size else None

    monkeypatch.setattr(meta_forward, "_peak_bytes", refuse_parts)
    assert cost_of(config, shared_by=2).activation_bytes == cost_of(config).activation_bytes


def test_without_a_gpu_everything_is_in_one_place():
    found = model(on_gpu=False)
    assert found.device == {}
    assert {"weights", "activations", "rows", "packs", "ring", "head"} == set(found.host)


@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
def test_a_budget_that_fits_is_named(on_gpu: bool):
    def of(tokens: int) -> MemoryModel:
        cost = cost_with(tokens * 10**5)
        schema = dataclasses.replace(SCHEMA, teacher="final")
        return memory_model.memory_model(
            schema,
            cost,
            dtype=torch.bfloat16,
            batch_tokens=tokens,
            pool_packs=0,
            num_workers=1,
            on_gpu=on_gpu,
        )

    def check(tokens: int) -> None:
        check_memory(
            of(tokens), batch_tokens=tokens, device_free=FreeMemory(4 * GB), host_free=8 * GB
        )

    budget = 65536
    with pytest.raises(BadInput, match=r"--batch-tokens 65536 needs .* GB are free.*lower") as no:
        check(budget)
    smaller = int(str(no.value).rpartition(" ")[2])
    assert 4096 <= smaller < budget
    check(smaller)
    if on_gpu:
        with pytest.raises(BadInput):
            check(smaller + 4096)


def test_no_budget_fits():
    with pytest.raises(BadInput, match="do not fit, so use a GPU with more memory"):
        check_memory(model(), batch_tokens=32768, device_free=FreeMemory(GB), host_free=None)


def test_refusal_names_the_gpu():
    least = FreeMemory(GB, "worker 5 (rank 5 of 8 on node-1, cuda:5)")
    words = r"of the memory of worker 5 .rank 5 of 8 on node-1, cuda:5., of which 1.0 GB are free"
    with pytest.raises(BadInput, match=words):
        check_memory(model(), batch_tokens=32768, device_free=least, host_free=None)
    assert "of 1.0 GB free" in model().sentence(least)


def test_small_host():
    with pytest.raises(BadInput, match="workers of this machine need .* --pack-tokens"):
        check_memory(model(), batch_tokens=32768, device_free=FreeMemory(None), host_free=4 * GB)
    check_memory(model(), batch_tokens=32768, device_free=FreeMemory(None), host_free=None)


def test_packs_that_do_not_fit_where_there_is_no_gpu():
    host = {"weights": 2 * GB, "packs": 50 * GB}
    large = MemoryModel(device={}, host=host, per_token=1000)
    nowhere = FreeMemory(None)
    with pytest.raises(BadInput, match="lower --pack-tokens"):
        check_memory(large, batch_tokens=32768, device_free=nowhere, host_free=4 * GB)
    with pytest.raises(BadInput, match="use a GPU with more memory"):
        check_memory(large, batch_tokens=32768, device_free=nowhere, host_free=GB)


def test_free_memory_of_this_machine():
    free = free_host_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_extraction_that_does_not_fit_is_refused(
    make_target, write_corpus, run, tmp_path, monkeypatch, capsys
):
    """Before the corpus is read, and by a dry run as well."""
    monkeypatch.setattr(planning, "free_host_bytes", lambda: 100_000)
    monkeypatch.setattr(planning.CorpusReader, "read", None)
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", tmp_path / "s")
    for more in ((), ("--dry-run",)):
        assert run(extract_command, *args, "--batch-tokens", 4096, "--layers", "0,1", *more) == 2
        assert "--batch-tokens 4096 needs" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_dry_run_reads_a_sample_and_no_weights(
    make_target, write_corpus, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_module, "load_target", None)
    folder, data = make_target("qwen3"), write_corpus(200)
    (folder / "model.safetensors").rename(folder / "away")
    try:
        said = []
        for rows in (1000, 40):
            monkeypatch.setattr(estimate, "_SAMPLE_ROWS", rows)
            args = ("--target", folder, "--data", data, "--out", tmp_path / "s", "--dry-run")
            small = ("--pack-tokens", 512, "--batch-tokens", 512, "--layers", "0,1")
            assert run(extract_command, *args, *small) == 0
            said.append(" ".join(capsys.readouterr().err.split()))
    finally:
        (folder / "away").rename(folder / "model.safetensors")
    whole, sample = said
    assert "from 40 of 200 rows" in sample
    assert "memory of this machine" in sample

    def number(text: str, before: str) -> float:
        return float(text.split(before)[0].split()[-1].replace(",", ""))

    for word in (" tokens, ", " packs, ", " GB in "):
        assert number(sample, word) == pytest.approx(number(whole, word), rel=0.1)
