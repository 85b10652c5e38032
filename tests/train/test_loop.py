"""Whole runs on a small store: records, resume, signals, mixes, and what is refused."""

import itertools
import json
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_offline.common.errors import BadInput, DamagedStore, Stopped
from dflash_offline.train import loop
from dflash_offline.train.checkpoint import checkpoints
from dflash_offline.train.cli import main
from dflash_offline.train.distributed import World
from dflash_offline.train.evaluate import BlockJudge
from dflash_offline.train.export import load_drafter
from dflash_offline.train.loop import Run, train, train_step
from dflash_offline.train.order import StreamState
from dflash_offline.train.report import write_report
from dflash_offline.train.run_log import RunLog
from dflash_offline.train.setup import prepare
from dflash_offline.train.stream import StepBuilder


def records(out: Path, kind: str) -> list[dict]:
    lines = (out / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(out, "train")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_drafter(folder).state_dict()


def assert_same_drafter(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_leaves_what_it_promises(config, small_store, tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr("dflash_offline.train.loop.write_report", write_report)
    folder = train(config(small_store[0], out, eval_every=3))
    assert folder == out / "draft"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "identity.json",
        "model.safetensors",
    ]
    assert (out / "report.html").stat().st_size > 10_000
    assert list((out / "tensorboard").glob("events*"))
    assert "num_steps: 6" in (out / "config.yaml").read_text()
    first = json.loads((out / "log.jsonl").read_text().splitlines()[0])
    assert first["kind"] == "run"
    assert first["config"]["num_steps"] == 6
    train_records, evals = records(out, "train"), records(out, "eval")
    assert [record["step"] for record in train_records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evals] == [3, 6]
    last = train_records[-1]
    assert len(last["accepted_by_position"]) == len(evals[-1]["accepted_by_position"]) == 3
    assert last["acceptance"] == pytest.approx(1 + sum(last["accepted_by_position"]))
    assert last["lr"] > 5e-5  # the last step learns, too
    assert set(last["seconds"]) == {"data", "forward", "backward", "optimizer", "eval"}
    assert set(evals[-1]["by_source"]) == {"test"}
    assert load_drafter(folder).config.mask_token_id == 96


def test_a_run_says_what_memory_it_takes(config, small_store, tmp_path, capsys):
    train(config(small_store[0], tmp_path / "run", num_steps=1, shard="all"))
    line = r"training takes about \d+\.\d+ GB \(target 0\.00, drafter 0\.00, optimiser 0\.00, "
    said = capsys.readouterr().err
    assert re.search(line, said)
    assert "--shard all: there is one process, which holds everything" in said


def test_training_lowers_the_loss(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, num_steps=40, lr=3e-3, log_every=10, samples_per_step=5))
    values = list(losses(out).values())
    assert values[-1] < 0.8 * values[0]


def test_the_same_seed_gives_the_same_run(config, small_store, tmp_path):
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        train(config(small_store[0], tmp_path / name, seed=seed))
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert losses(tmp_path / "one") != losses(tmp_path / "three")
    assert_same_drafter(tmp_path / "one/draft", tmp_path / "two/draft")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal when a step's record is written."""
    original = RunLog.train

    def train_and_signal(self, record, **rest):
        original(self, record, **rest)
        if record["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunLog, "train", train_and_signal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_leaves_a_checkpoint_and_exit_code_3(
    config, small_store, tmp_path, monkeypatch, capsys, number
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config(small_store[0], whole))
    args = [
        *("--cache", small_store[0], "--out", str(cut), "--draft-layers", "1"),
        *("--block-size", "4", "--mask-token-id", "96", "--num-anchors", "6"),
        *("--samples-per-step", "3", "--num-steps", "6", "--lr", "1e-3", "--device", "cpu"),
        *("--log-every", "1"),
    ]
    with monkeypatch.context() as patch:
        stop_after(patch, 4, number)
        with pytest.raises(SystemExit) as end:
            main(args)
    assert end.value.code == 3
    assert "stopped after step 4" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in checkpoints(cut)] == ["step-4"]
    assert not (cut / "draft").exists()
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    assert losses(cut) == losses(whole)
    assert_same_drafter(whole / "draft", cut / "draft")


