"""A run's records at Weights & Biases, where `--wandb` asks for them; a network is not needed.

Without a key the run is written to `<out>/wandb` for `wandb sync`. A resumed run goes on under the
same id.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_offline.common.errors import BadInput


class WandbLog:
    """An open run at Weights & Biases."""

    def __init__(self, project: str, out: Path, config: dict[str, Any]) -> None:
        """Start a run, or go on with it.

        Args:
            project: where the run appears.
            out: the run's folder: its name is the run's, its address the run's id.
            config: the options, secrets masked.

        Raises:
            BadInput: the package is not installed.
        """
        wandb = _package()
        options = {
            "project": project,
            "name": out.name,
            "id": hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16],
            "resume": "allow",
            "dir": str(out),
            "config": config,
            "settings": wandb.Settings(silent=True),
        }
        mode = "online" if wandb.login(prompt=False) else "offline"
        try:
            self._run = wandb.init(**options, mode=os.environ.get("WANDB_MODE", mode))
        except wandb.Error:
            # A key, but no network: the run must not wait for it.
            self._run = wandb.init(**options, mode="offline")

    def log(self, kind: str, record: dict[str, Any]) -> None:
        """Add the numbers of a record."""
        # Steps that are run again after a resume would be out of order as W&B's own step.
        self._run.log(numbers_of(kind, record))

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


def numbers_of(kind: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by curve; each position, source and phase has its own."""
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, int | float):
            values[f"{kind}/{name}"] = value
        elif name == "accepted_by_position":
            places = enumerate(value, start=1)
            values |= {f"{kind}/accepted/{k}": v for k, v in places if v is not None}
        elif isinstance(value, Mapping):
            values |= {f"{kind}/{name}/{part}": each for part, each in value.items()}
    return values


def check_wandb(project: str | None) -> None:
    """Refuse `--wandb` where the package is missing.

    Raises:
        BadInput: says how to install it.
    """
    if project is not None:
        _package()


def _package() -> ModuleType:
    try:
        import wandb
    except ImportError as problem:
        raise BadInput(
            "--wandb needs the package wandb, which is not installed; pip install wandb, or leave "
            "the option out"
        ) from problem
    return wandb
