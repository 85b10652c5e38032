"""Keys and values of decoding in memory that has room for the tokens to come.

Transformers' own layer concatenates for every token, so that each step reads and writes all that is
held: a third of a step of a small target with hundreds of rows. Letters: B rows, K heads of keys, T
tokens held, N new tokens, D head width.
"""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """A full-attention layer whose keys and values are the first tokens of larger tensors."""

    def __init__(self, *, limit: int) -> None:
        """Hold up to `limit` tokens; more get no room in advance."""
        super().__init__()
        self._limit = limit

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, K, N, D]; return all, [B, K, T + N, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = _appended(self.keys, key_states, self._limit)
        self.values = _appended(self.values, value_states, self._limit)
        return self.keys, self.values


def roomy_cache(config: PreTrainedConfig, *, limit: int) -> DynamicCache:
    """Return transformers' cache for a target, with roomy layers where it would have plain ones."""
    cache = DynamicCache(config=config)
    # Windows and recurrent states do not grow with the tokens; their layers are other classes.
    cache.layers = [
        RoomyLayer(limit=limit) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def _appended(held: torch.Tensor, new: torch.Tensor, limit: int) -> torch.Tensor:
    """Return held [B, K, T, D] and new [B, K, N, D] as one; in place where there is room.

    A layer not yet used holds an empty vector. Where rows were taken out, what is held is a new
    tensor without room.
    """
    past = held.shape[2] if held.ndim == 4 else 0
    end = past + new.shape[2]
    # The distance from one head to the next tells how many tokens there is memory for.
    if past == 0 or held.stride(1) < end * held.stride(2):
        tokens = max(end, min(end + end // 4 + 64, limit))
        roomy = new.new_empty(*new.shape[:2], tokens, new.shape[3])
        if past:
            roomy[:, :, :past] = held
    else:
        roomy = held.as_strided((*held.shape[:2], end, held.shape[3]), held.stride())
    roomy[:, :, past:end] = new
    return roomy[:, :, :end]
