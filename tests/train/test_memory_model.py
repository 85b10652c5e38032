"""The memory model against what was measured on a GPU, and what it advises."""

import numpy as np
import pytest
import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.loss_spec import parse_loss
from dflash_offline.train.memory_model import (
    Load,
    _load_of,
    check_memory,
    memory_of,
    remedy,
    typical_pass,
)
from dflash_offline.train.objective import objective_of
from dflash_offline.train.target_head import TargetHead


def shape_of(config_maker, hidden: int, middle: int, vocab: int, layers: int = 5):
    return config_maker(
        hidden_size=hidden,
        intermediate_size=middle,
        vocab_size=vocab,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=64,
        mask_token_id=0,
        block_size=16,
    )


# Peaks of tests/benchmarks/bench_step.py on an H200: 16,384 tokens and rows, head and embedding
# apart, raw states.
MEASURED = {
    "8b": (4096, 12288, 151_936, "none", 36.3),
    "8b-fp8": (4096, 12288, 151_936, "all", 39.8),
    "27b": (5120, 17408, 248_320, "none", 55.1),
    "27b-fp8": (5120, 17408, 248_320, "all", 61.3),
}


@pytest.mark.parametrize(
    ("hidden", "middle", "vocab", "fp8", "peak"), MEASURED.values(), ids=MEASURED
)
def test_the_model_is_near_what_was_measured(config_maker, hidden, middle, vocab, fp8, peak):
    shape = shape_of(config_maker, hidden, middle, vocab)
    load = Load(
        rows=16384,
        context=16384,
        chunk_rows=max(256, min(4096, (512 << 20) // (2 * vocab))),
        head_copies=2,
        stored_bytes=2 * hidden,
        fp8=fp8,
    )
    parts = memory_of(shape, load)
    assert sum(parts.values()) / 1e9 == pytest.approx(peak, rel=0.05)


def test_parts_follow_their_causes(config_maker):
    shape = config_maker()
    drafter = Drafter(shape)
    matrices = sum(p.numel() for p in drafter.parameters() if p.dim() == 2)
    load = Load(rows=100, context=50, chunk_rows=256, head_copies=1, stored_bytes=64)
    parts = memory_of(shape, load)
    assert parts["drafter"] == 10 * matrices
    assert parts["optimiser"] == 8 * matrices
    changes = {
        "optimiser": {"world_size": 2},
        "activations": {"rows": 200},
        "context": {"context": 100},
        "states": {"stored_bytes": 32},
        "target": {"head_copies": 2},
        "logits": {"num_chunks": 3},
    }
    for name, change in changes.items():
        changed = memory_of(shape, Load(**vars(load) | change))
        assert changed[name] != parts[name], name
    noisy = memory_of(shape, Load(**vars(load) | {"has_noise": True}))["states"]
    assert noisy - parts["states"] == 50 * 2 * 32 * 2  # T K H bfloat16
    assert memory_of(shape, Load(**vars(load) | {"optimizer": "muon"}))["optimiser"] == 4 * matrices
    assert (
        memory_of(shape, Load(**vars(load) | {"has_average": True}))["optimiser"] == 12 * matrices
    )
    assert memory_of(shape, Load(**vars(load) | {"compute_bytes": 4}))["drafter"] == 8 * matrices


def test_what_sharing_all_out_saves(config_maker):
    shape = shape_of(config_maker, 5120, 17408, 248_320)
    load = {"rows": 16384, "context": 16384, "chunk_rows": 1024, "head_copies": 2}
    load |= {"stored_bytes": 10240, "world_size": 8}
    whole, shared = (
        memory_of(shape, Load(**load, shares_all=shares_all)) for shares_all in (False, True)
    )
    assert {name for name in whole if whole[name] != shared[name]} == {"drafter"}
    parameters = whole["optimiser"]  # 8 bytes of each, shared by 8 processes
    assert whole["drafter"] == 10 * parameters
    # Slices, three layers and fc in bfloat16, gradients of one layer and of the context.
    layer = (parameters - 5 * 5120**2) // 5
    expected = parameters + 2 * (5 * 5120**2 + 3 * layer) + 8 * layer + 8 * 16384 * 5120
    assert shared["drafter"] == expected
    fp8 = memory_of(shape, Load(**load | {"fp8": "all"}, shares_all=True))
    assert fp8["drafter"] - shared["drafter"] == 2 * 5 * 5120**2  # the largest matrix is fc
    # An evaluation has the whole of a deep drafter where a short pass has next to nothing.
    deep = shape_of(config_maker, 5120, 17408, 248_320, layers=30)
    short = memory_of(deep, Load(**load | {"rows": 64, "context": 64}, shares_all=True))
    of_pass = short["activations"] + short["context"]
    assert short["drafter"] == (1 + 2) * short["optimiser"] - of_pass


@pytest.mark.parametrize(
    ("teacher", "loss", "labels", "num_chunks"),
    [
        ("final", "decay", "data", 2),
        ("final", "decay", "teacher", 3),
        ("final", "kl", "data", 4),
        ("final", "kl", "teacher", 4),
        ("final", "dpace,kl", "teacher", 5),
        ("topk:5", "kl", "data", 2),
        ("topk:5", "decay", "teacher", 2),
    ],
)
def test_a_teacher_takes_chunks_of_logits(
    tmp_path, corpus_maker, teacher, loss, labels, num_chunks
):
    cache = corpus_maker(teacher=teacher)  # has the schema and the plan that a store has
    run = TrainConfig(cache=("store",), out=tmp_path / "run")
    head = TargetHead(embed=torch.ones(97, 64), weight=torch.ones(97, 64))
    objective = objective_of(
        parse_loss(loss), labels=labels, block_size=4, num_topk=cache.schema.num_topk
    )
    given = {"objective": objective, "head": head, "block_size": 4, "world_size": 1}
    load = _load_of(run, [cache], [[0, 1]], rows=64, **given)
    assert load.num_chunks == num_chunks


def test_typical_pass():
    lengths, supervised = np.array([2048] * 64), np.array([2048] * 64)
    given = {"num_anchors": 128, "block_size": 16}
    assert typical_pass(lengths, supervised, rows=16384, **given) == (16384, 16384 + 2048)
    # Little data fills no pass; a long document is one pass's context however small passes are.
    assert typical_pass(lengths[:2], supervised[:2], rows=16384, **given) == (4096, 4096)
    assert typical_pass(lengths, supervised, rows=64, **given) == (64, 2048)


def test_what_to_change():
    def model(rows: int) -> dict[str, int]:
        return {"drafter": 10_000_000_000, "activations": rows * 1_000_000}

    assert remedy(model, 16384, 15_000_000_000) == "--rows-per-pass 4096 fits and learns the same"
    assert "to more --gpus with --shard all" in remedy(model, 16384, 9_000_000_000)
    line = check_memory(model, rows=1000, device=torch.device("cpu"))
    assert line == "training takes about 11.33 GB (drafter 10.00, activations 1.00)"


def test_a_run_that_cannot_fit_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12_000_000_000, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def model(rows: int) -> dict[str, int]:
        return {"drafter": 10_000_000_000, "activations": rows * 1_000_000}

    device = torch.device("cuda", 0)
    with pytest.raises(
        BadInput, match=r"--rows-per-pass 4096: .* 12\.0 GB .* --rows-per-pass 1024"
    ):
        check_memory(model, rows=4096, device=device)
    assert "of 12.0 GB that are free" in check_memory(model, rows=1000, device=device)
    # The parts alone would fit, but not what is said to be taken.
    with pytest.raises(BadInput, match=r"takes about 12\.26 GB of 12\.0 GB"):
        check_memory(model, rows=1900, device=device)
