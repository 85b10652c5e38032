"""What a target's `config.json` does to its logits: `cap * tanh(scale * head(final) / cap)`."""

from collections.abc import Mapping
from typing import Any


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a Hugging Face config that describes the decoder."""
    return config.get("text_config") or config


def logit_scale(config: Mapping[str, Any]) -> float:
    """Return the factor on the logits of a decoder's config, before the soft-cap."""
    divisor = config.get("logits_scaling")
    if divisor is not None:
        # HyperCLOVA X multiplies by the key that Granite divides by.
        multiplies = config.get("model_type") == "hyperclovax"
        return float(divisor) if multiplies else 1.0 / float(divisor)
    # Cohere's key, then Falcon-H1's.
    for name in ("logit_scale", "lm_head_multiplier"):
        if config.get(name) is not None:
            return float(config[name])
    if config.get("dim_model_base") is not None:
        # MiniCPM's.
        return float(config["dim_model_base"]) / float(config["hidden_size"])
    return 1.0


def logit_softcap(config: Mapping[str, Any]) -> float | None:
    """Return the soft-cap of a decoder's config, None where it has none."""
    cap = config.get("final_logit_softcapping")
    return None if cap is None else float(cap)
