"""Which token stands for a slot that is still to be drafted.

In this order: what the user or the drafter to start from says, the tokenizer's mask token, an
embedding row beyond the tokenizer, a special token that the corpus does not contain. Padding, end
of sequence and unknown tokens mean something to the target, and an all-zero row means nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from dflash_offline.common.cache import Cache
from dflash_offline.common.errors import BadInput
from dflash_offline.common.logit_scales import text_config
from dflash_offline.train.token_shards import corpus_tokens

# Words in the names of tokens that models leave for others to use.
_FREE_WORDS = ("mask", "reserved", "unused", "extra")


@dataclass(frozen=True, kw_only=True)
class MaskToken:
    """The choice and, for the user, where it came from."""

    id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What the choice depends on, without loading a tokenizer."""

    size: int | None = None  # from this id on there are no tokens; None without a tokenizer
    mask: int | None = None
    special: dict[int, str] = field(default_factory=dict)
    # Padding, end, unknown and beginning of a sequence, by name.
    taken: dict[int, str] = field(default_factory=dict)


def choose_mask_token(
    caches: Sequence[Cache],
    embed: torch.Tensor,
    *,
    given: int | None = None,
    in_file: int | None = None,
    initial: int | None = None,
) -> MaskToken:
    """Choose the mask token by the rule in the module docstring.

    Args:
        caches: the stores to train from; the first one's tokenizer counts.
        embed: [V, H] the target's embedding.
        given: the user's own choice.
        in_file: that of --draft-config.
        initial: the choice of the drafter that training starts from.

    Raises:
        BadInput: the user's choice cannot be used, or nothing is left to choose.
    """
    facts = tokenizer_facts(caches[0])
    for source, token in (
        ("--mask-token-id", given),
        ("mask_token_id of --draft-config", in_file),
        ("the drafter of --init-from", initial),
    ):
        if token is not None:
            if problem := _problem(token, embed, facts):
                raise BadInput(f"{source} {token} {problem}; give another --mask-token-id")
            return MaskToken(id=token, reason=f"given by {source}")
    if facts.mask is not None and not _problem(facts.mask, embed, facts):
        return MaskToken(id=facts.mask, reason="the tokenizer's mask token")
    if facts.size is not None:
        for token in range(facts.size, embed.shape[0]):
            if not _problem(token, embed, facts):
                reason = f"the first non-zero embedding row beyond the tokenizer's {facts.size}"
                return MaskToken(id=token, reason=reason)
    return _absent_special_token(caches, embed, facts)


def tokenizer_facts(cache: Cache) -> TokenizerFacts:
    """Read a store's tokenizer files; ids of the target's config count as taken too."""
    taken = _taken_by_config(cache)
    folder = cache.target_path
    if not (folder / "tokenizer.json").is_file():
        return TokenizerFacts(taken=taken)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = _role_names(folder)
    roles = {role: tokenizer.token_to_id(name) for role, name in names.items()}
    taken |= {
        token: f"{role} token"
        for role, token in roles.items()
        if token is not None and role != "mask"
    }
    added = tokenizer.get_added_tokens_decoder()
    return TokenizerFacts(
        # Ids may have gaps: a count of tokens may be one's id.
        size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        mask=roles.get("mask"),
        special={id: token.content for id, token in added.items() if token.special},
        taken=taken,
    )


def _role_names(folder: Path) -> dict[str, str]:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    names = {}
    for role in ("mask", "pad", "eos", "unk", "bos"):
        token = config.get(f"{role}_token")
        if token is not None:
            names[role] = token["content"] if isinstance(token, dict) else token
    return names


def _taken_by_config(cache: Cache) -> dict[int, str]:
    taken = {}
    for role in ("pad", "eos", "bos"):
        value = text_config(cache.target_config).get(f"{role}_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                taken[int(token)] = f"{role} token"
    return taken


def _problem(token: int, embed: torch.Tensor, facts: TokenizerFacts) -> str | None:
    """Say why a token cannot be the mask, or return None."""
    if not 0 <= token < embed.shape[0]:
        return f"is no row of the target's embedding of {embed.shape[0]}"
    if token in facts.taken:
        return f"is the target's {facts.taken[token]}"
    if not bool(embed[token].any()):
        return "has an all-zero embedding"
    return None


def _absent_special_token(
    caches: Sequence[Cache], embed: torch.Tensor, facts: TokenizerFacts
) -> MaskToken:
    free = [token for token in facts.special if not _problem(token, embed, facts)]
    if free:
        present = np.zeros(embed.shape[0], dtype=bool)
        for cache in caches:
            for tokens in corpus_tokens(cache):
                present[tokens] = True
        absent = [token for token in free if not present[token]]
        if absent:
            best = max(absent, key=lambda token: (_sounds_free(facts.special[token]), token))
            return MaskToken(
                id=best,
                reason=f"special token {facts.special[best]}, which the corpus does not contain "
                "(the target has no mask token and no spare embedding row)",
            )
    raise BadInput(
        "--mask-token-id is not given, and the target has no mask token, no spare embedding row "
        "and no special token that the corpus leaves free; give an id that never occurs"
    )


def _sounds_free(name: str) -> bool:
    return any(word in name.lower() for word in _FREE_WORDS)
