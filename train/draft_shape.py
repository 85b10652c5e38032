"""The shape of a new drafter: the target's own, then a file's, then what the user says.

Width, vocabulary, heads and RoPE base follow the target; the MLP of a drafter for a
mixture-of-experts target has three times the width.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dflash_offline.common.cache import Cache
from dflash_offline.common.device_choice import dtype_name
from dflash_offline.common.errors import BadInput
from dflash_offline.common.logit_scales import text_config
from dflash_offline.kernels.block_attention import HEAD_DIMS, MAX_DIM_4_BYTES, MAX_RATIO
from dflash_offline.train.drafter_config import FIXED, REPEATED, DrafterConfig, check_kinds
from dflash_offline.train.target_head import TargetHead

DEFAULT_LAYERS = 5
DEFAULT_BLOCK_SIZE = 16
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Keys of a config.json that change nothing of a drafter: about the file or the text, or
# read beside others only.
_IGNORED_KEYS = {
    "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map", "architectures",
    "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
    "use_cache", "max_window_layers", "rope_parameters",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShapeWishes:
    """What the user said about the drafter; None leaves it open."""

    file: Mapping[str, Any] = field(default_factory=dict)  # what --draft-config holds
    draft_layers: int | None = None
    block_size: int | None = None


def new_drafter_config(
    cache: Cache,
    head: TargetHead,
    wishes: ShapeWishes,
    *,
    layers: tuple[int, ...],
    mask_token_id: int,
) -> DrafterConfig:
    """Return the configuration of a drafter that starts from random weights.

    Raises:
        BadInput: the file does not fit the store, or the target's config lacks what a drafter
            needs.
    """
    base = _from_target(cache, head, layers, mask_token_id).to_json()
    merged = _merge(base, wishes.file)
    merged["dflash_config"]["mask_token_id"] = mask_token_id
    if wishes.draft_layers is not None and wishes.draft_layers != merged["num_hidden_layers"]:
        given = merged.get("layer_types")
        if wishes.file and given and len(set(given)) > 1:
            raise BadInput(
                f"--draft-layers {wishes.draft_layers} differs from the {len(given)} layer_types "
                "of --draft-config; drop one of them"
            )
        merged["num_hidden_layers"] = wishes.draft_layers
        merged["layer_types"] = given[:1] * wishes.draft_layers if given else None
    shape = with_wishes(DrafterConfig.from_json(merged), wishes)
    check_kept(shape, wishes)
    return shape


def with_wishes(config: DrafterConfig, wishes: ShapeWishes) -> DrafterConfig:
    """Apply what changes no tensor's shape."""
    changed = config.to_json()
    if wishes.block_size is not None:
        changed["block_size"] = changed["dflash_config"]["block_size"] = wishes.block_size
    return DrafterConfig.from_json(changed)


def check_kernels(config: DrafterConfig, dtype: torch.dtype) -> None:
    """Refuse a drafter that attention on a GPU has no kernel for.

    Raises:
        BadInput: names the key of the drafter's config, what is allowed and the remedy.
    """
    size, ratio = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    allowed = [each for each in HEAD_DIMS if dtype != torch.float32 or each <= MAX_DIM_4_BYTES]
    if size not in allowed:
        numbers = ", ".join(map(str, allowed))
        problem = (
            f"head_dim of the drafter: {size} given; in {dtype_name(dtype)} a GPU takes {numbers}"
        )
    elif ratio > MAX_RATIO:
        problem = (
            f"num_key_value_heads of the drafter: {config.num_key_value_heads} given for "
            f"{config.num_attention_heads} query heads; a GPU takes at most {MAX_RATIO} for each"
        )
    else:
        return
    raise BadInput(f"{problem}; train a drafter of another shape (--draft-config), or use a CPU")


def head_for(head: TargetHead, config: DrafterConfig, *, has_teacher: bool) -> TargetHead:
    """Return the target's head with the scales of a drafter's file, which engines serve it with.

    Args:
        has_teacher: the target's own logits are made with it, too.

    Raises:
        BadInput: they are, and the target scales them otherwise.
    """
    for key, given, own in (
        ("output_multiplier", config.output_multiplier, head.logit_scale),
        ("final_logit_softcapping", config.final_logit_softcapping, head.softcap),
    ):
        if has_teacher and given != own:
            raise BadInput(
                f"{key} of the drafter: {given} given, but the target has {own}, and --loss asks "
                "for a divergence between the two; use --loss decay or dpace, or the target's own"
            )
    return replace(
        head,
        logit_scale=config.output_multiplier,
        softcap=config.final_logit_softcapping,
        embedding_scale=config.input_embedding_scale,
    )


