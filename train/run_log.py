"""What a run reports: JSONL records, TensorBoard curves and the progress line.

Sums stay on the device from step to step and are read once per record.

Letters: P predicting slots of a block.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from dflash_offline.common.progress import JsonLog, ProgressLine
from dflash_offline.train.distributed import World, sum_numbers
from dflash_offline.train.report import LOG_NAME
from dflash_offline.train.wandb_log import WandbLog, numbers_of

TENSORBOARD = "tensorboard"
FIELDS = ("step", "loss", "acceptance", "tok/s", "rows/s", "MFU", "data-wait", "read", "memory")


@dataclass
class Counts:
    """What this process worked through."""

    tokens: int = 0  # of samples
    rows: int = 0  # labelled
    flops: float = 0.0  # useful ones, see `flops`
    bytes_read: float = 0.0  # from the stores
    skipped_samples: int = 0  # without a possible anchor
    damaged_samples: int = 0  # that could not be read

    def add(self, other: "Counts") -> None:
        """Add another's numbers to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def over(self, world: World, device: torch.device) -> "Counts":
        """Return the sum over the job; waits for the device."""
        return Counts(*sum_numbers(astuple(self), world, device))


class Window:
    """Sums over the steps between two records, on the device where they arise there.

    Args:
        sums: as `sums` returned them, where a run goes on between two records.
    """

    def __init__(self, sums: Sequence[float] = ()) -> None:
        self.num_before, *totals = (int(sums[0]), *sums[1:]) if sums else (0,)
        self._before = torch.tensor(totals, dtype=torch.float64) if totals else None
        self._totals: torch.Tensor | None = None
        self._skipped: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        # The rest is of this process alone: rates are those since it started.
        self.counts = Counts()
        self.num_steps = 0
        self.began = time.perf_counter()

    def sums(self) -> tuple[float, ...]:
        """Return the number of steps, and their sums; waits for the device."""
        if self._totals is None:
            return () if self._before is None else (self.num_before, *self._before.tolist())
        return self.num_before + self.num_steps, *self._totals.tolist()

    def add(
        self, totals: torch.Tensor, norm: torch.Tensor, skipped: torch.Tensor, counts: Counts
    ) -> None:
        """Add one step: `totals` as `accumulate` returns them, summed over the job."""
        if self._totals is None and self._before is not None:
            self._totals = self._before.to(totals.device)
        self._totals = totals if self._totals is None else self._totals + totals
        self._skipped = skipped if self._skipped is None else self._skipped + skipped
        self._norm = norm
        self.num_steps += 1
        self.counts.add(counts)

    def take_skipped(self) -> int:
        """Return the number of skipped steps since it was last asked for; waits for the device."""
        skipped, self._skipped = self._skipped, None
        return 0 if skipped is None else round(skipped.item())

    def read(self) -> dict[str, Any]:
        """Return a record's measured values; waits once."""
        assert self._totals is not None
        assert self._norm is not None
        values = torch.cat([self._totals, self._norm.double().reshape(1)])
        loss, weight, blocks, *accepted, norm = values.tolist()
        by_position = [count / max(1.0, blocks) for count in accepted]
        return {
            # None where every step was skipped, or the last one: JSON has no NaN.
            "loss": loss / weight if weight else None,
            "acceptance": 1.0 + sum(by_position),
            "accepted_by_position": by_position,
            "grad_norm": norm if math.isfinite(norm) else None,
        }


def speeds(
    counts: Counts, seconds: float, *, datasheet: float | None, world_size: int
) -> dict[str, float]:
    """Return a record's rates.

    Args:
        counts: of the whole job.
        seconds: in which that was done.
        datasheet: FLOP/s that one device can do at most; None leaves MFU out.
        world_size: devices of the job.
    """
    rates = {
        "tokens_per_s": counts.tokens / seconds,
        "rows_per_s": counts.rows / seconds,
        "read_bytes_per_s": counts.bytes_read / seconds,
    }
    if datasheet is not None:
        rates["mfu"] = counts.flops / seconds / datasheet / world_size
    return rates


class RunLog:
    """Writes a run's records; every method is called on the first process only.

    Args:
        out: the run's folder.
        total, done: the work of the run and what is done of it, for the progress line.
        step: the last one that was trained.
        recorded: the last one in a whole record; sums over those since then go on.
        wandb: where curves go as well.
    """

    def __init__(
        self,
        out: Path,
        *,
        total: float,
        step: int,
        recorded: int,
        done: float,
        wandb: WandbLog | None = None,
    ) -> None:
        path = out / LOG_NAME
        _forget_after(path, step, recorded)
        self._json = JsonLog(path)
        self._board = SummaryWriter(str(out / TENSORBOARD), purge_step=step + 1)
        self._wandb = wandb
        self._progress = ProgressLine(total, FIELDS, done=done)

    def __enter__(self) -> "RunLog":
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        self._json.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.close()

    def run(self, config: dict[str, Any], **facts: Any) -> None:
        """Write the record that describes the run."""
        self._json.write({"kind": "run", "config": config, **facts})

    def train(self, record: dict[str, Any], *, done: float) -> None:
        """Write a training record and redraw the progress line."""
        self._json.write({"kind": "train", **record})
        self._curves("train", record)
        self._progress.update(
            done,
            {
                "step": str(record["step"]),
                "loss": "-" if record["loss"] is None else f"{record['loss']:.3f}",
                "acceptance": f"{record['acceptance']:.2f}",
                "tok/s": f"{record['tokens_per_s']:,.0f}",
                "rows/s": f"{record['rows_per_s']:,.0f}",
                "MFU": f"{record['mfu']:.1%}" if "mfu" in record else "-",
                "data-wait": f"{record['data_wait_frac']:.1%}",
                "read": f"{record['read_bytes_per_s'] / 1e9:.2f} GB/s",
                "memory": f"{record['memory_bytes'] / 1e9:.1f} GB",
            },
        )

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write an evaluation on the held-out samples."""
        self._json.write({"kind": "eval", **record})
        self._curves("eval", record)

    def _curves(self, kind: str, record: dict[str, Any]) -> None:
        if self._wandb is not None:
            self._wandb.log(kind, record)
        for name, value in numbers_of(kind, record).items():
            if name != f"{kind}/step":
                self._board.add_scalar(name, value, record["step"])


def _forget_after(path: Path, step: int, recorded: int) -> None:
    """Drop records of steps that will be run or recorded again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        last = recorded if record.get("kind") == "train" else step
        if step and record.get("step", 0) <= last:
            kept.append(line + "\n")
    staging = path.with_suffix(".tmp")
    staging.write_text("".join(kept), encoding="utf-8")
    staging.replace(path)
