"""The command `dflash-generate`."""

from dflash_offline.common.options import command
from dflash_offline.extract.generate_config import GenerateConfig

main = command(
    GenerateConfig,
    name="dflash-generate",
    help="""Let the target itself answer prompts, for a drafter to learn from.

    The assistant's turns in the data, if any, are written anew. Rows are appended as they are
    finished. Answers cut by --max-new-tokens are marked with finish_reason "length", and
    dflash-extract supervises them without an end of turn, which the target did not write; "context"
    marks a conversation whose answers left no room for its next one.

    \b
    Example:
      dflash-generate --target Qwen/Qwen3-8B --data prompts.jsonl --out answers.jsonl \\
        --max-new-tokens 1024 --chat-template-arg enable_thinking=false
    """,
    run="dflash_offline.extract.generate:generate",
)
