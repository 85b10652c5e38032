"""Decode one prompt at a time with a target: token by token, or in blocks that a drafter proposes.

A cycle drafts the B-1 tokens after the last verified one and lets the target judge them in one
forward, which keeps what it agrees with and adds one token of its own. The drafter sees the
target's hidden states of verified tokens only.

Letters: t new tokens, B block size, K captured layers, H hidden size, V vocabulary.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_offline.common.capture import Capture
from dflash_offline.common.target import Target
from dflash_offline.common.unplanned_attention import unplanned_attention
from dflash_offline.train.acceptance import accept_greedy, accept_sampled, probabilities
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.rollback import RollbackCache

Watcher = Callable[[int, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One draft and its verification."""

    anchor: int  # position of the last verified token, the block's slot 0
    proposed: int  # drafted tokens that were judged
    accepted: int  # how many of them were kept
    produced: int  # tokens gained: accepted, plus the target's own one unless the text ended first


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The answer to one prompt and what it cost."""

    tokens: list[int]
    num_prompt: int
    target_steps: int  # forwards after the prefill
    reruns: int = 0  # forwards that only rebuilt a recurrent state
    seconds: float = 0.0  # after the prefill
    prefill_s: float = 0.0
    cycles: list[Cycle] = field(default_factory=list)


class TargetSequence:
    """One sequence in the target: feed tokens, read logits, take tokens back."""

    def __init__(self, target: Target) -> None:
        self._model = target.causal
        self._device = target.device
        self._cache = RollbackCache(target.config)
        self._argument = target.cache_argument()

    @unplanned_attention()
    def feed(self, tokens: list[int], *, num_logits: int) -> Tensor:
        """Run tokens after those already there; return the logits [num_logits, V] of the last."""
        self._cache.mark()
        ids = torch.tensor([tokens], device=self._device)  # [1, t]
        output = self._model(
            input_ids=ids,
            use_cache=True,
            logits_to_keep=num_logits,
            **{self._argument: self._cache.layers_state},
        )
        return output.logits[0]

    def keep(self, tokens: list[int], *, kept: int) -> bool:
        """Keep the first `kept` of the tokens just fed; return whether they had to run again."""
        if self._cache.take_back(len(tokens), kept=kept):
            return False
        self.feed(tokens[:kept], num_logits=1)
        return True


@torch.inference_mode()
def decode_greedy(
    target: Target,
    prompt: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    watch: Watcher | None = None,
) -> Decoded:
    """Let the target answer a prompt by its best token each time, one forward a token.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: most tokens of the answer.
        stop_ids: tokens that end the answer; the one that did is part of it.
        watch: called with an index into the answer and logits [n, V] of it and what follows.
    """
    stop = frozenset(stop_ids)
    clock = _Clock(target)
    sequence = TargetSequence(target)
    logits = sequence.feed(prompt, num_logits=1)
    prefill_s = clock.lap()
    tokens: list[int] = []
    while True:
        if watch is not None:
            with clock.paused():
                watch(len(tokens), logits)
        tokens.append(int(logits[0].argmax()))
        if len(tokens) == max_new_tokens or tokens[-1] in stop:
            break
        logits = sequence.feed(tokens[-1:], num_logits=1)
    return Decoded(
        tokens=tokens,
        num_prompt=len(prompt),
        target_steps=len(tokens) - 1,
        seconds=clock.lap(),
        prefill_s=prefill_s,
    )


class SpeculativeDecoder:
    """Decode with a target and a drafter; a context manager, because it hooks the target's layers.

    Args:
        target: a causal language model with its head, in evaluation mode.
        drafter: trained (or not) on this target's layers; same device.
        temperature: 0 for greedy, else the divisor of both models' logits.
        seed: of the sampling; each prompt's own stream is a function of it and `stream`.
    """

    def __init__(
        self, target: Target, drafter: Drafter, *, temperature: float = 0.0, seed: int = 0
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._temperature = temperature
        self._seed = seed
        self._device = target.device
        self._capture = Capture(target, drafter.config.target_layer_ids)
        self._dtype = next(drafter.parameters()).dtype

    def __enter__(self) -> "SpeculativeDecoder":
        self._capture.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._capture.__exit__(*exception)

    @torch.inference_mode()
    def decode(
        self,
        prompt: list[int],
        *,
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        stream: int = 0,
        watch: Watcher | None = None,
    ) -> Decoded:
        """Answer a prompt in blocks; arguments as for `decode_greedy`.

        At temperature 0 the tokens are those of `decode_greedy`, above it they are distributed
        as the target's own samples.

        Args:
            stream: number of the random stream, so that prompts do not depend on each other.
        """
        stop = frozenset(stop_ids)
        generator = torch.Generator(self._device).manual_seed(_seed_of(self._seed, stream))
        clock = _Clock(self._target)
        sequence = TargetSequence(self._target)
        drafts = self._drafter.new_cache()
        logits = sequence.feed(prompt, num_logits=1)
        features = self._take_features(len(prompt))
        if watch is not None:
            watch(0, logits)
        tokens = [self._pick(logits[0], generator)]
        prefill_s = clock.lap()
        cycles: list[Cycle] = []
        reruns = 0
        while len(tokens) < max_new_tokens and tokens[-1] not in stop:
            anchor = len(prompt) + len(tokens) - 1
            room = max_new_tokens - len(tokens)
            proposal = self._draft(drafts, features, tokens[-1], anchor)[: room - 1]
            drafted = self._propose(proposal, generator)
            block = [tokens[-1], *drafted.tolist()]
            logits = sequence.feed(block, num_logits=len(block))
            features = self._take_features(len(block))
            accepted, bonus = self._judge(drafted, proposal, logits, generator)
            if watch is not None:
                with clock.paused():
                    watch(len(tokens), logits[: accepted + 1])
            gained = _until_stop([*block[1 : accepted + 1], bonus], stop)
            tokens += gained
            ended = tokens[-1] in stop
            cycles.append(_cycle(anchor, len(drafted), accepted, len(gained)))
            if not ended and len(tokens) < max_new_tokens:
                reruns += sequence.keep(block, kept=accepted + 1)
                features = features[: accepted + 1]
        return Decoded(
            tokens=tokens,
            num_prompt=len(prompt),
            target_steps=len(cycles),
            reruns=reruns,
            seconds=clock.lap(),
            prefill_s=prefill_s,
            cycles=cycles,
        )

    def _take_features(self, num_tokens: int) -> Tensor:
        states = torch.cat([state[0] for state in self._capture.take()], dim=-1)  # [t, K*H]
        assert len(states) == num_tokens
        return states.to(self._dtype)

    def _draft(self, drafts: Any, features: Tensor, token: int, anchor: int) -> Tensor:
        config = self._drafter.config
        ids = torch.full((config.block_size,), config.mask_token_id, device=self._device)  # [B]
        ids[0] = token
        embeddings = self._target.embed_weight()[ids].to(self._dtype)  # [B, H]
        embeddings = embeddings * config.input_embedding_scale
        hidden = self._drafter.draft(drafts, features, embeddings, anchor)  # [B, H]
        first_slot = 0 if config.sample_from_anchor else 1
        return head_logits(config, hidden[first_slot:], self._target.head_weight())

    def _pick(self, logits: Tensor, generator: torch.Generator) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        probs = probabilities(logits, self._temperature)
        return int(torch.multinomial(probs, 1, generator=generator))

    def _propose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        if self._temperature == 0 or len(logits) == 0:
            return logits.argmax(dim=-1)
        probs = probabilities(logits, self._temperature)
        return torch.multinomial(probs, 1, generator=generator)[:, 0]

    def _judge(
        self, drafted: Tensor, proposal: Tensor, logits: Tensor, generator: torch.Generator
    ) -> tuple[int, int]:
        if self._temperature == 0:
            return accept_greedy(drafted, logits)
        return accept_sampled(
            drafted,
            probabilities(proposal, self._temperature),
            probabilities(logits, self._temperature),
            generator=generator,
        )


def _seed_of(seed: int, stream: int) -> int:
    # A generator takes 63 bits and no more.
    return (seed * 1_000_003 + stream) % 2**63


def head_logits(config: DrafterConfig, hidden: Tensor, head: Tensor) -> Tensor:
    """Return the drafter's logits as serving engines compute them.

    Args:
        config: says how logits are scaled and capped.
        hidden: [n, H] block states after the final norm.
        head: [V, H] the target's output weight.

    Returns:
        [n, V] in the dtype of `hidden`.
    """
    logits = hidden @ head.to(hidden.dtype).T * config.output_multiplier
    cap = config.final_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap else logits


def _until_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


def _cycle(anchor: int, proposed: int, accepted: int, produced: int) -> Cycle:
    # After an accepted stop token nothing was judged and no token of the target's own was added.
    if produced <= accepted:
        proposed = accepted = produced
    return Cycle(anchor=anchor, proposed=proposed, accepted=accepted, produced=produced)


class _Clock:
    """Seconds since the last lap, without what ran while paused."""

    def __init__(self, target: Target) -> None:
        self._is_cuda = target.device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float:
        # Waits for the device's queue: a lap is what the work took, not what launching it took.
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, self._now()
        return self._last - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        stopped = self._now()
        yield
        self._last += self._now() - stopped
