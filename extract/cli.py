"""The command `dflash-extract`."""

from dflash_offline.common.options import command
from dflash_offline.extract.config import ExtractConfig

main = command(
    ExtractConfig,
    name="dflash-extract",
    help="""Run a target over a corpus and store the states of chosen layers.

    The store holds the corpus in clear, as token ids. What is committed survives any stop: the
    same command goes on where it ended.

    \b
    Example:
      dflash-extract --target Qwen/Qwen3-8B --data answers.jsonl --out cache/qwen3 \\
        --layers auto:5 --holdout 1%
    """,
    run="dflash_offline.extract.launch:extract",
)
