"""The drafter's shape, and its two-way mapping to the z-lab `config.json`.

Only this module knows the keys of that file; the mapping holds what serving engines read, with
both spellings of RoPE and the block size in both places they look for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_offline.common.errors import BadInput
from dflash_offline.train.anchors import BlockLayout
from dflash_offline.train.rotary import Scaling, scaling_of

FULL = "full_attention"
SLIDING = "sliding_attention"
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 2, 64
# Fields that shape tensors.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "block_size",
)  # fmt: skip
# What values of a config.json are, where they are given; sizes are looked at when all is known.
_NUMBERS = {
    "rope_theta", "rms_norm_eps", "initializer_range", "output_multiplier",
    "final_logit_softcapping", "input_embedding_scale",
}  # fmt: skip
_COUNTS = {"mask_token_id", "num_target_layers", "sliding_window", "max_position_embeddings"}
_SWITCHES = {
    "is_causal", "causal", "sample_from_anchor", "query_zero_predicts_next",
    "use_sliding_window", "attention_bias",
}  # fmt: skip
_OBJECTS = {"dflash_config", "rope_parameters", "rope_scaling"}
_LISTS = {"target_layer_ids": int, "layer_types": str, "architectures": str}
# Keys of other drafters, at the top or in dflash_config, with the one value that means this one.
FIXED: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "use_qk_norm": True,
    "is_neox_style": True, "rope_is_neox_style": True, "use_aux_hidden_state": True,
    "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0, "conv_kernel_size": 0, "conv_group_size": 0,
    "selector_rank": 0, "selector_top_k": 0, "markov_rank": 0, "projector_type": None,
    "quantization_config": None,
}  # fmt: skip
# Keys that repeat another one, and that one.
REPEATED = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes the drafter's tensors and what its blocks mean."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    layer_types: tuple[str, ...] = ()  # all full attention when empty
    layer_causal: tuple[bool, ...] = ()  # per layer, inside the block; all False when empty
    sliding_window: int | None = None
    sample_from_anchor: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    rope_scaling: Scaling = ()

    def __post_init__(self) -> None:
        count = self.num_hidden_layers
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or (FULL,) * count)
        object.__setattr__(self, "layer_causal", tuple(self.layer_causal) or (False,) * count)
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        _check(self)

    @property
    def is_causal(self) -> bool | None:
        """The `is_causal` key: one value for all layers, or None where engines' rule holds.

        Without the key engines take sliding layers as causal inside the block and full layers as
        bidirectional; no other mix can be said in the file.
        """
        if len(set(self.layer_causal)) == 1:
            return self.layer_causal[0]
        return None

    @property
    def layout(self) -> BlockLayout:
        """How a block's slots map to tokens."""
        return BlockLayout(
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            sample_from_anchor=self.sample_from_anchor,
        )

    @property
    def num_features(self) -> int:
        """K, the number of captured target layers."""
        return len(self.target_layer_ids)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json(self) -> dict[str, Any]:
        """Return the complete z-lab `config.json`, without `dtype`."""
        sliding = self.sliding_window is not None
        special: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "sample_from_anchor": self.sample_from_anchor,
        }
        if self.output_multiplier != 1.0:
            special["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            special["final_logit_softcapping"] = self.final_logit_softcapping
        if self.input_embedding_scale != 1.0:
            special["input_embedding_scale"] = self.input_embedding_scale
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": special,
            "sample_from_anchor": self.sample_from_anchor,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) or None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                **dict(self.rope_scaling),
            },
            "layer_types": list(self.layer_types),
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window,
            "max_window_layers": 0 if sliding else self.num_hidden_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
        }
        if self.is_causal is not None:
            config["is_causal"] = self.is_causal
        return config

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Read a z-lab `config.json`, ours or released.

        Raises:
            BadInput: a key is missing, or the file describes another kind of drafter.
        """
        check_kinds(config)
        _refuse_other_kinds(config)
        special = config.get("dflash_config") or {}
        count = _wanted(config, "num_hidden_layers")
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        types = tuple(config.get("layer_types") or (FULL,) * count)
        return cls(
            hidden_size=_wanted(config, "hidden_size"),
            intermediate_size=_wanted(config, "intermediate_size"),
            num_hidden_layers=count,
            num_attention_heads=_wanted(config, "num_attention_heads"),
            num_key_value_heads=_wanted(config, "num_key_value_heads"),
            head_dim=_wanted(config, "head_dim"),
            vocab_size=_wanted(config, "vocab_size"),
            rope_theta=_rope_theta(config),
            rope_scaling=scaling_of(config),
            block_size=_either(config, "block_size"),
            mask_token_id=_either(config, "mask_token_id"),
            target_layer_ids=tuple(_either(config, "target_layer_ids")),
            num_target_layers=_either(config, "num_target_layers"),
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            max_position_embeddings=config.get("max_position_embeddings", 40960),
            initializer_range=config.get("initializer_range", 0.02),
            layer_types=types,
            layer_causal=_layer_causal(config, types),
            sliding_window=window if SLIDING in types else None,
            # The second is DeepSpec's name.
            sample_from_anchor=_either(
                config, "sample_from_anchor", "query_zero_predicts_next", default=False
            ),
            output_multiplier=special.get("output_multiplier") or 1.0,
            final_logit_softcapping=special.get("final_logit_softcapping") or None,
            input_embedding_scale=special.get("input_embedding_scale") or 1.0,
        )


def check_kinds(config: Mapping[str, Any]) -> None:
    """Refuse values of a `config.json`, or a part of one, that are of another kind than its keys.

    Raises:
        BadInput: names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise BadInput("config.json of the drafter holds no JSON object; is it a DFlash drafter?")
    for key, value in config.items():
        if value is None:
            continue
        if key in _NUMBERS:
            # Zero is another spelling of none.
            is_right = type(value) in (int, float) and 0 <= value < float("inf")
            wanted = "a number above 0"
        elif key in _COUNTS:
            is_right, wanted = type(value) is int and value >= 0, "a whole number"
        elif key in _SWITCHES:
            is_right, wanted = type(value) is bool, "true or false"
        elif key in _OBJECTS:
            is_right, wanted = isinstance(value, Mapping), "an object"
        elif kind := _LISTS.get(key):
            is_right = isinstance(value, list) and all(type(each) is kind for each in value)
            wanted = f"a list of {'whole numbers' if kind is int else 'names'}"
        else:
            continue
        if not is_right:
            raise BadInput(f"{key} of the drafter: {value!r} given; {wanted} is needed")
        if key in _OBJECTS:
            check_kinds(value)


