"""Checkpoints of a run: atomic folders that serve as exported drafters too.

`<out>/checkpoints/step-<n>/` holds the drafter in the z-lab format, the optimiser's state by
parameter name in safetensors, and the run's state in JSON. Nothing is ever unpickled.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_offline.common.errors import BadInput
from dflash_offline.common.identity import Scalar
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export import save_weights, write_tensors
from dflash_offline.train.optimizer import Optimizer, exported
from dflash_offline.train.order import StreamState
from dflash_offline.train.provenance import save_identity

FORMAT = 1
CHECKPOINTS, FINAL = "checkpoints", "draft"
_OPTIMIZER, _STATE = "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands after `step` steps."""

    step: int = 0
    stream: StreamState = field(default_factory=StreamState)
    elapsed_s: float = 0.0
    skipped_steps: int = 0  # not finite, or without a single anchor
    skipped_samples: int = 0  # without a possible anchor
    damaged_samples: int = 0  # of packs that could not be read
    is_finished: bool = False
    # Sums over the steps since the last whole record, see `run_log.Window`.
    window: tuple[float, ...] = ()
    # Options and stores that decide what is learned, compared when the run goes on.
    learned: dict[str, Any] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step}"


def save_checkpoint(
    folder: Path,
    state: RunState,
    *,
    drafter: Drafter,
    optimizer: Optimizer,
    dtype: torch.dtype,
    target: Mapping[str, Scalar],
    keep: int,
    is_first: bool = True,
) -> None:
    """Write a checkpoint, or nothing: a temporary folder is renamed when all is on disk.

    All processes of a job take part, because each holds a part; the first one writes.

    Args:
        folder: `<out>/checkpoints/step-<n>`.
        state: what `load_state` returns later.
        drafter: whose weights are in the optimizer.
        optimizer: its tensors are written as they are, and the masters, or their running averages
            where there are any, exported in `dtype`.
        dtype: of the exported drafter.
        target: which target the stores are of; goes wherever the drafter goes.
        keep: older checkpoints than the newest so many are deleted.
        is_first: whether this process writes.
    """
    staging = folder.with_name(f".{folder.name}.tmp")
    tensors = optimizer.tensors()
    if not is_first:
        return
    for stale in folder.parent.glob(".step-*"):
        shutil.rmtree(stale)
    staging.mkdir(parents=True)
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(contiguous, staging / _OPTIMIZER)
        save_weights(drafter.config, exported(tensors), staging, dtype)
        save_identity(staging, target)
        record = asdict(state) | {"format": FORMAT}
        (staging / _STATE).write_text(json.dumps(record, indent=2) + "\n")
        _replace_folder(staging, folder)
    except OSError:
        # Where a disk is full, the torn copy takes what room there is.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for old in checkpoints(folder.parents[1])[:-keep]:
        shutil.rmtree(old)


def publish(checkpoint: Path, out: Path) -> Path:
    """Copy a checkpoint's drafter to `<out>/draft`, replacing what is there."""
    folder = out / FINAL
    staging = folder.with_name(f".{FINAL}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name not in (_OPTIMIZER, _STATE):
            shutil.copy2(file, staging / file.name)
    _replace_folder(staging, folder)
    return folder


def checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in (out / CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_state(checkpoint: Path) -> RunState:
    """Read a checkpoint's run state.

    Raises:
        BadInput: the file is damaged, or of a newer format.
    """
    path = checkpoint / _STATE
    try:
        record = json.loads(path.read_text())
        if record.pop("format", None) == FORMAT:
            stream = StreamState(**record["stream"])
            window = tuple(record.get("window", ()))  # older checkpoints have none
            return RunState(**record | {"stream": stream, "window": window})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise BadInput(
            f"checkpoint {checkpoint} cannot be read ({problem}); delete it to go on from an "
            "older one"
        ) from problem
    raise BadInput(f"checkpoint {checkpoint} is of another format than {FORMAT}; delete it")


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Restore masters and state; the module's parameters change with them.

    Each process reads what it owns, whatever the number of processes that wrote the file.

    Raises:
        BadInput: the file is damaged or belongs to another drafter.
    """
    path = checkpoint / _OPTIMIZER
    try:
        with safe_open(path, framework="pt") as file:
            optimizer.load(file.get_tensor)
    except (OSError, SafetensorError, RuntimeError) as problem:
        raise BadInput(
            f"checkpoint {checkpoint}: {_OPTIMIZER} does not fit this drafter ({problem}); delete "
            "it to go on from an older one"
        ) from problem


def check_learned(stored: Mapping[str, Any], given: Mapping[str, Any], where: Path) -> None:
    """Refuse to go on with other settings than the run was started with.

    Raises:
        BadInput: names the first option that differs, and both values.
    """
    for name in sorted(set(stored) | set(given)):
        before, now = stored.get(name), given.get(name)
        if before == now:
            continue
        if name == "cache" and before and len(before) == len(now):
            before, now = _differences(before, now), _differences(now, before)
        drafters = [each for each in (where / FINAL, *checkpoints(where)[::-1]) if each.exists()]
        going_on = f", another --out, or --init-from {drafters[0]}" if drafters else ""
        raise BadInput(
            f"--{name.replace('_', '-')}: {now} given, but the run in {where} was started with "
            f"{before}; use the same{going_on or ' or another --out'}"
        )


def _differences(stores: list[dict[str, Scalar]], others: list[dict[str, Scalar]]) -> str:
    """Return those fields of stores that others do not have so."""
    pairs = zip(stores, others, strict=True)
    found = [f"{k} {v}" for one, other in pairs for k, v in one.items() if other.get(k) != v]
    return ", ".join(found) or "nothing"


def _replace_folder(staging: Path, folder: Path) -> None:
    """Put `staging` where `folder` is; a crash leaves the old one, the new one, or both aside."""
    for file in staging.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
