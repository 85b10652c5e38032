"""The options of `dflash-generate`."""

from dataclasses import dataclass
from pathlib import Path

import click

from dflash_offline.common.options import option

_POSITIVE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Everything that answers depend on."""

    target: str = option(
        help="Target model: GGUF file, Hugging Face folder or hub id; at an --endpoint, its name.",
        names=("--target", "--model", "--target-model-path"),
        required=True,
    )
    target_revision: str | None = option(help="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = option(False, help="Let code shipped with the checkpoint run.")
    dtype: str = option(
        "auto",
        help="Precision of the target; auto is bfloat16 on a GPU, float32 without.",
        type=click.Choice(["auto", "bfloat16", "float32"]),
    )
    data: tuple[str, ...] = option(
        help="Prompts: JSONL, JSON, Parquet or Arrow file or folder, or hf:ID[:SUBSET[:SPLIT]]; "
        "repeatable.",
        names=("--data", "--data-path"),
        multiple=True,
        required=True,
        metavar="FILE",
    )
    out: Path = option(
        help="JSONL file of answers; run again with the same options to go on.",
        names=("--out", "--output-path"),
        type=_FILE,
        required=True,
    )
    num_samples: int | None = option(
        help="Use only the first so many prompts; all by default.", type=_POSITIVE
    )
    num_answers: int = option(1, help="Answers to each prompt.", type=_POSITIVE)
    max_new_tokens: int = option(
        1024,
        help="Tokens of an answer at most; longer ones are cut and marked.",
        names=("--max-new-tokens", "--max-tokens"),
        type=_POSITIVE,
    )
    temperature: float = option(
        0.0, help="Divisor of the logits; 0 takes the best token.", type=click.FloatRange(min=0)
    )
    top_p: float = option(
        1.0,
        help="Share of probability from which tokens are drawn.",
        type=click.FloatRange(0, 1, min_open=True),
    )
    seed: int = option(0, help="Seed of the draws.", type=click.IntRange(0, 2**63 - 1))
    batch_tokens: int = option(
        32768,
        help="Padded tokens of a batch, prompts and answers together.",
        type=click.IntRange(min=2),
    )
    chat_template: Path | None = option(
        help="Jinja file that replaces the tokenizer's chat template.", type=_FILE
    )
    chat_template_arg: tuple[str, ...] = option(
        help="Value that the chat template reads, as enable_thinking=false; repeatable.",
        multiple=True,
        metavar="NAME=VALUE",
    )
    system_prompt: str | None = option(help="System message for prompts that have none.")
    endpoint: str | None = option(
        help="OpenAI-compatible server, up to /v1, that writes the answers instead.",
        metavar="URL",
    )
    api_key: str | None = option(help="Bearer token for the server.", secret=True)
    concurrency: int = option(
        32, help="Requests at a time to the server.", type=click.IntRange(1, 1024)
    )
