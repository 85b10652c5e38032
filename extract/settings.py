"""Options of an extraction as the rest of the program wants them, checked against the target."""

import re

from transformers import PreTrainedConfig

from dflash_offline.common.errors import BadInput

DEFAULT_MAX_LENGTH = 4096
MAX_TOPK = 1024


def check_teacher(teacher: str, vocab_size: int) -> None:
    """Refuse teachers that do not exist.

    Args:
        vocab_size: of the target; a teacher cannot keep more tokens.
    """
    most = min(MAX_TOPK, vocab_size)
    count = re.fullmatch(r"topk:([1-9][0-9]*)", teacher)
    if teacher not in ("none", "final") and not (count and 2 <= int(count[1]) <= most):
        raise BadInput(
            f"--teacher {teacher} is not possible; allowed are none, final, and topk:K with K from "
            f"2 to {most}, such as topk:64"
        )


def parse_holdout(text: str) -> float:
    """Return `1%` or `0.01` as a fraction."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text.strip())
    fraction = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= fraction < 1:
        raise BadInput(
            f"--holdout {text} is not a share; allowed are 0% up to, not including, 100%, as in 1%"
        )
    return fraction


def resolve_max_length(given: int | None, *, pack_tokens: int, config: PreTrainedConfig) -> int:
    """Return the tokens a sample may have.

    Args:
        given: `--max-length`, or None for the least of 4096, the pack and the context.
        pack_tokens: tokens of a pack.
        config: of the target's text part.
    """
    # Models without position limit (recurrent ones) have no such key.
    context = getattr(config, "max_position_embeddings", None) or pack_tokens
    if given is None:
        return min(DEFAULT_MAX_LENGTH, pack_tokens, context)
    if given > pack_tokens:
        raise BadInput(
            f"--max-length {given} is above --pack-tokens {pack_tokens}, and a pack holds whole "
            "samples; allow larger packs or shorter samples"
        )
    if given > context:
        raise BadInput(
            f"--max-length {given} is above the target's context of {context} tokens; allowed is "
            f"up to {context}"
        )
    return given
