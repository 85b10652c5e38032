"""The options of `dflash-train`."""

from dataclasses import dataclass
from pathlib import Path

import click

from dflash_offline.common.options import option
from dflash_offline.train.schedule import SCHEDULES

_POSITIVE = click.IntRange(min=1)
# Ends far above what makes sense, so that infinity lies outside.
_ABOVE_ZERO = click.FloatRange(0, 1e6, min_open=True)
_NOT_BELOW_ZERO = click.FloatRange(0, 1e6)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a training run depends on."""

    cache: tuple[str, ...] = option(
        help="Store to train from, a folder or any fsspec URL; repeat to mix stores of one target.",
        multiple=True,
        required=True,
        metavar="URL",
        group="Data",
    )
    weight: tuple[float, ...] = option(
        help="Rounds over the store of the same place that an epoch takes; 1 each by default.",
        multiple=True,
        type=_ABOVE_ZERO,
    )
    where: str | None = option(
        help="Condition on training samples, such as 'source == \"code\" and length < 2000'.",
        metavar="EXPR",
    )
    supervise: str = option(
        "all",
        help="Tokens to train on: all supervised ones, the last turn's, or all but reasoning.",
        type=click.Choice(["all", "last", "no-reasoning"]),
    )
    num_samples: int | None = option(
        help="Use only the first so many training samples of each store.", type=_POSITIVE
    )
    layers: str | None = option(
        help="Captured layers to use, comma-separated ids; all of the store by default."
    )
    partial: bool = option(False, help="Accept a store whose extraction has not finished.")
    damaged: str = option(
        "stop",
        help="What to do about a pack that is not what was written: stop, or skip and count it.",
        type=click.Choice(["stop", "skip"]),
    )
    storage_option: tuple[str, ...] = option(
        help="Option of the stores' file system as KEY=VALUE, such as endpoint_url=http://host:9000.",
        multiple=True,
        secret=True,
        metavar="KEY=VALUE",
    )
    read_cache: Path | None = option(
        help="Local folder that keeps what was read from object storage.",
        type=click.Path(path_type=Path, file_okay=False),
    )
    read_cache_gb: float = option(
        100.0, help="Size that --read-cache may reach, in GB.", type=click.FloatRange(min=0)
    )
    out: Path = option(
        help="Folder of the run: log, checkpoints, final drafter in draft/, report.html.",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        group="Run",
    )
    resume: bool = option(False, help="Go on from the newest checkpoint in --out, if there is one.")
    init_from: Path | None = option(
        help="Exported drafter to start from, ours or z-lab's; brings its own shape.",
        type=click.Path(path_type=Path, file_okay=False),
    )
    seed: int = option(
        0, help="Seed of weights, sample order and anchors.", type=click.IntRange(0, 2**63 - 1)
    )
    draft_config: Path | None = option(
        help="JSON file with keys of the drafter's config.json that replace the target's values.",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        group="Drafter",
    )
    draft_layers: int | None = option(
        help="Layers of the drafter.  [default: 5]",
        type=click.IntRange(1, 64),
        names=("--draft-layers", "--draft-num-layers"),
    )
    block_size: int | None = option(
        help="Slots of a block, the anchor included.  [default: 16]",
        type=click.IntRange(2, 64),
    )
    mask_token_id: int | None = option(
        help="Token that stands for a slot to draft; chosen by rule and printed by default.",
        type=click.IntRange(min=0),
    )
    num_anchors: int = option(
        512,
        help="Most anchors of a sample, drawn anew each time it comes up.",
        type=_POSITIVE,
        group="What is learned",
    )
    loss: str = option(
        "decay",
        help="Weights of slots, decay[=GAMMA] or dpace[=ALPHA], and what is minimised, ce, kl, rkl "
        "or tv against the stored teacher, each with a factor: dpace,kl=0.9,ce=0.1.",
        names=("--loss", "--loss-type"),
        metavar="NAME[=NUMBER],...",
    )
    labels: str = option(
        "data",
        help="What slots learn: the data's tokens, or the target's best ones (needs a teacher).",
        type=click.Choice(["data", "teacher"]),
    )
    noise: float = option(
        0.0,
        help="Largest size of the uniform noise added to the target's states, in their own unit.",
        type=_NOT_BELOW_ZERO,
    )
    samples_per_step: int = option(
        32, help="Samples of an optimiser step, over all processes.", type=_POSITIVE, group="Steps"
    )
    num_epochs: float | None = option(
        help="Epochs to train, where --num-steps is not given.  [default: 6]",
        type=_ABOVE_ZERO,
    )
    num_steps: int | None = option(help="Optimiser steps to train.", type=_POSITIVE)
    max_minutes: float | None = option(
        help="Minutes after which the run ends as if complete; alone, the rate follows them too.",
        type=click.FloatRange(min=0, min_open=True),
    )
    optimizer: str = option(
        "adamw",
        help="AdamW, or Muon for matrices and AdamW for the rest, at the same learning rate.",
        type=click.Choice(["adamw", "muon"]),
        group="Optimiser",
    )
    ema: float | None = option(
        help="Decay a step of a running average of the weights, which is then what is exported.",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
    )
    lr: float = option(
        6e-4,
        help="Peak learning rate.",
        type=_ABOVE_ZERO,
        names=("--lr", "--learning-rate"),
    )
    lr_schedule: str = option(
        "cosine",
        help="Course of the learning rate after warm-up.",
        type=click.Choice(SCHEDULES),
    )
    warmup: float = option(
        0.04,
        help="Share of the run over which the learning rate rises.",
        type=click.FloatRange(0, 1),
        names=("--warmup", "--warmup-ratio"),
    )
    weight_decay: float = option(
        0.0, help="Decoupled weight decay of matrices.", type=_NOT_BELOW_ZERO
    )
    clip: float = option(
        1.0,
        help="Largest gradient norm; longer gradients are scaled to it.",
        type=click.FloatRange(min=0, min_open=True),
        names=("--clip", "--max-grad-norm"),
    )
    gpus: str = option(
        "all",
        help="Processes on this machine, one for each GPU; without GPUs, on the CPU.",
        metavar="all|N",
        group="Machine",
    )
    shard: str = option(
        "optimizer",
        help="What processes share out: the optimiser's state, or all, the weights and gradients "
        "too, for drafters that no GPU holds whole.",
        type=click.Choice(["optimizer", "all"]),
    )
    device: str = option("auto", help="Where to train.", type=click.Choice(["auto", "cpu", "cuda"]))
    dtype: str = option(
        "auto",
        help="Compute dtype; auto is bfloat16 on CUDA and float32 on a CPU. Masters are float32.",
        type=click.Choice(["auto", "bfloat16", "float32"]),
    )
    fp8: str = option(
        "none",
        help="Products in FP8, faster and less exact: the head's, or all but keys' and values'.",
        type=click.Choice(["none", "head", "all"]),
    )
    rows_per_pass: int = option(
        16384,
        help="Most block rows of one forward and backward; memory only, learns the same.",
        type=click.IntRange(min=64),
    )
    log_every: int = option(
        10, help="Steps between records of the log.", type=_POSITIVE, group="Records"
    )
    eval_every: int = option(
        500,
        help="Steps between evaluations on the held-out samples; also at the end.",
        type=_POSITIVE,
    )
    checkpoint_every: str = option(
        "500",
        help="Steps between checkpoints, or minutes, such as 30m; also at the end and on a signal.",
        metavar="STEPS|MINUTESm",
    )
    keep_checkpoints: int = option(2, help="Checkpoints to keep, the newest ones.", type=_POSITIVE)
    wandb: str | None = option(
        help="Project at Weights & Biases to log to too; without a key, into --out for wandb sync.",
        metavar="PROJECT",
    )
