"""Several processes give what one gives: sums, gradients, and a whole run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dflash_offline.common.errors import Stopped
from dflash_offline.train.checkpoint import checkpoints, load_state
from dflash_offline.train.cli import main
from dflash_offline.train.distributed import (
    World,
    gather_objects,
    largest,
    sum_over_ranks,
    with_the_others,
)

WORLDS = Path(__file__).parent / "worlds.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]

# Sums of tensors of two dtypes and many sizes, over more than one bucket.
SUMS = """
import torch
from dflash_offline.train import distributed
from dflash_offline.train.distributed import *
distributed._BUCKET_ELEMENTS = 100
world = join_world("cpu")
tensors = [torch.full((n,), float(world.rank + 1)) for n in (1, 70, 60, 300, 5)]
tensors.append(torch.arange(4, dtype=torch.float64) * (world.rank + 1))
sum_over_ranks(tensors)
assert all(bool((tensor == 3).all()) for tensor in tensors[:5]), tensors
assert tensors[5].tolist() == [0, 3, 6, 9]
assert largest(float(world.rank), world, torch.device("cpu")) == 1.0
assert gather_objects(world.rank, world) == [0, 1]
leave_world()
print("sums agree")
"""


def test_one_process_needs_no_group():
    tensor = torch.ones(3)
    sum_over_ranks([tensor])
    assert tensor.tolist() == [1, 1, 1]
    assert largest(2.0, World(), torch.device("cpu")) == 2.0
    assert gather_objects("x", World()) == ["x"]


def test_errors_of_computing_stay_what_they_are():
    with pytest.raises(Stopped, match="another process of the job is gone"), with_the_others():
        raise RuntimeError("anything")
    lost = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    with pytest.raises(Stopped, match="reset by peer"), with_the_others(computing=True):
        raise RuntimeError(lost)
    with pytest.raises(Stopped), with_the_others(computing=True):
        raise torch.distributed.DistBackendError("NCCL communicator was aborted")
    with pytest.raises(RuntimeError, match="out of memory"), with_the_others(computing=True):
        raise RuntimeError("CUDA out of memory")


def run(*command: str) -> str:
    done = subprocess.run([*RUN, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_sums_over_two_processes(tmp_path: Path):
    (tmp_path / "sums.py").write_text(SUMS)
    assert run("--nproc-per-node=2", str(tmp_path / "sums.py")).count("sums agree") == 2


def run_worlds(sizes: list[int], script: Path, *arguments: str) -> None:
    """Run a script as jobs of several sizes; see worlds.py."""
    command = [sys.executable, str(WORLDS), ",".join(map(str, sizes)), str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# Updates of a toy model at several world sizes; its gradients differ by rank and add up.
OPTIMIZER = """
import sys, torch
from torch import nn
from dflash_offline.train.distributed import join_world, leave_world
from dflash_offline.train.optimizer import Optimizer
world = join_world("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 7), nn.LayerNorm(7))
kind = dict(weight_decay=0.1, betas=(0.9, 0.95), kind=sys.argv[1], ema=0.8, world=world)
optimizer = Optimizer(model, **kind)
def step(number):
    optimizer.zero_grad()
    for part in range(6)[world.rank :: world.size]:
        generator = torch.Generator().manual_seed(10 * number + part)
        for parameter in model.parameters():
            parameter.grad += torch.randn(parameter.shape, generator=generator)
    poison = float("nan") if number == 2 and world.is_first else 0.0
    next(model.parameters()).grad[0, 0] += poison
    return optimizer.step(lr=0.01, weight_sum=torch.tensor(3.0), clip=2.0)
norms = [step(number) for number in range(3)]
assert [float(skipped) for _, skipped in norms] == [0, 0, 1], norms
saved = {name: each.clone() for name, each in optimizer.tensors().items()}
if len(sys.argv) > 3:
    saved = torch.load(sys.argv[3])
    optimizer.load(saved.__getitem__)
norms += [step(number) for number in range(3, 6)]
after = optimizer.tensors()
with optimizer.averaged():
    averages = {name: each.clone() for name, each in model.state_dict().items()}
if world.is_first:
    torch.save([saved, after, averages, torch.stack([norm for norm, _ in norms])], sys.argv[2])
leave_world()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_are_the_same_at_any_world_size(tmp_path: Path, kind: str):
    script = tmp_path / "optimizer.py"
    script.write_text(OPTIMIZER)
    run_worlds([1, 2, 3], script, kind, str(tmp_path / "{size}.pt"))
    found = {size: torch.load(tmp_path / f"{size}.pt") for size in (1, 2, 3)}
    # What three processes left, two go on from.
    torch.save(found[3][0], tmp_path / "start.pt")
    run_worlds([2], script, kind, str(tmp_path / "on.pt"), str(tmp_path / "start.pt"))
    found["3 then 2"] = torch.load(tmp_path / "on.pt")
    for size in (2, 3, "3 then 2"):
        for ours, theirs in zip(found[size][1:3], found[1][1:3], strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
        norms = (found[size][3][[0, 1, 3, 4, 5]], found[1][3][[0, 1, 3, 4, 5]])
        torch.testing.assert_close(*norms)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_a_run_is_the_same_at_any_world_size(small_store, tmp_path: Path, shard: str):
    """And goes on in one process, with the other option, from what several left."""
    script = tmp_path / "main.py"
    script.write_text("from dflash_offline.train.cli import main\nmain()\n")
    options = {
        "--cache": small_store[0],
        "--draft-layers": "1",
        "--block-size": "4",
        "--mask-token-id": "96",
        "--num-anchors": "6",
        "--samples-per-step": "4",
        "--num-steps": "5",
        "--lr": "1e-3",
        "--device": "cpu",
        "--log-every": "1",
        "--checkpoint-every": "2",
        "--shard": shard,
    }
    flat = [part for pair in options.items() for part in pair]
    run_worlds([1, 2, 3], script, *flat, "--out", str(tmp_path / "run{size}"))
    whole = records_of(tmp_path / "run1")
    assert [each["kind"] for each in whole] == [*["train"] * 5, "eval"]
    for size in (2, 3):
        out = tmp_path / f"run{size}"
        compare(records_of(out), whole)
        shutil.rmtree(out / "draft")
        shutil.rmtree(out / "checkpoints/step-5")
        other = "all" if shard == "optimizer" else "optimizer"
        with pytest.raises(SystemExit) as end:
            main([*flat, "--out", str(out), "--shard", other])
        assert end.value.code == 0
        compare(records_of(out), whole)


@pytest.fixture(params=["optimizer", "all"])
def two_workers(small_store, tmp_path: Path, request: pytest.FixtureRequest):
    """A run without an end by two workers that has made some steps; its command without the end."""
    out = tmp_path / "run"
    command = [
        *(sys.executable, "-c", "from dflash_offline.train.cli import main; main()"),
        *("--cache", small_store[0], "--out", str(out), "--gpus", "2", "--device", "cpu"),
        *("--draft-layers", "1", "--block-size", "4", "--mask-token-id", "96"),
        *("--samples-per-step", "4", "--log-every", "1", "--checkpoint-every", "2"),
        *("--lr-schedule", "constant", "--shard", request.param),
    ]
    launcher = subprocess.Popen(
        [*command, "--num-steps", "100000"], stderr=subprocess.PIPE, text=True
    )
    log = out / "log.jsonl"
    end = time.monotonic() + 200
    while not (log.exists() and log.read_text().count('"kind": "train"') > 3):
        assert time.monotonic() < end, "no steps"
        time.sleep(0.2)
    yield launcher, command, out
    launcher.kill()
    launcher.communicate()


def go_on(command: list[str], out: Path) -> None:
    """Run two more steps from the newest checkpoint."""
    step = load_state(checkpoints(out)[-1]).step
    again = [*command, "--num-steps", str(step + 2)]
    done = subprocess.run(again, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("going on from") == 1
    assert records_of(out)[-2]["step"] == step + 2


@pytest.mark.slow
def test_a_lost_worker_is_named_and_the_same_command_goes_on(two_workers):
    launcher, command, out = two_workers
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    killed = time.monotonic()
    _, shown = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, shown[-2000:]
    assert time.monotonic() - killed < 10
    assert "worker 1 (rank 1 of 2 on " in shown.splitlines()[-1]
    assert "was ended by SIGKILL" in shown.splitlines()[-1]
    go_on(command, out)


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint_of_the_last_step(two_workers):
    launcher, _command, out = two_workers
    launcher.send_signal(signal.SIGTERM)
    _, shown = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, shown[-2000:]
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, errors
    step = load_state(checkpoints(out)[-1]).step
    assert f"stopped after step {step}; the same command goes on" in errors[0]


def records_of(out: Path) -> list[dict]:
    """Return what a run measured, without what it said of itself each time that it started."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "run"
    return [record for record in records if record["kind"] != "run"]


def compare(ours: list[dict], theirs: list[dict]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["kind"], mine["step"]) == (other["kind"], other["step"])
        if mine["kind"] == "train":
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            assert mine["skipped_samples"] == other["skipped_samples"]
        else:
            assert mine["num_anchors"] == other["num_anchors"]
