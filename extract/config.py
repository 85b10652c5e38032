"""The options of `dflash-extract`."""

from dataclasses import dataclass
from pathlib import Path

import click

from dflash_offline.common.options import option

_POSITIVE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """Everything that an extraction depends on."""

    target: str = option(
        help="Target model: GGUF file, Hugging Face folder or hub id.",
        names=("--target", "--model", "--target-model-path"),
        required=True,
    )
    target_revision: str | None = option(help="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = option(False, help="Let code shipped with the checkpoint run.")
    dtype: str = option(
        "auto",
        help="Precision of the target's forward; auto is bfloat16 on a GPU, float32 without.",
        type=click.Choice(["auto", "bfloat16", "float32"]),
    )
    data: tuple[str, ...] = option(
        help="JSONL, JSON, Parquet or Arrow file or folder, or hf:ID[:SUBSET[:SPLIT]]; repeatable.",
        names=("--data", "--data-path"),
        multiple=True,
        required=True,
        metavar="FILE",
    )
    out: str = option(
        help="Where the store goes; run again with the same options to resume.",
        names=("--out", "--output-path", "--output-dir"),
        required=True,
        metavar="URL",
    )
    storage_option: tuple[str, ...] = option(
        help="Option of --out's file system as KEY=VALUE, such as endpoint_url=http://host:9000.",
        multiple=True,
        secret=True,
        metavar="KEY=VALUE",
    )
    num_samples: int | None = option(
        help="Stop reading data after so many kept samples; all by default.",
        names=("--num-samples", "--max-samples"),
        type=_POSITIVE,
    )
    layers: str = option(
        "auto:5",
        help="Layers to capture: auto:K spreads K over the target, 1,9,17 names ids from 0.",
    )
    teacher: str = option(
        "none",
        help="What is kept of the target's prediction: none, its final state, or K best tokens.",
        metavar="none|final|topk:K",
    )
    codec: str = option(
        "lossless", help="How states are stored.", metavar="raw|lossless|int8|int4|int3"
    )
    max_length: int | None = option(
        help="Tokens of a sample; the least of 4096, --pack-tokens and the target's context.",
        names=("--max-length", "--seq-length"),
        type=click.IntRange(min=2),
    )
    overlong: str = option(
        "truncate",
        help="What becomes of rows above --max-length.",
        type=click.Choice(["truncate", "skip"]),
    )
    pack_tokens: int = option(
        16384, help="Tokens of a pack, the store's unit of reading.", type=click.IntRange(64)
    )
    batch_tokens: int = option(
        32768, help="Padded tokens of one forward.", type=click.IntRange(min=2)
    )
    holdout: str = option(
        "1%", help="Share of conversations kept from training, for evaluation.", metavar="PERCENT"
    )
    chat_template: Path | None = option(
        help="Jinja file that replaces the tokenizer's chat template.",
        type=_FILE,
    )
    chat_template_arg: tuple[str, ...] = option(
        help="Value that the chat template reads, as enable_thinking=false; repeatable.",
        multiple=True,
        metavar="NAME=VALUE",
    )
    system_prompt: str | None = option(help="System message for conversations that have none.")
    gpus: str = option(
        "all",
        help="Workers on this machine, one for each GPU; without GPUs, on the CPU.",
        metavar="all|N",
    )
    tp: int = option(
        1,
        help="GPUs that share one target, for a target that one GPU cannot hold.",
        type=click.IntRange(min=1),
    )
    seed: int = option(0, help="Seed of the sample order.", type=click.IntRange(0, 2**63 - 1))
    append: bool = option(False, help="Add this data to a store made from other data.")
    plan_only: bool = option(
        False, help="Write plan, tokens and target, then stop; run again for the states."
    )
    dry_run: bool = option(
        False, help="Print what the store would take, in bytes and seconds; write nothing."
    )
    max_bad: float = option(
        0.1,
        help="Percent of samples that may be quarantined before the exit code is 1.",
        type=click.FloatRange(0, 100),
    )
    allow_slow_path: bool = option(
        False, help="Go on where the target's fast kernels are not installed."
    )
