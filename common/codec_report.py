"""How far a store's decoded states are from the states themselves, as plain data.

Measured once, on the rows that the calibration was fitted on; saved beside it and shown by
`dflash-cache info`. Letters: K captured layers, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.quantize import Calibration, decode_states, encode_states

_HEAD_ROWS, _HEAD_BLOCK = 512, 64


def codec_report(
    rows: CalibrationRows,
    calibration: Calibration,
    *,
    layers: Sequence[int],
    head: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> dict[str, Any]:
    """Return the error of a codec on the rows of a calibration.

    Args:
        layers: ids of the K layers.
        head: [V, H]; gives the figures of the final state where the rows have one.
        logit_scale: factor on the logits.
        logit_softcap: `c` of `c * tanh(logits / c)`, or None.

    Returns:
        `codec`, `num_samples`, `num_tokens`, `exact_frac` (share of rows stored exactly),
        `layers` (for each: `layer`, and `median` and `p99` of the relative error after a root mean
        square norm), and `final` with the same and, with a head, `top1_agreement` and `kl` (mean,
        nats) of its distribution from the decoded state.
    """
    features, final = rows.features, rows.final
    encoded = encode_states(features, final, rows.is_first, calibration)
    decoded, decoded_final = decode_states(encoded, calibration)
    num_slots = len(features) + (final is not None)
    report: dict[str, Any] = {
        "codec": calibration.codec,
        "num_samples": calibration.num_samples,
        "num_tokens": calibration.num_tokens,
        "exact_frac": len(encoded.exact_rows) / max(1, num_slots * features.shape[1]),
        "layers": [
            {"layer": layer, **relative_error(decoded[slot], features[slot])}
            for slot, layer in enumerate(layers)
        ],
    }
    if final is not None and decoded_final is not None:
        report["final"] = relative_error(decoded_final, final)
        if head is not None:
            step = max(1, len(final) // _HEAD_ROWS)
            report["final"] |= head_error(
                decoded_final[::step],
                final[::step],
                head=head,
                logit_scale=logit_scale,
                logit_softcap=logit_softcap,
            )
    return report


def relative_error(decoded: Tensor, original: Tensor, weight: Tensor | None = None) -> dict:
    """Return `median` and `p99` over rows [T, H] of |norm(decoded) - norm(original)| / |norm|.

    Args:
        weight: of the norm, fp32 [H]; ones if None.
    """
    errors = []
    for some, other in zip(decoded.split(1024), original.split(1024), strict=True):
        a, b = (_normed(x.float(), weight) for x in (some, other))
        errors.append((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30))
    every = torch.cat(errors).numpy()
    return {"median": float(np.median(every)), "p99": float(np.percentile(every, 99))}


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    y = x * x.square().mean(dim=1, keepdim=True).clamp_min(1e-30).rsqrt()
    return y if weight is None else y * weight


def head_error(
    decoded: Tensor,
    original: Tensor,
    *,
    head: Tensor,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> dict[str, float]:
    """Return `top1_agreement` and `kl` of a head [V, H] on final states [T, H], in fp32."""
    weight = head.float()

    def log_probs(x: Tensor) -> Tensor:
        logits = x.float() @ weight.T * logit_scale
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        return logits.log_softmax(dim=1)

    agreed, divergence = 0, 0.0
    # Blocks, because 512 rows of 250,000 logits are 0.5 GB, twice.
    for some, other in zip(decoded.split(_HEAD_BLOCK), original.split(_HEAD_BLOCK), strict=True):
        q, p = log_probs(some), log_probs(other)
        agreed += int((q.argmax(1) == p.argmax(1)).sum())
        divergence += float((p.exp() * (p - q)).sum())
    count = max(1, len(original))
    return {"top1_agreement": agreed / count, "kl": divergence / count}
