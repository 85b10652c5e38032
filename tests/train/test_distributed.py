"""Several processes give what one gives: sums, gradients, and a whole run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_offline.train.cli import main
from dflash_offline.train.distributed import World, gather_objects, largest, sum_over_ranks

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


def run(*command: str) -> str:
    done = subprocess.run([*RUN, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_sums_over_two_processes(tmp_path: Path):
    (tmp_path / "sums.py").write_text(SUMS)
    assert run("--nproc-per-node=2", str(tmp_path / "sums.py")).count("sums agree") == 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_is_the_same_at_any_world_size(small_store, tmp_path: Path, world_size: int):
    (tmp_path / "main.py").write_text("from dflash_offline.train.cli import main\nmain()\n")
    losses, evals = {}, {}
    for size in (1, world_size):
        out = tmp_path / f"run{size}"
        options = {
            "--cache": small_store[0],
            "--out": str(out),
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
        }
        flat = [part for pair in options.items() for part in pair]
        if size == 1:
            with pytest.raises(SystemExit):
                main(flat)
        else:
            run(f"--nproc-per-node={size}", str(tmp_path / "main.py"), *flat)
        records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses[size] = [each["loss"] for each in records if each["kind"] == "train"]
        evals[size] = [each for each in records if each["kind"] == "eval"]
    assert len(losses[1]) == 5
    assert losses[world_size] == pytest.approx(losses[1], rel=1e-5)
    assert evals[world_size][-1]["num_anchors"] == evals[1][-1]["num_anchors"]
