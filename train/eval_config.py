"""Options of dflash-eval."""

from dataclasses import dataclass
from pathlib import Path

import click

from dflash_offline.common.options import option

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to evaluate, on what, and when to call it a failure."""

    draft: Path | None = option(help="Folder of an exported drafter.", type=_FOLDER)
    cache: str | None = option(
        help="Store whose held-out samples to evaluate on, without the target."
    )
    target: str | None = option(
        help="Target to decode with: a GGUF file, a Hugging Face folder or a hub id."
    )
    data: Path | None = option(
        help="Prompts to decode, JSONL or JSON: turns, messages, ShareGPT or prompt.", type=_FILE
    )
    compare: tuple[Path, ...] = option(
        help="Folder of a training run; give two or more to lay them over each other.",
        type=_FOLDER,
        multiple=True,
    )
    num_prompts: int | None = option(
        help="Most prompts of --data; all when left out.", type=click.IntRange(1)
    )
    max_new_tokens: int = option(
        128, help="Most tokens of one answer.", type=click.IntRange(1, 1 << 20)
    )
    temperature: float = option(
        0.0,
        help="Divisor of the logits in sampling; 0 takes the best token.",
        type=click.FloatRange(0, 100),
    )
    seed: int = option(0, help="Seed of the sampling.", type=click.IntRange(0))
    dtype: str = option(
        "auto",
        help="Arithmetic of target and drafter; auto is bfloat16 on a GPU, float32 elsewhere.",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    )
    device: str = option(
        "auto", help="Device to run on, such as cpu or cuda:1; auto takes a GPU if there is one."
    )
    target_revision: str | None = option(help="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = option(
        False, help="Allow code that ships with the target's checkpoint to run."
    )
    chat_template: Path | None = option(
        help="Jinja file that replaces the tokenizer's chat template.", type=_FILE
    )
    chat_template_arg: tuple[str, ...] = option(
        help="Value for the chat template as name=value, such as enable_thinking=false.",
        multiple=True,
        metavar="NAME=VALUE",
    )
    system_prompt: str | None = option(help="System message for prompts that have none.")
    storage_option: tuple[str, ...] = option(
        help="Option for the file system of --cache, such as endpoint_url=http://host:9000.",
        multiple=True,
        secret=True,
        metavar="KEY=VALUE",
    )
    partial: bool = option(False, help="Accept a store whose extraction has not finished.")
    supervise: str = option(
        "all",
        help="Tokens of the store that count.",
        type=click.Choice(["all", "last", "no-reasoning"]),
    )
    max_anchors: int | None = option(
        help="Most anchors of one sample of the store; all when left out.", type=click.IntRange(1)
    )
    rows_per_pass: int = option(
        8192,
        help="Block rows of one drafter forward on the store; changes memory, not results.",
        type=click.IntRange(1),
    )
    min_acceptance: float | None = option(
        help="Least acceptance length in tokens per target step; below it the exit code is 1.",
        type=click.FloatRange(0),
    )
    out: Path | None = option(
        help="File to write: the results as JSON, or the page of --compare as HTML.", type=_FILE
    )
