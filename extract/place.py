"""Which of the workers of a run this process is: told by our launcher, by torchrun or by Slurm."""

import os
import platform
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dflash_offline.common.errors import BadInput
from dflash_offline.common.launch import LAUNCHER, die_with


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the workers of a run.

    Attributes:
        local_size: workers on this machine.
        launched: by `dflash-extract` itself, which then tells the user about workers that die.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process plans, owns the store and talks to the user."""
        return self.rank == 0

    def describe(self, device: str) -> str:
        """Return the worker's name for messages."""
        return (
            f"worker {self.rank} (rank {self.rank} of {self.size} on {platform.node()}, {device})"
        )


def place_in(environment: MutableMapping[str, str]) -> Place | None:
    """Return the place that a launcher gave this process, `None` where none started it.

    Slurm's variables are completed by those that torch.distributed reads.

    Raises:
        BadInput: nothing says where several processes meet, or a variable is no number.
    """
    if "RANK" not in environment and _number(environment, "SLURM_STEP_NUM_TASKS", "1") > 1:
        _complete_slurm(environment)
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    place = Place(
        rank=_number(environment, "RANK"),
        size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", "0"),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", "1"),
        launched=LAUNCHER in environment,
    )
    if place.size > 1:
        _number(environment, "MASTER_PORT")
        if not environment.get("MASTER_ADDR"):
            raise BadInput(
                f"MASTER_ADDR is not set, so the {place.size} workers of WORLD_SIZE cannot find "
                "each other; start them with torchrun, or unset RANK and WORLD_SIZE"
            )
    return place


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isdecimal():
        raise BadInput(
            f"{name} is {text!r} in the environment, where torchrun or Slurm would put a number; "
            "unset it to run without them"
        )
    return int(text)


def _complete_slurm(environment: MutableMapping[str, str]) -> None:
    if "MASTER_ADDR" not in environment:
        raise BadInput(
            "MASTER_ADDR is not set, so the processes that srun started cannot find each other; "
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
        )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    # "8", or "8(x4)" for four nodes; the first node's number is good enough for threads.
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    environment["LOCAL_WORLD_SIZE"] = re.split(r"\D", per_node)[0]
    # The same for all processes of a step, and seldom for two jobs on a node.
    environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 20000))


def die_with_torchrun(environment: Mapping[str, str]) -> None:
    """Let the kernel end this process with the torchrun that started it, if one has."""
    # Whoever else sets RANK may end before its children.
    if "TORCHELASTIC_RUN_ID" in environment:
        die_with(os.getppid())
