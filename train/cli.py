"""The command `dflash-train`."""

from dflash_offline.common.options import command
from dflash_offline.train.config import TrainConfig

main = command(
    TrainConfig,
    name="dflash-train",
    help="""Train a DFlash drafter from stores of hidden states, without the target.

    Everything that the run leaves lies in --out: config.yaml, log.jsonl, tensorboard/,
    checkpoints/, the final drafter in draft/ (z-lab format) and report.html.

    \b
    Example:
      dflash-train --cache cache/qwen3 --out runs/first \\
        --draft-layers 5 --block-size 16 --num-epochs 6
    """,
    run="dflash_offline.train.start:start",
)
