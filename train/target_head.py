"""The parts of the target that training needs, read from the store: embedding, head and scales.

Letters: V vocabulary, H hidden, R rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_offline.common.cache import Cache
from dflash_offline.common.logit_scales import logit_scale, logit_softcap, text_config
from dflash_offline.kernels.linear_ce import LinearCE, linear_ce
from dflash_offline.kernels.linear_ce_fp8 import Fp8Head, linear_ce_fp8, quantize_head

# About so many bytes of logits exist at a time.
_CHUNK_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """Frozen embedding and output weight with the target's scales."""

    embed: torch.Tensor  # [V, H]
    weight: torch.Tensor  # [V, H], the embedding itself where they are tied
    logit_scale: float = 1.0
    softcap: float | None = None
    embedding_scale: float = 1.0
    fp8: Fp8Head | None = None  # the same weight, for the cross-entropy

    @property
    def chunk_rows(self) -> int:
        """Rows whose logits exist at a time; changes results by rounding only."""
        row_bytes = self.weight.shape[0] * self.weight.element_size()
        return max(256, min(4096, _CHUNK_BYTES // row_bytes))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TargetHead":
        """Return the same weights on a device, tied ones once."""
        embed = self.embed.to(device, dtype)
        tied = self.weight is self.embed
        return replace(self, embed=embed, weight=embed if tied else self.weight.to(device, dtype))

    def with_fp8(self) -> "TargetHead":
        """Return the same head with a copy in FP8 that the cross-entropy is computed with.

        Raises:
            ValueError: its width is not a multiple of 16.
        """
        return replace(self, fp8=quantize_head(self.weight))

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scaled embeddings [R, H] of token ids [R]."""
        rows = self.embed[tokens]
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor) -> LinearCE:
        """Return `linear_ce` of states [R, H] against labels [R], logits chunk by chunk."""
        if self.fp8 is not None:
            return linear_ce_fp8(
                states,
                self.fp8,
                labels,
                logit_scale=self.logit_scale,
                softcap=self.softcap,
                chunk_rows=self.chunk_rows,
            )
        return linear_ce(
            states,
            self.weight,
            labels,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            chunk_rows=self.chunk_rows,
        )

    @torch.no_grad()
    def best_tokens(self, final: torch.Tensor) -> torch.Tensor:
        """Return the target's own most likely token [R] for final states [R, H]."""
        # Scale and soft-cap are monotonic and leave the best token where it is.
        parts = [(rows @ self.weight.T).argmax(dim=1) for rows in final.split(self.chunk_rows)]
        return torch.cat(parts) if parts else final.new_empty(0, dtype=torch.int64)


def load_target_head(cache: Cache) -> TargetHead:
    """Read embedding, head and scales from a store's copy of its target."""
    config = text_config(cache.target_config)
    embed = cache.target_tensor("embed_tokens")
    # What was tied when the target ran; configs of several parts may say two things about it.
    weight = cache.target_tensor("lm_head")
    if weight.shape == embed.shape and weight.dtype == embed.dtype and torch.equal(weight, embed):
        weight = embed
    return TargetHead(
        embed=embed,
        weight=weight,
        logit_scale=logit_scale(config),
        softcap=logit_softcap(config),
        embedding_scale=_embedding_scale(config, embed),
    )


def _embedding_scale(config: Mapping[str, Any], embed: torch.Tensor) -> float:
    if str(config.get("model_type", "")).startswith(("gemma", "vaultgemma")):
        # Gemma rounds the root of its width to the weight's precision.
        return float(torch.tensor(embed.shape[1] ** 0.5).to(embed.dtype))
    return float(config.get("embedding_multiplier") or config.get("scale_emb") or 1.0)