def check_fits(config: DrafterConfig, cache: Cache, source: str) -> None:
    """Refuse a drafter that does not belong to a store's target and layers.

    Raises:
        BadInput: names the field, both values and `source`, where the drafter came from.
    """
    schema = cache.schema
    depth = int(text_config(cache.target_config)["num_hidden_layers"])
    for name, given, wanted in (
        ("hidden_size", config.hidden_size, schema.hidden),
        ("vocab_size", config.vocab_size, schema.vocab_size),
        ("num_target_layers", config.num_target_layers, depth),
    ):
        if given != wanted:
            raise BadInput(
                f"{source}: {name} is {given}, but the target of {cache.blobs.url} has {wanted}; "
                "use a store of the drafter's own target"
            )
    missing = [layer for layer in config.target_layer_ids if layer not in schema.layers]
    if missing:
        raise BadInput(
            f"{source}: it reads layer {missing[0]}, but {cache.blobs.url} holds layers "
            f"{', '.join(map(str, schema.layers))}; extract with --layers "
            f"{','.join(map(str, config.target_layer_ids))}"
        )


def check_kept(shape: DrafterConfig, wishes: ShapeWishes) -> None:
    """Refuse a `--draft-config` with a key that says something else than what the drafter is.

    Raises:
        BadInput: names the key and both values.
    """
    made = shape.to_json()
    neutral = {"causal": made.get("is_causal"), "output_multiplier": 1.0}
    neutral["input_embedding_scale"] = 1.0
    overridden = {"dflash_config", "mask_token_id", *FIXED, *REPEATED}
    if wishes.draft_layers is not None:
        overridden |= {"num_hidden_layers", "layer_types"}
    if wishes.block_size is not None:
        overridden.add("block_size")
    for given, kept in (
        (wishes.file, made),
        (wishes.file.get("dflash_config") or {}, neutral | made["dflash_config"]),
    ):
        for key in sorted(set(given) - _IGNORED_KEYS - overridden):
            # Zero and false are other spellings of none.
            if (given[key] or None) not in (None, kept.get(key)):
                raise BadInput(
                    f"--draft-config sets {key} to {given[key]}, but the drafter that it goes "
                    f"with has {kept.get(key)}; drop it, or set the keys that it depends on"
                )


def _from_target(
    cache: Cache, head: TargetHead, layers: tuple[int, ...], mask_token_id: int
) -> DrafterConfig:
    config = text_config(cache.target_config)
    hidden = cache.schema.hidden
    heads = _needed(config, "num_attention_heads")
    experts = any((config.get(key) or 0) > 1 for key in _EXPERT_KEYS)
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden if experts else _needed(config, "intermediate_size"),
        num_hidden_layers=DEFAULT_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=cache.schema.vocab_size,
        rope_theta=_rope_theta(config),
        block_size=DEFAULT_BLOCK_SIZE,
        mask_token_id=mask_token_id,
        target_layer_ids=layers,
        num_target_layers=_needed(config, "num_hidden_layers"),
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=config.get("max_position_embeddings") or 40960,
        output_multiplier=head.logit_scale,
        final_logit_softcapping=head.softcap,
        input_embedding_scale=head.embedding_scale,
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    # Targets with sliding layers give one set of parameters for each kind of layer.
    rope = rope.get("full_attention", rope)
    return float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)


def _needed(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, list):
        value = value[0]
    if value is None:
        raise BadInput(
            f"the target's config.json lacks {key}, which the drafter's default comes from; give "
            "it in --draft-config"
        )
    return int(value)


def read_draft_config(path: Path | None) -> dict[str, Any]:
    """Return what a `--draft-config` says, nothing where there is none.

    Raises:
        BadInput: it cannot be read, or holds something else.
    """
    if path is None:
        return {}
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise BadInput(
            f"--draft-config {path} cannot be read as JSON ({problem}); give a drafter's "
            "config.json or a part of one"
        ) from problem
    if not isinstance(given, dict):
        raise BadInput(f"--draft-config {path} holds no JSON object; give a part of a config.json")
    if not isinstance(given.get("dflash_config") or {}, dict):
        raise BadInput(f"--draft-config {path}: dflash_config is no JSON object; make it one")
    check_kinds(given)
    return given


def _merge(base: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a file over the defaults; what depends on a given key does not keep its default."""
    known = set(base) | _IGNORED_KEYS | set(FIXED) | set(REPEATED) | {"is_causal"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise BadInput(f"--draft-config sets {unknown[0]}, which a DFlash drafter has not; drop it")
    special = given.get("dflash_config") or {}
    merged = base | dict(given)
    merged["dflash_config"] = base["dflash_config"] | special
    # TorchSpec's files leave the choice open.
    if special.get("target_layer_ids") is None:
        merged["dflash_config"]["target_layer_ids"] = base["dflash_config"]["target_layer_ids"]
    for key in ("block_size", "sample_from_anchor"):
        if key in given and key not in special:
            merged["dflash_config"][key] = given[key]
    if "num_hidden_layers" in given and "layer_types" not in given:
        merged["layer_types"] = None
    if ("layer_types" in given or "causal" in special) and "is_causal" not in given:
        del merged["is_causal"]
    if "sliding_window" in given and "use_sliding_window" not in given:
        merged["use_sliding_window"] = given["sliding_window"] is not None
    if "rope_parameters" not in given:
        if "rope_theta" in given or "rope_scaling" in given:
            merged["rope_parameters"] = None
    elif "rope_theta" not in given:
        merged["rope_theta"] = None
    return merged