def test_memory_that_runs_out_ends_a_run_that_goes_on(config, small_store, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config(small_store[0], whole))

    steps = itertools.count(1)

    def fail(*args, **rest):
        if next(steps) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return train_step(*args, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", fail)
        with pytest.raises(Stopped, match=r"has run out \(CUDA out.*lower --rows-per-pass"):
            train(config(small_store[0], cut, checkpoint_every="2"))
    assert [path.name for path in checkpoints(cut)] == ["step-2", "step-4"]
    train(config(small_store[0], cut, checkpoint_every="2"))
    assert losses(cut) == losses(whole)
    assert_same_drafter(whole / "draft", cut / "draft")


def test_passes_change_nothing_but_rounding(config, small_store, tmp_path):
    train(config(small_store[0], tmp_path / "one"))
    train(config(small_store[0], tmp_path / "many", rows_per_pass=16))
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert list(one.values()) == pytest.approx(list(many.values()), rel=1e-4)


def test_evaluations_keep_to_the_rows_of_a_pass(config, corpus_maker, tmp_path, monkeypatch):
    corpus_maker(lengths=(40, 70, 25, 64, 60, 33), num_held_out=3).write(tmp_path / "store")
    run, judged = BlockJudge.run, []

    def counted(self, parts):
        judged.append(len(parts))
        return run(self, parts)

    monkeypatch.setattr(BlockJudge, "run", counted)
    for rows in (64, 16384):
        out = tmp_path / f"{rows}"
        train(config(tmp_path / "store", out, num_steps=1, rows_per_pass=rows, block_size=64))
    # A block a pass, then all three samples in one.
    assert judged == [1] * (len(judged) - 1) + [3]
    assert len(judged) > 6
    few, many = (records(tmp_path / f"{rows}", "eval")[0] for rows in (64, 16384))
    assert few["accepted_by_position"] == many["accepted_by_position"]
    # The longest text ends before the last slot.
    assert few["accepted_by_position"][-1] is None
    assert few["accepted_by_position"][0] is not None


def test_epochs_and_the_last_short_step(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, num_steps=None, num_epochs=1.5))
    # Five samples an epoch, three a step: 3 + 3 + 2 samples.
    assert sorted(losses(out)) == [1, 2, 3]
    state = json.loads((checkpoints(out)[-1] / "state.json").read_text())
    assert state["stream"] == {"epoch": 1, "position": 3}
    assert state["is_finished"] is True
    # A fifth of an epoch is one sample, whatever 3.2 is in binary.
    fifth = config(small_store[0], tmp_path / "fifth", num_steps=None, num_epochs=3.2)
    assert prepare(fifth, World()).total_samples == 3 * 5 + 1
    # More epochs are whole ones, too: 2 samples of the second, then 5.
    train(config(small_store[0], out, num_steps=None, num_epochs=3, resume=True))
    state = json.loads((checkpoints(out)[-1] / "state.json").read_text())
    assert state["stream"] == {"epoch": 3, "position": 0}
    assert sorted(losses(out)) == [1, 2, 3, 4, 5, 6]


def test_minutes_bound_a_run(config, small_store, tmp_path):
    out = tmp_path / "run"
    limit = {"num_steps": None, "max_minutes": 0.01}
    train(config(small_store[0], out, **limit))
    rates = [record["lr"] for record in records(out, "train")]
    assert len(rates) > 3
    assert max(rates) > 5e-4
    assert rates[-1] < 2e-4
    assert (out / "draft/model.safetensors").exists()


def test_a_finished_run_is_not_overwritten(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, num_steps=2))
    with pytest.raises(BadInput, match="finished run"):
        train(config(small_store[0], out, num_steps=4))
    train(config(small_store[0], out, num_steps=4, resume=True))
    assert sorted(losses(out)) == [1, 2, 3, 4]


def test_other_options_are_refused_when_a_run_goes_on(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, num_steps=2))
    for change in ({"lr": 2e-3}, {"num_anchors": 7}, {"block_size": 5}, {"draft_layers": 2}):
        (name,) = change
        with pytest.raises(BadInput, match=f"--{name.replace('_', '-')}: {change[name]} given"):
            train(config(small_store[0], out, num_steps=4, resume=True, **change))
    file = tmp_path / "draft.json"
    file.write_text('{"intermediate_size": 40}')
    with pytest.raises(BadInput, match="intermediate_size to 40, but the drafter .* has 96"):
        train(config(small_store[0], out, num_steps=4, resume=True, draft_config=file))
    with pytest.raises(BadInput, match="--mask-token-id 7 given, but the run in .* has 96"):
        train(config(small_store[0], out, num_steps=4, resume=True, mask_token_id=7))
    # What auto is on a CPU.
    train(config(small_store[0], out, num_steps=4, resume=True, device="cpu", dtype="float32"))


