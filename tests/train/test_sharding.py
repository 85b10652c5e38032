"""Weights shared out to processes: the same updates, no matter who has how many passes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.train.distributed import World
from dflash_offline.train.loss_spec import parse_loss
from dflash_offline.train.objective import objective_of
from dflash_offline.train.sharding import Sharding
from dflash_offline.train.step import accumulate
from dflash_offline.train.warm_up import blank_pass

HERE = Path(__file__).parent
# Relative, of the norm of a tensor: fp32 sums of some ten terms in another order differ by 1e-6,
# and the updates of four steps make no more of it.
TOLERANCE = 1e-5


def run_steps(
    sizes: str,
    out: Path,
    *,
    kind: str = "adamw",
    dtype: str = "float32",
    mistake: str = "none",
    start: Path | None = None,
) -> None:
    """Run jobs of several sizes; `out` has {size} in its name. See sharded_steps.py."""
    command = [sys.executable, str(HERE / "worlds.py"), sizes, str(HERE / "sharded_steps.py")]
    command += [kind, dtype, mistake, str(out)] + ([str(start)] if start else [])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]


def differences(ours: list, theirs: list) -> dict[str, float]:
    """Return the relative difference of every tensor of two results."""
    found = {"norms": float((ours[3] / theirs[3] - 1).abs().max())}
    for mine, other in zip(ours[1:3], theirs[1:3], strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            difference = float((mine[name] - tensor).norm() / tensor.norm())
            found[name] = max(found.get(name, 0.0), difference)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_are_those_of_one_process(tmp_path: Path, kind: str):
    """Four passes on the first process, one or none on the others."""
    run_steps("1,2,3", tmp_path / "{size}.pt", kind=kind)
    found = {size: torch.load(tmp_path / f"{size}.pt") for size in (1, 2, 3)}
    # Slices of three processes go on in two, those of two in one process that holds all, and
    # what that one left goes on in slices.
    for before, after in ((3, 2), (2, 1), (1, 3)):
        torch.save(found[before][0], tmp_path / f"start{after}.pt")
    run_steps("1,2,3", tmp_path / "on{size}.pt", kind=kind, start=tmp_path / "start{size}.pt")
    for size in (1, 2, 3):
        found[f"on in {size}"] = torch.load(tmp_path / f"on{size}.pt")
    for name, each in found.items():
        assert max(differences(each, found[1]).values()) < TOLERANCE, name
    for size in (2, 3):
        for rank in range(size):
            held = torch.load(tmp_path / f"{size}.pt.held{rank}")
            assert held["whole"] == 0, "weights stay whole between steps"
            share = held["all"] / size
            # The heads' norms have 8 rows, and three processes hold 3, 3 and 2 of them.
            assert held["values"] <= 1.05 * share
            assert held["gradients"] <= 1.05 * share
            assert held["moments"] <= 1.05 * (3 if kind == "adamw" else 2.1) * share


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_passes_round_what_one_process_rounds(tmp_path: Path, dtype: str):
    run_steps("1,2,3", tmp_path / "{size}.pt", dtype=dtype)
    one, two, three = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2, 3))
    for each in (two, three):
        # All products and roundings are those of one process. But a weight that lies between two
        # numbers may go the other way, by 2^-8 of itself.
        assert max(differences(each, one).values()) < 1e-3
        assert float(each[3][0, 1]) == float(one[3][0, 1]), "the first loss is the same bits"


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["mean", "labelled"])
def test_a_mistake_is_seen(tmp_path: Path, mistake: str):
    """Gradients as means over processes; idle passes that teach something."""
    run_steps("1,2", tmp_path / "{size}.pt", mistake=mistake)
    one, two = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    assert differences(two, one)["norms"] > 100 * TOLERANCE


@pytest.mark.parametrize("loss", ["decay", "dpace", "kl"])
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_an_idle_pass_teaches_nothing(toy_maker, loss, codec):
    toy = toy_maker(torch.float32)
    objective = objective_of(parse_loss(loss), labels="data", block_size=4)
    options = toy.options(with_final=objective.needs_teacher)
    if codec == "int4":
        toy = toy_maker(torch.float32, hidden_size=128)
        toy.head = type(toy.head)(embed=torch.ones(53, 128), weight=torch.ones(53, 128))
    given = blank_pass(options, codec, hidden=toy.config.hidden_size, exact=False, labelled=False)
    totals = accumulate(toy.drafter, toy.head, objective, [given])
    assert totals[1] == 0
    for name, parameter in toy.drafter.named_parameters():
        assert parameter.grad is not None, f"{name} would wait for the others for ever"
        assert not parameter.grad.any(), name


def test_an_old_torch_is_refused(toy_maker, monkeypatch):
    monkeypatch.setattr("dflash_offline.train.sharding._HAS_GRAD_DTYPE", False)
    with pytest.raises(BadInput, match=r"--shard all: torch .* 2\.10 and later can"):
        Sharding(
            toy_maker().drafter,
            world=World(size=2),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
