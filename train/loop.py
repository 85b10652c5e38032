"""The training run: steps in order, records, evaluations, checkpoints, and the final drafter."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from dflash_offline.common.device_choice import dtype_name
from dflash_offline.common.device_memory import told_of_memory
from dflash_offline.common.errors import BadInput, DamagedStore, Stopped
from dflash_offline.common.options import config_as_dict
from dflash_offline.common.progress import format_seconds
from dflash_offline.common.signals import signals_ask
from dflash_offline.train.announce import announce, peak_memory, say
from dflash_offline.train.checkpoint import (
    CHECKPOINTS,
    FINAL,
    checkpoint_name,
    load_optimizer,
    publish,
    save_checkpoint,
)
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.distributed import (
    gather_objects,
    join_world,
    largest,
    leave_world,
    sum_over_ranks,
    with_the_others,
)
from dflash_offline.train.evaluate import merge
from dflash_offline.train.flops import datasheet_rate, pass_flops
from dflash_offline.train.held_out import evaluate
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.report import write_report
from dflash_offline.train.run_log import Counts, RunLog, Window, speeds
from dflash_offline.train.schedule import lr_factor, parse_every
from dflash_offline.train.setup import Setup, prepare
from dflash_offline.train.step import accumulate
from dflash_offline.train.stream import StepBuilder, StepInput, Stream
from dflash_offline.train.wandb_log import WandbLog

_BETAS = (0.9, 0.95)
_MORE_ROOM = (
    "lower --rows-per-pass, or take more GPUs and --shard; the same command goes on from the "
    "newest checkpoint"
)
# Seconds after which a process that was told to stop has told the others.
_CHECK_S = 0.5


# Outermost: only the process that ran out of memory comes to it.
@told_of_memory("the training device", _MORE_ROOM)
def train(config: TrainConfig) -> Path:
    """Run `dflash-train` in this process, alone or in its place in a job.

    Returns:
        The folder of the final drafter.

    Raises:
        BadInput: options or stores that cannot be used; nothing was written.
        DamagedStore: a pack is not what was written.
        Stopped: by SIGTERM or SIGINT, after a checkpoint, or by memory that has run out.
    """
    world = join_world("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    try:
        run = Run(prepare(config, world))
        with signals_ask() as stop:
            return run.to_the_end(stop)
    except (BadInput, Stopped) as problem:
        if world.is_first:
            raise
        # All processes come to it, and one line is enough.
        raise SystemExit(problem.exit_code) from None
    finally:
        leave_world()


class Run:
    """One process's part of a run."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._config = setup.config
        self._world = setup.world
        self._state = replace(setup.state, is_finished=False)
        self._saved = setup.state.step, setup.state.is_finished
        self._saved_at = time.monotonic()
        self._every = parse_every(setup.config.checkpoint_every)
        self._optimizer = Optimizer(
            setup.drafter,
            weight_decay=setup.config.weight_decay,
            betas=_BETAS,
            kind=setup.config.optimizer,
            ema=setup.config.ema,
            world=setup.world,
        )
        if setup.checkpoint is not None:
            load_optimizer(setup.checkpoint, self._optimizer)
        self._clock = PhaseClock(setup.device)
        self._window = Window(setup.state.window)
        self._log: RunLog | None = None
        self._lr = 0.0
        # Of this process, since the state's counts were brought up to date.
        self._pending = Counts()
        self._check_every = 1  # steps between looks at whether another process was told to stop

    def to_the_end(self, stop: threading.Event) -> Path:
        """Train until the steps or the minutes are over, or `stop` is set."""
        setup, config = self._setup, self._config
        if self._world.is_first:
            announce(setup)
        setup.warm_up()
        builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
        stream = Stream(
            setup.order,
            builder,
            state=self._state.stream,
            samples_per_step=setup.samples_of_steps(),
            rank=self._world.rank,
            world_size=self._world.size,
        )
        with self._records(), stream:
            began = time.monotonic() - self._state.elapsed_s
            while not self._is_over():
                self._one_step(stream)
                self._state = replace(self._state, elapsed_s=self._now(began))
                self._keep_books()
                if self._must_stop(stop) and not self._is_over():
                    # Its sums go on in the record that the steps to come make whole.
                    self._save()
                    if self._window.num_steps:
                        self._record()
                    raise Stopped(
                        f"stopped after step {self._state.step}; the same command goes on from "
                        f"the checkpoint in {config.out}"
                    )
        return self._publish()

    def _one_step(self, stream: Stream) -> None:
        with self._clock.phase("data"):
            given = stream.next()
        self._lr = self._config.lr * lr_factor(
            *self._progress(), warmup_frac=self._config.warmup, kind=self._config.lr_schedule
        )
        totals, norm, skipped = train_step(
            self._setup, self._optimizer, given, lr=self._lr, clock=self._clock
        )
        for line in given.damage:
            say(f"left out: {line}")
        counts = self._counts(given)
        self._window.add(totals, norm, skipped, counts)
        self._pending.add(counts)
        self._state = replace(self._state, step=self._state.step + 1, stream=given.state)

    def _counts(self, given: StepInput) -> Counts:
        shape = self._setup.drafter.config
        return Counts(
            tokens=given.num_tokens,
            rows=given.num_rows,
            flops=sum(
                # The target's states are there where its logits are made of them.
                pass_flops(shape, each.tables, with_teacher=each.final is not None)
                for each in given.passes
            ),
            bytes_read=given.num_bytes,
            skipped_samples=given.num_skipped,
            damaged_samples=given.num_damaged,
        )

    def _progress(self) -> tuple[float, float]:
        """Return how much of the run is over before and after the coming step."""
        step, num_steps = self._state.step, self._setup.num_steps
        if num_steps is not None:
            return step / num_steps, (step + 1) / num_steps
        assert self._config.max_minutes is not None, "nothing ends the run"
        # How long the step will take is not known.
        before = self._state.elapsed_s / (60 * self._config.max_minutes)
        return before, max(1e-9, before)

    def _is_over(self) -> bool:
        limit = self._config.max_minutes
        if limit is not None and self._state.elapsed_s >= 60 * limit:
            return True
        return self._setup.num_steps is not None and self._state.step >= self._setup.num_steps

    def _now(self, began: float) -> float:
        """Return the seconds trained, the same on every process where something hangs on them."""
        elapsed = time.monotonic() - began
        if self._config.max_minutes is None:
            return elapsed
        return largest(elapsed, self._world, self._setup.device)

    def _must_stop(self, stop: threading.Event) -> bool:
        if self._world.size == 1:
            return stop.is_set()
        # Asking the others waits for the device.
        due = self._state.step % self._check_every == 0
        return due and largest(float(stop.is_set()), self._world, self._setup.device) > 0

    def _keep_books(self) -> None:
        step, config = self._state.step, self._config
        over = self._is_over()
        if step % config.log_every == 0 or over:
            self._record()
        if step % config.eval_every == 0 or over:
            self._evaluate()
        if not over and self._is_checkpoint_due():
            self._save()

    def _is_checkpoint_due(self) -> bool:
        """Say whether it is time for a checkpoint, the same on every process."""
        if self._every.steps is not None:
            return self._state.step % self._every.steps == 0
        if self._state.step % self._check_every:
            return False
        waited = time.monotonic() - self._saved_at
        return largest(waited, self._world, self._setup.device) >= self._every.seconds

    def _record(self) -> None:
        record = self._window.read()
        seconds = self._clock.take()
        elapsed = time.perf_counter() - self._window.began
        counts = self._window.counts.over(self._world, self._setup.device)
        self._fold()
        # Twice a second or so, and the same number on every process.
        slowest = largest(elapsed / self._window.num_steps, self._world, self._setup.device)
        self._check_every = max(1, min(self._config.log_every, int(_CHECK_S / slowest)))
        if self._log is not None:
            rate = datasheet_rate(self._setup.device)
            record = {
                "step": self._state.step,
                "epoch": self._state.stream.epoch,
                **record,
                **speeds(counts, elapsed, datasheet=rate, world_size=self._world.size),
                "lr": self._lr,
                "data_wait_frac": seconds["data"] / elapsed,
                "memory_bytes": peak_memory(self._setup.device),
                "seconds": seconds,
                "elapsed_s": self._state.elapsed_s,
                "skipped_steps": self._state.skipped_steps,
                "skipped_samples": self._state.skipped_samples,
                "damaged_samples": self._state.damaged_samples,
            }
            self._log.train(record, done=self._done())
        self._window = Window()

    def _fold(self) -> None:
        """Bring the state's counts up to date, the same on every process."""
        counts = self._pending.over(self._world, self._setup.device)
        self._pending = Counts()
        self._state = replace(
            self._state,
            skipped_steps=self._state.skipped_steps + self._window.take_skipped(),
            skipped_samples=self._state.skipped_samples + round(counts.skipped_samples),
            damaged_samples=self._state.damaged_samples + round(counts.damaged_samples),
        )

    def _done(self) -> float:
        """Return the work done in the unit of the progress line: steps, or seconds."""
        return self._state.step if self._setup.num_steps is not None else self._state.elapsed_s

    def _evaluate(self) -> None:
        with self._clock.phase("eval"):
            with self._optimizer.averaged():
                mine = evaluate(self._setup, self._setup.whole_drafter())
            parts = [part for part in gather_objects(mine, self._world) if part is not None]
        problems = [part for part in parts if isinstance(part, DamagedStore)]
        if problems:
            # What was learned does not hang on it.
            self._save()
            raise problems[0] if self._world.is_first else SystemExit(problems[0].exit_code)
        if self._log is None or not parts:
            return
        whole = merge(parts)
        self._log.evaluation(
            {
                "step": self._state.step,
                "elapsed_s": self._state.elapsed_s,
                "acceptance_length": whole.acceptance_length,
                # None where no text reaches: JSON has no NaN.
                "accepted_by_position": [
                    share if math.isfinite(share) else None for share in whole.accepted_by_position
                ],
                "by_source": whole.by_source,
                "num_anchors": whole.num_anchors,
            }
        )

    def _save(self) -> Path:
        """Write a checkpoint of the state after the last step; all processes take part."""
        folder = self._config.out / CHECKPOINTS / checkpoint_name(self._state.step)
        here = self._state.step, self._state.is_finished
        if self._saved != here:
            self._fold()
            save_checkpoint(
                folder,
                replace(self._state, window=self._window.sums()),
                drafter=self._setup.drafter,
                optimizer=self._optimizer,
                dtype=self._setup.dtype,
                target=self._setup.caches[0].identity.target,
                keep=self._config.keep_checkpoints,
                is_first=self._world.is_first,
            )
            self._saved = here
            self._saved_at = time.monotonic()
        return folder

    def _publish(self) -> Path:
        """Mark the run as finished; write the final drafter and the report."""
        self._state = replace(self._state, is_finished=True)
        checkpoint = self._save()
        if not self._world.is_first:
            return self._config.out / FINAL
        # Last, since a run that has it is over.
        report = write_report(self._config.out)
        folder = publish(checkpoint, self._config.out)
        state = self._state
        damaged = f", {state.damaged_samples} damaged" if state.damaged_samples else ""
        say(
            f"{state.step} steps in {format_seconds(state.elapsed_s)} (skipped: "
            f"{state.skipped_samples} samples{damaged}, {state.skipped_steps} steps)",
            f"drafter  {folder}",
            f"report   {report}",
        )
        return folder

    @contextmanager
    def _records(self) -> Iterator[None]:
        """Keep the log open around a block, on the first process."""
        if not self._world.is_first:
            yield
            return
        setup, config = self._setup, self._config
        total = setup.num_steps or 60 * (config.max_minutes or 0)
        options = config_as_dict(config)
        wandb = WandbLog(config.wandb, config.out, options) if config.wandb else None
        step, before = self._state.step, 0 if self._is_over() else self._window.num_before
        place = {"step": step, "recorded": step - before, "done": self._done()}
        with RunLog(config.out, total=total, wandb=wandb, **place) as log:
            # Where a run goes on, the reason for its token is in an earlier record.
            reason = {} if setup.checkpoint else {"mask_token": setup.mask_token.reason}
            log.run(
                options,
                drafter=setup.drafter.config.to_json(),
                device=str(setup.device),
                dtype=dtype_name(setup.dtype),
                num_samples=sum(len(indices) for indices in setup.wanted),
                num_steps=setup.num_steps,
                world_size=self._world.size,
                **reason,
            )
            self._log = log
            yield
        self._log = None


def train_step(
    setup: Setup, optimizer: Optimizer, given: StepInput, *, lr: float, clock: PhaseClock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one step over the whole job.

    Returns:
        The sums of `accumulate` over the job (zero where the step was skipped), the gradient's
        norm, and 1.0 if the step was skipped; all on the device.
    """
    optimizer.zero_grad()
    parts = setup.drafter, setup.head, setup.objective
    missing = setup.sharding.missing_passes(len(given.passes)) if setup.sharding is not None else 0
    with with_the_others(computing=True):
        totals = accumulate(*parts, given.passes, clock)
        if missing:
            # The others' passes need what this process holds of the weights.
            accumulate(*parts, [setup.idle_pass] * missing, clock)
    with clock.phase("optimizer"):
        sum_over_ranks([totals])
        norm, skipped = optimizer.step(lr=lr, weight_sum=totals[1], clip=setup.config.clip)
    return torch.where(skipped > 0, torch.zeros_like(totals), totals), norm, skipped
