"""Many prompts at a time through the target, token by token, greedy or sampled.

Prompts are left-padded, with positions counted from each one's first token. Rows that have ended
leave the batch. Letters: B rows of the batch, T padded tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash_offline.common.target import Target
from dflash_offline.common.unplanned_attention import unplanned_attention
from dflash_offline.extract.roomy_cache import roomy_cache

# Below this share of rows still running, the ended ones are taken out of the cache.
_COMPACT_BELOW = 0.8


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: tokens of an answer at most, its end included.
        temperature: divisor of the logits; 0 takes the best token.
        top_p: share of probability from which a token is drawn.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What followed a prompt; `is_cut` when the limit came before a stop token."""

    tokens: list[int]
    is_cut: bool


@torch.inference_mode()
@unplanned_attention()
def decode_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    stop_ids: Sequence[int],
    sampling: Sampling,
    watch: Callable[[int, int], None] | None = None,
) -> list[Decoded]:
    """Continue every prompt until a stop token or the limit.

    Args:
        target: loaded with its head.
        prompts: token ids, none empty.
        seeds: one a prompt; a row's draws depend on its seed alone, not on the batch.
        stop_ids: tokens that end an answer; left off the result.
        sampling: how tokens are chosen.
        watch: called after every step with the steps done and the tokens written so far.
    """
    device = target.device
    ids, attention = _left_padded(prompts, device)
    position = attention.cumsum(dim=1) - 1  # [B, T]
    draws = _draws(seeds, sampling).to(device)  # [B, new tokens]
    stops = torch.tensor(sorted(stop_ids), device=device)
    cache = roomy_cache(target.config, limit=ids.shape[1] + sampling.max_new_tokens)
    new_tokens: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    running = torch.arange(len(prompts), device=device)
    positions = position.clamp_min(0)
    for step in range(sampling.max_new_tokens):
        logits = target.causal(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{target.cache_argument(): cache},
        ).logits[:, -1]  # [B, V]
        chosen = _choose(logits, draws[running, step], sampling)
        stopped = torch.isin(chosen, stops).tolist()
        for row, token, is_stop in zip(running.tolist(), chosen.tolist(), stopped, strict=True):
            if not (ended[row] or is_stop):
                new_tokens[row].append(token)
            ended[row] = ended[row] or is_stop
        if watch is not None:
            watch(step + 1, sum(map(len, new_tokens)))
        going = torch.tensor([not ended[row] for row in running.tolist()], device=device)
        if not going.any():
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        if going.float().mean() < _COMPACT_BELOW:
            kept = going.nonzero()[:, 0]
            cache.reorder_cache(kept)
            ids, positions, attention = ids[kept], positions[kept], attention[kept]
            running = running[kept]
        attention = torch.cat([attention, attention.new_ones(len(attention), 1)], dim=1)
    return [
        Decoded(tokens=tokens, is_cut=not done)
        for tokens, done in zip(new_tokens, ended, strict=True)
    ]


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both int64 [B, T]."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = 1
    return ids.to(device), attention.to(device)


def _draws(seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Return uniform numbers in [0, 1), fp64 [B, new tokens], all made before the first step."""
    if sampling.temperature == 0:
        return torch.zeros(len(seeds), sampling.max_new_tokens)
    rows = [
        torch.rand(
            sampling.max_new_tokens,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        for seed in seeds
    ]
    return torch.stack(rows)


def _choose(logits: torch.Tensor, draws: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return a token for each row of logits [B, V]; int64 [B]."""
    if sampling.temperature == 0:
        return logits.argmax(dim=1)
    probabilities = (logits.double() / sampling.temperature).softmax(dim=1)
    if sampling.top_p == 1.0:
        # Any order gives the same distribution, and sorting a vocabulary is the slowest part.
        return _drawn(probabilities, draws)
    ordered, tokens = probabilities.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    # The first token always stays: nothing stands before it.
    place = _drawn(ordered.masked_fill(before >= sampling.top_p, 0.0), draws)
    return tokens.gather(1, place[:, None])[:, 0]


def _drawn(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the column of weights [B, V] that each of the draws [B] in [0, 1) falls on."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    # A product that rounds up to the total would fall behind the last column with any weight.
    wanted = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]
