"""Which drafted tokens a target keeps, and the token it adds: greedy and by rejection sampling.

Letters: n drafted tokens (at most B-1), V vocabulary.
"""

import torch
from torch import Tensor


def accept_greedy(drafted: Tensor, target_logits: Tensor) -> tuple[int, int]:
    """Keep the longest prefix that the target would have chosen itself.

    Args:
        drafted: [n] int64.
        target_logits: [n+1, V]; row i is the target's answer to what comes before drafted token i.

    Returns:
        the number of tokens kept, and the target's own next token after them.
    """
    best = target_logits.argmax(dim=-1)  # [n+1]
    agrees = drafted == best[:-1]
    accepted = int(agrees.long().cumprod(dim=0).sum())
    return accepted, int(best[accepted])


def accept_sampled(
    drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, *, generator: torch.Generator
) -> tuple[int, int]:
    """Keep drafted token x with probability min(1, p(x)/q(x)); the result is distributed as p.

    At the first refusal the next token is drawn from max(p - q, 0), normalised; if all are kept,
    from the target's last row. Whatever q is, the tokens follow the target's distribution.

    Args:
        drafted: [n] int64, each drawn from its row of `draft_probs`.
        draft_probs: [n, V] fp32, q.
        target_probs: [n+1, V] fp32, p.
        generator: source of randomness, on the device of the tensors.

    Returns:
        the number of tokens kept, and the token after them.
    """
    rows = torch.arange(len(drafted), device=drafted.device)
    p = target_probs[rows, drafted]
    q = draft_probs[rows, drafted]
    chance = torch.rand(len(drafted), generator=generator, device=drafted.device, dtype=p.dtype)
    accepted = int((chance * q < p).long().cumprod(dim=0).sum())
    left = target_probs[accepted]
    if accepted < len(drafted):
        residual = (left - draft_probs[accepted]).clamp_min(0)
        # p == q to rounding leaves nothing; a refusal there is a rounding accident.
        left = residual if float(residual.sum()) > 0 else left
    return accepted, int(torch.multinomial(left, 1, generator=generator))


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) in fp32 (fp64 stays fp64)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(wide / temperature, dim=-1)
