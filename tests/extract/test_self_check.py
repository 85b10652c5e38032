"""The self-check is quiet on sound states and finds every fault that others shipped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.errors import FoundProblems
from dflash_offline.common.target import Target, load_target
from dflash_offline.extract import forward as forward_module
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.self_check import report, self_check

LAYERS = (0, 1, 4)
ROLES = ("user", "assistant")


def samples() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 250, length).astype(np.int32) for length in (3, 40, 17, 29, 64)]


@pytest.fixture(params=["qwen3", "llama", "gemma3", "qwen3-moe", "qwen3.5-hybrid", "gpt-oss"])
def target(request, make_target) -> Target:
    folder: Path = make_target(request.param)
    return load_target(folder, dtype=torch.float32, device="cpu", head=False)


def test_sound_states_pass(target: Target):
    checks = self_check(target, LAYERS, samples())
    report(checks)
    assert len(checks) == 2 * len(LAYERS) + 1
    assert all(check.is_good for check in checks)


def shift_layers(monkeypatch) -> None:
    init = forward_module.Capture.__init__

    def one_off(capture, target, layers, **kwargs):
        init(capture, target, tuple(layer + 1 for layer in layers), **kwargs)

    monkeypatch.setattr(forward_module.Capture, "__init__", one_off)


def change_states(monkeypatch, change) -> None:
    """Change rows [R, H] of a captured layer where they lie."""
    take = forward_module.Capture.take

    def changed(capture):
        states = take(capture)
        for state in states:
            state.copy_(change(state))
        return states

    monkeypatch.setattr(forward_module.Capture, "take", changed)


def swap_row_pairs(monkeypatch) -> None:
    def swapped(state):
        order = torch.arange(len(state)) ^ 1  # 1, 0, 3, 2, …
        return state[order.clamp(max=len(state) - 1)]

    change_states(monkeypatch, swapped)


def rows_of_another_sample(monkeypatch) -> None:
    change_states(monkeypatch, lambda s: s.roll(40, dims=0))


def shift_positions(monkeypatch) -> None:
    change_states(monkeypatch, lambda s: s.roll(1, dims=0))


def stale_buffer(monkeypatch) -> None:
    change_states(monkeypatch, torch.zeros_like)


def shifted_ids(monkeypatch) -> None:
    pad = forward_module._right_padded

    def shifted(batch):
        ids, rows = pad(batch)
        return ids.roll(1, dims=1), rows

    monkeypatch.setattr(forward_module, "_right_padded", shifted)


def left_padding(monkeypatch) -> None:
    """Without a mask, and with rows taken from where they then are."""

    def padded(batch):
        width = max(map(len, batch))
        ids = np.zeros((len(batch), width), np.int64)
        rows = []
        for at, sample in enumerate(batch):
            ids[at, width - len(sample) :] = sample
            rows.append(at * width + width - len(sample) + np.arange(len(sample)))
        return torch.from_numpy(ids), torch.from_numpy(np.concatenate(rows))

    monkeypatch.setattr(forward_module, "_right_padded", padded)


FAULTS = [
    shift_layers,
    swap_row_pairs,
    rows_of_another_sample,
    shift_positions,
    stale_buffer,
    shifted_ids,
    left_padding,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_found(fault, make_target, monkeypatch, capsys):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    fault(monkeypatch)
    with pytest.raises(FoundProblems, match="self-check failed"):
        report(self_check(target, LAYERS, samples()))
    assert "wrong" in capsys.readouterr().err


def test_nothing_is_written_where_it_fails(
    make_target, write_corpus, run, tmp_path, monkeypatch, capsys
):
    shift_layers(monkeypatch)
    out = tmp_path / "s"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(5), "--out", out)
    assert run(extract_command, *args, "--layers", "0,1,4", "--codec", "raw") == 1
    assert "nothing is extracted" in " ".join(capsys.readouterr().err.split())
    assert not (out / "zarr.json").exists()


def test_missing_final_norm_is_found(make_target, monkeypatch):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    forward = target.base.forward
    seen: list[torch.Tensor] = []
    target.final_norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))

    def without_norm(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state = seen[-1] * 3
        return output

    with monkeypatch.context() as patch:
        patch.setattr(target.base, "forward", without_norm)
        patch.setattr(type(target), "own_logits", own_logits_of(make_target("qwen3")))
        checks = self_check(target, LAYERS, samples())
    assert [check.name for check in checks if not check.is_good] == ["log-probabilities"]


def own_logits_of(folder: Path):
    sound = load_target(folder, dtype=torch.float32, device="cpu", head=True)
    logits = type(sound).own_logits
    return lambda _target, ids: logits(sound, ids)


def test_wrong_logit_scale_is_found(make_target):
    target = load_target(make_target("gemma3"), dtype=torch.float32, device="cpu", head=False)
    scaled = replace(target, logit_scale=0.5)
    bad = [c.name for c in self_check(scaled, LAYERS, samples()) if not c.is_good]
    assert bad == ["log-probabilities"]


def spoil(target: Target, tokens: list[int]) -> None:
    """Let the target itself make states that are not finite wherever it reads these tokens."""
    with torch.no_grad():
        target.embed_tokens.weight[tokens] = float("nan")


def test_samples_without_finite_states_are_left_out(make_target, monkeypatch):
    """They are for the hot loop to quarantine; a fault elsewhere is found all the same."""
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    given = samples()
    given[4][7] = 251
    spoil(target, [251])
    checks = self_check(target, LAYERS, given)
    report(checks)
    assert len(checks) == 2 * len(LAYERS) + 1
    shift_layers(monkeypatch)
    with pytest.raises(FoundProblems, match="self-check failed"):
        report(self_check(target, LAYERS, given))


def test_hot_path_alone_that_is_not_finite_is_found(make_target, monkeypatch):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    change_states(monkeypatch, lambda s: torch.full_like(s, torch.nan))
    with pytest.raises(FoundProblems, match="self-check failed"):
        report(self_check(target, LAYERS, samples()))


def test_target_without_any_finite_state(make_target):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    spoil(target, list(range(260)))
    with pytest.raises(FoundProblems, match="all 4 samples of the self-check are not finite"):
        self_check(target, LAYERS, samples())


def extraction(target: Path, data: Path, out: Path, codec: str) -> tuple[object, ...]:
    sizes = ("--pack-tokens", 1024, "--batch-tokens", 512, "--layers", "0,1,4")
    files = ("--target", target, "--data", data, "--out", out)
    return (*files, *sizes, "--teacher", "final", "--codec", codec)


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "int4", "int3"])
def test_store_is_checked_at_the_end(codec, tiny_target, write_corpus, run, tmp_path):
    """Far from its bounds, and written to the log."""
    out = tmp_path / "store"
    assert run(extract_command, *extraction(tiny_target, write_corpus(80), out, codec)) == 0
    records = map(json.loads, (out / "logs/extract.jsonl").read_text().splitlines())
    checks = [record for record in records if record["kind"] == "stored-check"]
    assert len(checks) == 2 * len(LAYERS) + 1
    for check in checks:
        assert check["ok"]
        assert check["value"] < 0.8 * check["bound"] or check["value"] == 0, check


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("fault", ["shifted rows", "another layer", "stale rows"])
def test_fault_behind_the_forward_is_found(
    fault, codec, tiny_target, write_corpus, run, tmp_path, monkeypatch, capsys
):
    states = forward_module.StateForward.states

    def damaged(self, samples, rows):
        is_finite = states(self, samples, rows)
        if fault == "shifted rows":
            rows.copy_(rows.roll(1, dims=1))
        elif fault == "another layer":
            rows[:2] = rows[:2].flip(0)
        else:
            rows[:, rows.shape[1] // 2 :] = rows[:, : -(rows.shape[1] // 2)]
        return is_finite

    def without_first_check(*_given):
        monkeypatch.setattr(forward_module.StateForward, "states", damaged)
        return []

    monkeypatch.setattr("dflash_offline.extract.run.self_check", without_first_check)
    options = extraction(tiny_target, write_corpus(80), tmp_path / "store", codec)
    assert run(extract_command, *options) == 1
    assert "check of the store failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [("--codec", "raw"), ("--codec", "int8", "--teacher", "final"), ("--teacher", "topk:4")],
    ids=lambda options: options[-1],
)
def test_sample_that_the_target_itself_spoils(options, make_target, run, tmp_path):
    """Among those of the self-check, and quarantined as any other."""
    folder, data = shutil.copytree(make_target("qwen3"), tmp_path / "target"), tmp_path / "d.jsonl"
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("~") - 33] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = [("Name a letter.", "abcdefghi"[i] * 20 * (i + 1)) for i in range(9)]
    rows[-1] = ("Name a letter.", "~" * 200)
    talks = [[{"role": r, "content": c} for r, c in zip(ROLES, row, strict=True)] for row in rows]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    args = ("--target", folder, "--data", data, "--out", tmp_path / "s", "--layers", "0,1,4")
    args = (*args, "--holdout", "0%", *options)
    assert run(extract_command, *args, "--max-bad", 20) == 0
    assert len(open_cache(str(tmp_path / "s")).samples) == 8
    assert run(cache_command, "verify", "--deep", tmp_path / "s") == 0
    assert run(extract_command, *args) == 1
