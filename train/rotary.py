"""Rotary frequencies of a drafter: plain, or scaled to long contexts by transformers' functions."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.kernels.norm_rope import inverse_frequencies

_LENGTH = "original_max_position_embeddings"
# Kinds of scaling that depend on nothing but the configuration: the keys that each needs, and may
# have.
_KINDS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _LENGTH}, set()),
    "yarn": (
        {"factor", _LENGTH},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
_SAID_ELSEWHERE = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}

Scaling = tuple[tuple[str, Any], ...]  # sorted keys of rope_scaling and their values


def scaling_of(config: Mapping[str, Any]) -> Scaling:
    """Read how a `config.json` scales rotary positions, nothing where it does not.

    Raises:
        BadInput: not all of a head is rotated, or in a way that is not trained here.
    """
    given = [dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling")]
    kinds = [each.get("rope_type", each.get("type", "default")) for each in given if each]
    if len(set(kinds)) > 1:
        raise BadInput(
            f"rope_scaling of the drafter: {kinds[1]!r} given, and rope_parameters say "
            f"{kinds[0]!r}; drop one of them"
        )
    rope, kind = given[0] or given[1], kinds[0] if kinds else "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or kind not in {"default", *_KINDS}:
        raise BadInput(
            f"rope_parameters of the drafter: {rope} given; {', '.join(_KINDS)} and default with "
            "full rotary are trained here; start a new drafter"
        )
    if kind == "default":
        return ()
    values = {k: v for k, v in rope.items() if k not in _SAID_ELSEWHERE and v is not None}
    needed, others = _KINDS[kind]
    for key in sorted(needed - set(values)):
        raise BadInput(f"rope_parameters of the drafter lack {key}, which {kind} needs; add it")
    for key in sorted(set(values) - needed - others):
        raise BadInput(f"rope_parameters of the drafter: {key} given, which {kind} has not")
    for key, value in values.items():
        wanted = "true or false" if key == "truncate" else "a number above 0"
        number = type(value) in (int, float) and 0 < value < float("inf")
        if not (type(value) is bool if key == "truncate" else number):
            raise BadInput(f"{key} of the drafter's rope: {value!r} given; {wanted} is needed")
    return tuple(sorted({"rope_type": kind, **values}.items()))


@cache
def frequencies(
    head_dim: int, theta: float, scaling: Scaling, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Return the frequencies, float32 [D / 2], and what cosines and sines are multiplied with.

    Made once for a device: a copy from the host in every pass would make the host wait.
    """
    # Not inference tensors, whoever asks first: training reads the same ones.
    with torch.inference_mode(False):
        if not scaling:
            return inverse_frequencies(head_dim, theta).to(device), 1.0
        # Training needs nothing else of transformers, whose import takes seconds.
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        said = dict(scaling)
        config = Qwen3Config(
            head_dim=head_dim,
            max_position_embeddings=round(said["factor"] * said.get(_LENGTH, 1)),
            rope_parameters=said | {"rope_theta": theta},
        )
        values, scale = ROPE_INIT_FUNCTIONS[said["rope_type"]](config, torch.device("cpu"))
        return values.to(device), float(scale)