def test_a_store_that_has_grown_is_refused_when_a_run_goes_on(config, corpus_maker, tmp_path):
    first, more = corpus_maker(), corpus_maker(seed=5, source="more")
    first.write(tmp_path / "store")
    run = config(tmp_path / "store", tmp_path / "run", num_steps=2)
    train(run)
    with more.open(tmp_path / "store", append=True) as store:
        more.commit(store, first_pack=first.plan.num_packs)
    words = (
        r"--cache: training samples 10 \(\w+\) given, but the run in .* was started "
        r"with training samples 5 "
    )
    with pytest.raises(BadInput, match=words):
        train(replace(run, num_steps=4, resume=True))


def test_checkpoints_rotate(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, checkpoint_every="1", keep_checkpoints=2))
    assert [path.name for path in checkpoints(out)] == ["step-5", "step-6"]


def test_checkpoints_by_the_clock(config, small_store, tmp_path):
    out = tmp_path / "run"
    train(config(small_store[0], out, checkpoint_every="0.00001m", keep_checkpoints=9))
    assert [path.name for path in checkpoints(out)] == [f"step-{n}" for n in range(1, 7)]


def test_a_mix_of_stores(config, corpus_maker, tmp_path):
    urls = []
    for number, weight in ((0, 1.0), (1, 2.0)):
        corpus = corpus_maker(seed=number, source=f"s{number}")
        corpus.identity = corpus_maker().identity
        corpus.write(tmp_path / f"store{number}")
        urls.append((str(tmp_path / f"store{number}"), weight))
    out = tmp_path / "run"
    train(
        config(
            "",
            out,
            cache=tuple(url for url, _ in urls),
            weight=tuple(weight for _, weight in urls),
            num_steps=None,
            num_epochs=1,
        )
    )
    assert sorted(losses(out)) == [1, 2, 3, 4, 5]  # 5 + 10 samples
    assert set(records(out, "eval")[-1]["by_source"]) == {"s0", "s1"}


def test_init_from_an_exported_drafter(config, small_store, tmp_path):
    train(config(small_store[0], tmp_path / "first"))
    start = tmp_path / "first/draft"
    options = {"draft_layers": None, "block_size": None, "mask_token_id": None, "layers": "3, 1"}
    options |= {"init_from": start, "num_steps": 1, "lr": 1e-9}
    train(config(small_store[0], tmp_path / "second", **options))
    before, after = weights(start), weights(tmp_path / "second/draft")
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-7)
    assert load_drafter(tmp_path / "second/draft").config == load_drafter(start).config


def test_a_drafter_trains_with_the_scales_that_its_file_gives_engines(
    config, corpus_maker, tmp_path
):
    corpus_maker(teacher="final").write(tmp_path / "store")
    found = {}
    for key, value in (
        ("block_size", 4),  # as without a file
        ("input_embedding_scale", 3.0),
        ("output_multiplier", 0.1),
        ("final_logit_softcapping", 2.0),
    ):
        out, file = tmp_path / key, tmp_path / f"{key}.json"
        file.write_text(json.dumps({"dflash_config": {key: value}}))
        train(config(tmp_path / "store", out, draft_config=file, num_steps=1, lr=1e-30))
        found[key] = losses(out)[1]
        options = {"draft_layers": None, "block_size": None, "mask_token_id": None}
        again = tmp_path / f"from-{key}"
        train(config(tmp_path / "store", again, init_from=out / "draft", num_steps=1, **options))
        assert losses(again)[1] == found[key]
    assert len(set(found.values())) == 4
    file = tmp_path / "final_logit_softcapping.json"
    with pytest.raises(BadInput, match="final_logit_softcapping of the drafter: 2.0 given, but"):
        train(config(tmp_path / "store", tmp_path / "kl", draft_config=file, loss="kl"))


def test_what_the_teacher_changes(config, corpus_maker, tmp_path):
    corpus_maker(teacher="final").write(tmp_path / "store")
    found = set()
    for loss, labels in (("decay", "data"), ("decay", "teacher"), ("kl", "data")):
        out = tmp_path / f"{loss}-{labels}"
        train(config(tmp_path / "store", out, loss=loss, labels=labels, num_steps=2))
        found.add(tuple(losses(out).values()))
    assert len(found) == 3


def test_a_teacher_of_best_tokens(config, corpus_maker, tmp_path):
    corpus_maker(teacher="topk:5").write(tmp_path / "store")
    found = set()
    for loss, labels in (("decay", "data"), ("decay", "teacher"), ("dpace,kl=0.9,ce=0.1", "data")):
        out = tmp_path / f"{loss}-{labels}"
        train(config(tmp_path / "store", out, loss=loss, labels=labels, num_steps=2))
        found.add(tuple(losses(out).values()))
    assert len(found) == 3
    with pytest.raises(BadInput, match="--loss tv: .* extract with --teacher final, or use"):
        train(config(tmp_path / "store", tmp_path / "tv", loss="tv"))


