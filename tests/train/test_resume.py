"""Runs that go on after they stopped at an awkward moment."""

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest

from dflash_offline.common.errors import DamagedStore, Stopped
from dflash_offline.train import loop
from dflash_offline.train.checkpoint import checkpoints, load_state
from dflash_offline.train.distributed import World
from dflash_offline.train.loop import Run, train
from dflash_offline.train.report import RunRecords, write_report
from dflash_offline.train.setup import prepare


def records(out: Path, kind: str) -> list[dict]:
    lines = (out / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def killed_after(out: Path, step: int) -> None:
    """Take away what a finished run wrote after a step."""
    shutil.rmtree(out / "draft")
    for folder in checkpoints(out):
        if load_state(folder).step > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["publish", "write_report"])
def test_a_run_that_ends_on_a_full_disk_goes_on(config, small_store, tmp_path, monkeypatch, what):
    def full(*_given):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = config(small_store[0], tmp_path / "run", num_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop, what, full)
        with pytest.raises(OSError, match="No space"):
            train(run)
    assert train(run) == tmp_path / "run/draft"
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1, 2]
    assert (tmp_path / "run/draft/model.safetensors").exists()


def test_a_checkpoint_between_records_knows_of_skipped_steps(config, corpus_maker, tmp_path):
    corpus = corpus_maker()
    for index in (0, 1, 2):
        corpus.masks[index][:] = 0
    corpus.write(tmp_path / "store")
    run = config(
        tmp_path / "store", tmp_path / "run", num_steps=4, log_every=3, checkpoint_every="1",
        keep_checkpoints=9,
    )  # fmt: skip
    train(run)
    (last,) = records(tmp_path / "run", "train")[-1:]
    # The first step's samples are those three.
    assert load_state(tmp_path / "run/checkpoints/step-1").skipped_steps == 1
    killed_after(tmp_path / "run", 1)
    train(run)
    assert records(tmp_path / "run", "train")[-1]["skipped_steps"] == last["skipped_steps"] >= 1


def test_the_log_of_a_run_that_goes_on_says_its_new_options(config, small_store, tmp_path):
    train(config(small_store[0], tmp_path / "run", num_steps=2))
    train(config(small_store[0], tmp_path / "run", num_steps=3, resume=True))
    log = RunRecords(tmp_path / "run")
    assert log.config["num_steps"] == log.facts["num_steps"] == 3
    assert log.facts["mask_token"] == "given by --mask-token-id"


def test_nothing_is_missing_from_the_log_of_a_run_that_was_stopped(
    config, small_store, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "write_report", write_report)

    def run(**changes):
        return config(small_store[0], tmp_path / "run", log_every=4, **changes)

    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped, match="after step 1"):
        Run(prepare(run(num_steps=9), World())).to_the_end(stop)
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1]
    # That was enough: its drafter and its report can be had.
    assert train(run(num_steps=1)) == tmp_path / "run/draft"


def learned(out: Path) -> list[dict]:
    """Return records without what hangs on time."""
    names = ("step", "epoch", "loss", "acceptance", "accepted_by_position", "grad_norm", "lr")
    return [{name: each[name] for name in names} for each in records(out, "train")]


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_records_cover_the_same_steps_after_a_kill(config, small_store, tmp_path, step):
    out = tmp_path / "run"
    run = config(
        small_store[0], out, num_steps=8, log_every=3, checkpoint_every="1", keep_checkpoints=9
    )
    train(run)
    whole = learned(out)
    killed_after(out, step)
    train(run)
    assert learned(out) == whole
    assert [record["step"] for record in whole] == [3, 6, 8]


def test_records_cover_the_same_steps_after_stops(config, small_store, tmp_path):
    def run(name):
        return config(small_store[0], tmp_path / name, num_steps=5, log_every=3)

    train(run("whole"))
    stop = threading.Event()
    stop.set()
    for step in (1, 2, 3, 4):
        with pytest.raises(Stopped, match=f"after step {step}"):
            Run(prepare(run("stopped"), World())).to_the_end(stop)
        expected = {1: [1], 2: [2], 3: [3], 4: [3, 4]}[step]
        assert [record["step"] for record in records(tmp_path / "stopped", "train")] == expected
    train(run("stopped"))
    assert learned(tmp_path / "stopped") == learned(tmp_path / "whole")


def test_a_damaged_held_out_pack_costs_no_steps(config, small_store, tmp_path):
    url, corpus = small_store
    (shard,) = Path(url).glob(f"features/c/{corpus.plan.samples[-1].pack}/0/0/0")
    shard.write_bytes(shard.read_bytes()[:-1])
    run = config(url, tmp_path / "run", num_steps=3, eval_every=2)
    for step in (2, 3):
        with pytest.raises(DamagedStore):
            train(run)
        assert load_state(checkpoints(tmp_path / "run")[-1]).step == step
    # Nothing but the evaluation was missing.
    assert train(run) == tmp_path / "run/draft"
