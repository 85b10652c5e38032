"""A teacher's best tokens of a batch, from final states that are on the device anyway.

Logits exist only here and in the self-check, at most 2,048 rows at a time, and only of rows whose
next token is supervised. Letters: R rows of a batch, H hidden, k tokens kept.
"""

import torch
from torch import Tensor

from dflash_offline.common.target import Target
from dflash_offline.common.topk import top_logprobs


class BestTokens:
    """The k best tokens of some rows, and zeros for the others."""

    def __init__(self, target: Target, k: int) -> None:
        """Take the best `k` by a target that was loaded with its head on the device."""
        self.k = k
        self._target = target

    @torch.inference_mode()
    def __call__(self, final: Tensor, is_wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids int32 [R, k] and fp32 log-probabilities [R, k].

        Args:
            final: [R, H], post final norm.
            is_wanted: bool [R], in host memory, so that counting them waits for nothing.
        """
        shape = len(final), self.k
        ids = torch.zeros(shape, dtype=torch.int32, device=final.device)
        logprobs = torch.zeros(shape, dtype=torch.float32, device=final.device)
        at = is_wanted.nonzero()[:, 0].to(final.device, non_blocking=True)
        some_ids, some_logprobs = top_logprobs(final[at], self._target.head_logits, self.k)
        ids[at], logprobs[at] = some_ids, some_logprobs
        return ids, logprobs
