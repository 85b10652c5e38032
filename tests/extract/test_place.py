"""Which worker a process is, by the variables of its launcher."""

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.place import LAUNCHER, Place, place_in

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
TORCHRUN |= {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "123456",
}


def test_no_launcher():
    assert place_in({}) is None
    # A batch script of Slurm itself, or srun of one task.
    assert place_in({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None
    assert place_in(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun():
    expected = Place(rank=9, size=16, local_rank=1, local_size=8, launched=False)
    assert place_in(dict(TORCHRUN)) == expected
    launched = place_in(TORCHRUN | {LAUNCHER: "1"})
    assert launched is not None
    assert launched.launched


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "", "RANK is '' in the environment"),
        ("LOCAL_RANK", "x", "LOCAL_RANK is 'x' in the environment"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE is '-2' in the environment"),
        ("MASTER_PORT", "", "MASTER_PORT is '' in the environment"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set, so the 16 workers"),
    ],
)
def test_variables_that_say_nothing(name: str, value: str, words: str):
    with pytest.raises(BadInput, match=words):
        place_in(TORCHRUN | {name: value})


def test_slurm():
    environment = SLURM | {"MASTER_ADDR": "node-0"}
    expected = Place(rank=9, size=16, local_rank=1, local_size=8, launched=False)
    assert place_in(environment) == expected
    assert environment["MASTER_PORT"] == "23456"
    with pytest.raises(BadInput, match="MASTER_ADDR is not set.*scontrol"):
        place_in(dict(SLURM))


def test_two_launchers_are_refused(run, monkeypatch, capsys):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    args = ("--target", "t", "--data", "d", "--out", "o", "--gpus", 2)
    assert run(extract_command, *args) == 2
    assert "started by torchrun or Slurm" in capsys.readouterr().err