def _check(config: DrafterConfig) -> None:
    for name in _SIZES:
        size = vars(config)[name]
        if type(size) is not int or size < 1:
            raise BadInput(
                f"{name} of the drafter: {size!r} given; a whole number above 0 is needed"
            )
    for name in ("rope_theta", "rms_norm_eps"):
        if not vars(config)[name] > 0:
            raise BadInput(
                f"{name} of the drafter: {vars(config)[name]} given; a number above 0 is needed"
            )
    if config.head_dim % 2:
        raise BadInput(
            f"head_dim of the drafter: {config.head_dim} given; rotary positions need an even one"
        )
    count = config.num_hidden_layers
    for name, given in (("layer_types", config.layer_types), ("causality", config.layer_causal)):
        if len(given) != count:
            raise BadInput(
                f"{name} of the drafter: {len(given)} entries given, {count} layers to describe; "
                "give one entry a layer"
            )
    unknown = sorted(set(config.layer_types) - {FULL, SLIDING})
    if unknown:
        raise BadInput(f"layer_types of the drafter: {unknown[0]!r}; use {FULL!r} or {SLIDING!r}")
    if not MIN_BLOCK_SIZE <= config.block_size <= MAX_BLOCK_SIZE:
        raise BadInput(
            f"block_size of the drafter: {config.block_size} given, {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE} allowed; a block holds the anchor and what is drafted after it"
        )
    ids = config.target_layer_ids
    if list(ids) != sorted(set(ids)):
        raise BadInput(
            f"target_layer_ids of the drafter: {','.join(map(str, ids))} given, and engines hand "
            "states over from the first layer to the last, each once; sort them"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise BadInput(
            f"num_attention_heads of the drafter: {config.num_attention_heads} is no multiple of "
            f"{config.num_key_value_heads} key and value heads; change one of them"
        )
    if SLIDING in config.layer_types and (config.sliding_window or 0) < config.block_size:
        # Engines disagree on the right bound of a bidirectional window shorter than a block.
        raise BadInput(
            f"sliding_window of the drafter: {config.sliding_window} given, at least the block "
            f"size {config.block_size} needed for sliding layers; raise it"
        )
    engines_rule = tuple(kind == SLIDING for kind in config.layer_types)
    if config.is_causal is None and config.layer_causal != engines_rule:
        raise BadInput(
            "causality of the drafter's layers: a mix given that config.json cannot say; make all "
            "layers equal, or sliding layers causal and full layers bidirectional"
        )


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    if "speculators_model_type" in config:
        raise BadInput(
            "config.json of the drafter has speculators' format; give a drafter in z-lab's"
        )
    architecture = (config.get("architectures") or ["DFlashDraftModel"])[0]
    known = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
    if architecture not in known:
        raise BadInput(
            f"architectures of the drafter: {architecture} given; this program reads {known[0]}"
        )
    special = config.get("dflash_config") or {}
    allowed = FIXED | {key: config.get(other) for key, other in REPEATED.items()}
    for key, only in allowed.items():
        for given in (config.get(key), special.get(key)):
            if given not in (None, only):
                wanted = "none" if only is None else repr(only)
                raise BadInput(f"{key} of the drafter: {given!r} given; allowed is {wanted}")
    if special.get("use_swa"):
        # ModelOpt's spelling; its other key and `causal` stand beside it.
        raise BadInput(
            "dflash_config.use_swa of the drafter: true given; say it with layer_types and "
            "sliding_window, which all engines read"
        )


def _layer_causal(config: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    special = config.get("dflash_config") or {}
    given = config.get("is_causal")
    if given is None:
        given = special.get("causal")
    if given is not None:
        return (bool(given),) * len(types)
    return tuple(kind == SLIDING for kind in types)


def _rope_theta(config: Mapping[str, Any]) -> float:
    theta = config.get("rope_theta")
    if theta is None:
        theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        raise BadInput("config.json of the drafter lacks rope_theta; write the one it was made for")
    return float(theta)


def _either(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """Return what stands in dflash_config or else at the top, where engines look as well."""
    places = (config.get("dflash_config") or {}, config)
    found = [place[key] for key in keys for place in places if place.get(key) is not None]
    if not found and default is None:
        raise BadInput(f"config.json of the drafter lacks {keys[0]}; is it a DFlash drafter?")
    return found[0] if found else default


def _wanted(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise BadInput(f"config.json of the drafter lacks {key}; is it a DFlash drafter?")
    return value
