"""The dflash-eval command."""

from dflash_offline.common.options import command
from dflash_offline.train.eval_config import EvalConfig

main = command(
    EvalConfig,
    name="dflash-eval",
    help="""Measure how many tokens a drafter gains per target step.

    With --cache the drafter is held against the target's own text in the store's held-out samples;
    the target is not needed. With --target and --data both decode prompts for real, and greedy
    answers must be the target's own: every token in float32; in bfloat16 the first difference of
    an answer is allowed where the target's two best logits are closer than the rounding measured
    in the same run. Anything else is exit code 1. With --compare, training runs are laid over each
    other in one page.

    \b
    Example:
      $ dflash-eval --draft run/draft --target Qwen/Qwen3-8B --data prompts.jsonl
    """,
    run="dflash_offline.train.eval_run:run",
)