def test_products_with_a_teachers_states_are_useful_work(config, corpus_maker, tmp_path):
    corpus_maker(teacher="final").write(tmp_path / "final")
    corpus_maker(teacher="topk:5").write(tmp_path / "best")

    def counts(store: str, loss: str, labels: str = "data"):
        run = config(tmp_path / store, tmp_path / "run", loss=loss, labels=labels)
        setup = prepare(run, World())
        builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
        draws, state = setup.order.take(StreamState(), 3)
        try:
            return Run(setup)._counts(builder.build(draws, state))
        finally:
            builder.close()

    plain = counts("final", "decay")
    product = 2 * plain.rows * 64 * 97
    for given in (("final", "kl"), ("final", "decay", "teacher"), ("final", "kl", "teacher")):
        assert counts(*given).flops == plain.flops + product
    # Of best tokens none are made.
    for given in (("best", "kl"), ("best", "decay", "teacher")):
        assert counts(*given).flops == plain.flops


def test_skipped_samples_are_counted_and_nothing_is_nan(config, corpus_maker, tmp_path):
    corpus = corpus_maker()
    for index in (0, 1, 2):
        corpus.masks[index][:] = 0
    corpus.write(tmp_path / "store")
    out = tmp_path / "run"
    train(config(tmp_path / "store", out, num_steps=4))
    last = records(out, "train")[-1]
    # Steps take 3 samples of 5; the first epoch begins with the three that have no anchor.
    assert last["skipped_samples"] >= 6
    assert last["skipped_steps"] >= 1
    drafter = weights(out / "draft")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in drafter.values())


def damage(url: str, pack: int) -> None:
    (shard,) = Path(url).glob(f"features/c/{pack}/0/0/0")
    raw = bytearray(shard.read_bytes())
    raw[1000] ^= 1
    shard.write_bytes(raw)


def test_a_damaged_pack_stops_the_run(config, small_store, tmp_path):
    damage(small_store[0], 0)
    with pytest.raises(DamagedStore, match="pack 0"):
        train(config(small_store[0], tmp_path / "run"))
    assert not any(thread.name == "stream" for thread in threading.enumerate())


def test_a_damaged_pack_is_left_out_named_and_counted(config, small_store, tmp_path, capsys):
    url, corpus = small_store
    damage(url, 0)
    damage(url, corpus.plan.samples[-1].pack)  # held out
    train(config(url, tmp_path / "run", damaged="skip", num_steps=None, num_epochs=2))
    lost = sum(sample.pack == 0 for sample in corpus.plan.samples)
    assert 0 < lost < len(corpus.plan.samples) - 1
    last = records(tmp_path / "run", "train")[-1]
    assert last["damaged_samples"] == 2 * lost
    assert last["skipped_samples"] == 0
    # The last step has one sample, and it is among the lost.
    assert last["loss"] is None
    assert "NaN" not in (tmp_path / "run/log.jsonl").read_text()
    shown = capsys.readouterr().err
    assert shown.count(f"left out: {url}: ") == 1
    assert "pack 0" in shown
    assert f"not evaluated: {url}: " in shown
    assert f"{2 * lost} damaged" in shown
    state = json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert state["damaged_samples"] == 2 * lost


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "muon"},
        {"ema": 0.5},
        {"noise": 0.5},
        {"loss": "dpace"},
        {"loss": "dpace=0.3,kl=0.9,ce=0.1"},
    ],
    ids=str,
)
def test_every_way_of_training_resumes_bit_identically(config, corpus_maker, tmp_path, change):
    corpus_maker(teacher="final").write(tmp_path / "store")
    options = {"num_steps": 4, "checkpoint_every": "2", "keep_checkpoints": 9, **change}
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    train(config(tmp_path / "store", whole, **options))
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "draft")
    shutil.rmtree(cut / "checkpoints/step-4")
    # The log is ahead of the newest checkpoint.
    train(config(tmp_path / "store", cut, **options))
    assert losses(cut) == losses(whole)
    assert [record["step"] for record in records(cut, "train")] == [1, 2, 3, 4]
    assert_same_drafter(whole / "draft", cut / "draft")
    train(config(tmp_path / "store", plain, num_steps=4))
    ours, theirs = weights(whole / "draft"), weights(plain / "draft")
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)
