"""What serving engines make of an exported drafter, by the rules of their loaders.

The rules of vLLM and SGLang are written down here as documented: names and fusions of tensors,
where the block size, the causality of a layer, the captured layers and RoPE are looked up. The mask
an engine arrives at is held against what the drafter really does, found by changing its inputs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflash_offline.common.errors import BadInput
from dflash_offline.train.anchors import AnchoredDocument, build_pass
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_offline.train.export import load_drafter, load_drafter_config, save_drafter

BLOCK, WINDOW = 5, 6
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "rope_theta": 1234567.0,
    "block_size": BLOCK,
    "mask_token_id": 99,
    "target_layer_ids": (1, 4, 7),
    "num_target_layers": 12,
}
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "full_causal": {"layer_causal": (True,) * 5},
    "sliding_bidirectional": {"layer_types": (SLIDING,) * 5, "sliding_window": WINDOW},
    "sliding_causal_full_bidirectional": {
        "layer_types": (SLIDING,) * 4 + (FULL,),
        "layer_causal": (True,) * 4 + (False,),
        "sliding_window": WINDOW,
    },
    "mixed_all_bidirectional": {
        "layer_types": (SLIDING, FULL) * 2 + (FULL,),
        "sliding_window": WINDOW,
    },
    "mixed_all_causal": {
        "layer_types": (SLIDING, FULL) * 2 + (FULL,),
        "layer_causal": (True,) * 5,
        "sliding_window": WINDOW,
    },
}
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@pytest.fixture(params=SHAPES)
def exported(request: pytest.FixtureRequest, tmp_path: Path):
    drafter = Drafter(DrafterConfig(**BASE | SHAPES[request.param])).initialise(0)
    save_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    return drafter, config, load_file(tmp_path / "model.safetensors")


def engine_parameters(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The weights that an engine allocates: name to (rows, columns), 0 columns for vectors."""
    hidden, middle, size = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    features = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc": (hidden, features * hidden), "hidden_norm": (hidden, 0), "norm": (hidden, 0)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.input_layernorm": (hidden, 0),
            f"layers.{layer}.post_attention_layernorm": (hidden, 0),
            f"layers.{layer}.self_attn.qkv_proj": (queries + 2 * keys, hidden),
            f"layers.{layer}.self_attn.o_proj": (hidden, queries),
            f"layers.{layer}.self_attn.q_norm": (size, 0),
            f"layers.{layer}.self_attn.k_norm": (size, 0),
            f"layers.{layer}.mlp.gate_up_proj": (2 * middle, hidden),
            f"layers.{layer}.mlp.down_proj": (hidden, middle),
        }
    return shapes


def engine_name(name: str, engine: str) -> str | None:
    """Where an engine puts a tensor of the file; None where it drops it without a word."""
    if engine == "vllm":
        if name == "t2d":
            return None
        assert "mask_hidden" not in name, "vLLM refuses such a checkpoint"
        name = name if name in ("lm_head.weight", "d2t") else f"model.{name}"
    # SGLang takes the prefix or leaves it; vLLM's model lives under it.
    name = name.removeprefix("model.").removesuffix(".weight")
    parts = name.split(".")
    parts[-1] = FUSED.get(parts[-1], parts[-1])
    return ".".join(parts)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tensors_fill_the_engine(exported, engine: str) -> None:
    _, config, tensors = exported
    assert len(tensors) == 58
    wanted = engine_parameters(config)
    rows: dict[str, int] = {}
    for name, tensor in tensors.items():
        place = engine_name(name, engine)
        # SGLang ignores what it does not know, so a misspelt tensor would be left at random.
        assert place in wanted, f"{name} would be ignored"
        rows[place] = rows.get(place, 0) + len(tensor)
        columns = tensor.shape[1] if tensor.dim() == 2 else 0
        assert columns == wanted[place][1], name
        assert tensor.dtype == torch.bfloat16
    assert rows == {name: shape[0] for name, shape in wanted.items()}


@pytest.mark.parametrize("damage", ["renamed", "extra", "narrow"])
def test_damage_is_seen(exported, damage: str) -> None:
    """The check above can fail."""
    drafter, config, tensors = exported
    if damage == "renamed":
        tensors["layers.0.self_attn.qnorm.weight"] = tensors.pop("layers.0.self_attn.q_norm.weight")
    elif damage == "extra":
        tensors["embed_tokens.weight"] = torch.zeros(101, 32, dtype=torch.bfloat16)
    else:
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1]
    with pytest.raises(AssertionError):
        test_tensors_fill_the_engine((drafter, config, tensors), "sglang")


def sglang_block_size(config: dict[str, Any]) -> int:
    return config.get("dflash_config", {}).get("block_size") or config.get("block_size") or 16


def captured_layers(config: dict[str, Any]) -> list[int]:
    """HF `hidden_states` indices that both engines hand to the drafter."""
    ids = config["dflash_config"]["target_layer_ids"]
    assert all(0 <= i < config["num_target_layers"] for i in ids)
    return [i + 1 for i in ids]


def test_lookups(exported) -> None:
    drafter, config, _ = exported
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["hidden_act"] == "silu"
    assert sglang_block_size(config) == BLOCK
    without_nested = config | {"dflash_config": {}}
    assert sglang_block_size(without_nested) == BLOCK
    assert captured_layers(config) == [2, 5, 8]
    # The last layer's output cannot be captured before the final norm.
    assert max(captured_layers(config)) <= config["num_target_layers"] - 1
    assert config["dflash_config"]["mask_token_id"] == 99
    # A third layout than 1+N must be declared in both places, or nowhere true.
    assert config["sample_from_anchor"] is config["dflash_config"]["sample_from_anchor"] is False
    assert config["tie_word_embeddings"] is False
    assert "auto_map" not in config
    assert drafter.config == DrafterConfig.from_json(config)


def test_rope(exported) -> None:
    """Both spellings say the same, and nothing of the target's rotary scheme leaks in."""
    _, config, _ = exported
    assert config["rope_theta"] == BASE["rope_theta"]
    assert config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": BASE["rope_theta"]}
    text = json.dumps(config)
    assert "mrope" not in text
    assert "partial_rotary" not in text


def test_transformers_keeps_the_window(exported) -> None:
    """Engines build a Qwen3Config, which drops the window without `use_sliding_window`."""
    drafter, config, _ = exported
    parsed = Qwen3Config(**config)
    assert list(parsed.layer_types) == list(drafter.config.layer_types)
    assert parsed.sliding_window == drafter.config.sliding_window
    assert parsed.head_dim == 8
    assert parsed.rope_parameters["rope_theta"] == BASE["rope_theta"]


def engine_causality(config: dict[str, Any], layer: int, engine: str) -> bool:
    """Whether a layer is causal inside the block, by each engine's order of lookups."""
    is_sliding = config["layer_types"][layer] == SLIDING
    given = config.get("is_causal")
    if engine in ("vllm", "sglang") and given is None:
        given = config["dflash_config"].get("causal")
    return is_sliding if given is None else bool(given)


def engine_mask(config: dict[str, Any], layer: int, engine: str, anchor: int) -> torch.Tensor:
    """Bool [B, anchor + B]: which positions a slot of the block sees."""
    queries = anchor + torch.arange(BLOCK)[:, None]
    keys = torch.arange(anchor + BLOCK)[None]
    visible = torch.ones(BLOCK, anchor + BLOCK, dtype=torch.bool)
    if engine_causality(config, layer, engine):
        visible &= keys <= queries
    if config["layer_types"][layer] == SLIDING:
        if engine == "sglang":
            window_left = config["sliding_window"] - 1
            visible &= queries - keys <= window_left
        else:
            visible &= queries - keys < config["sliding_window"]
    return visible


def drafter_mask(drafter: Drafter, layer: int, anchor: int) -> torch.Tensor:
    """The same, found by changing one input of one layer at a time."""
    generator = torch.Generator().manual_seed(layer)
    attention = drafter.layers[layer].self_attn
    tables = build_pass(
        [
            AnchoredDocument(
                tokens=torch.zeros(anchor + BLOCK, dtype=torch.int64).numpy(),
                supervised=torch.ones(anchor + BLOCK, dtype=torch.bool).numpy(),
                anchors=torch.tensor([anchor]).numpy(),
            )
        ],
        drafter.config.layout,
    )
    places = drafter.places(tables.positions_block)
    x = torch.randn(BLOCK, 32, generator=generator)
    features = torch.randn(anchor, 96, generator=generator)

    def run(x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        pairs = drafter.context_pairs(features, tables.positions_ctx)
        with torch.no_grad():
            return attention(x, pairs[layer], tables=tables.attention, places=places)

    plain = run(x, features)
    seen = torch.zeros(BLOCK, anchor + BLOCK, dtype=torch.bool)
    for key in range(anchor + BLOCK):
        changed_x, changed_features = x.clone(), features.clone()
        if key < anchor:
            changed_features[key] = torch.randn(96, generator=generator)
        else:
            changed_x[key - anchor] = torch.randn(32, generator=generator)
        seen[:, key] = (run(changed_x, changed_features) != plain).any(dim=1)
    return seen


@pytest.mark.parametrize("engine", ["zlab", "vllm", "sglang"])
def test_masks(exported, engine: str) -> None:
    drafter, config, _ = exported
    for layer in range(5):
        for anchor in (1, WINDOW - 2, 3 * WINDOW):
            wanted = engine_mask(config, layer, engine, anchor)
            assert torch.equal(drafter_mask(drafter, layer, anchor), wanted), (layer, anchor)


def test_mask_check_can_fail(exported) -> None:
    drafter, config, _ = exported
    other = config | {"is_causal": not engine_causality(config, 0, "vllm")}
    assert not torch.equal(drafter_mask(drafter, 0, 4), engine_mask(other, 0, "vllm", 4))


def test_causality_that_no_file_can_say() -> None:
    with pytest.raises(BadInput, match="causality"):
        DrafterConfig(
            **BASE
            | {
                "layer_types": (SLIDING, FULL, FULL, FULL, FULL),
                "layer_causal": (False, True, False, False, False),
                "sliding_window": WINDOW,
            }
        )


RELEASED_8B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": [FULL] * 5,
}


@pytest.mark.parametrize(
    ("changes", "causal", "windows"),
    [
        ({}, [False] * 5, [None] * 5),
        (
            {
                "layer_types": [SLIDING] * 4 + [FULL],
                "sliding_window": 2048,
                "use_sliding_window": True,
            },
            [True] * 4 + [False],
            [2048] * 4 + [None],
        ),
        (
            {
                "layer_types": [SLIDING] * 5,
                "sliding_window": 2048,
                "use_sliding_window": True,
                "is_causal": False,
            },
            [False] * 5,
            [2048] * 5,
        ),
        (
            {"dflash_config": RELEASED_8B["dflash_config"] | {"causal": True}},
            [True] * 5,
            [None] * 5,
        ),
    ],
    ids=["full", "hybrid_without_is_causal", "sliding_bidirectional", "dflash_config_causal"],
)
def test_released_configs(changes: dict[str, Any], causal: list, windows: list) -> None:
    config = DrafterConfig.from_json(RELEASED_8B | changes)
    assert list(config.layer_causal) == causal
    assert [config.window(layer) for layer in range(5)] == windows
    for layer in range(5):
        assert engine_causality(RELEASED_8B | changes, layer, "vllm") == causal[layer]
        assert engine_causality(config.to_json(), layer, "sglang") == causal[layer]
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert captured_layers(config.to_json()) == [2, 10, 18, 26, 34]


def special(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": RELEASED_8B["dflash_config"] | keys}


def test_places_and_names_that_engines_read() -> None:
    """Both engines look at the top for what dflash_config lacks; DeepSpec names the layout."""
    config = RELEASED_8B | RELEASED_8B["dflash_config"]
    del config["dflash_config"]
    assert DrafterConfig.from_json(config) == DrafterConfig.from_json(RELEASED_8B)
    for changes in ({"query_zero_predicts_next": True}, special(query_zero_predicts_next=True)):
        assert DrafterConfig.from_json(RELEASED_8B | changes).sample_from_anchor


@pytest.mark.parametrize("prefix", ["", "model."])
def test_reading_an_engines_file(exported, prefix: str, tmp_path: Path) -> None:
    """Both spellings of tensor names load; a name that means nothing here does not."""
    drafter, config, tensors = exported
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: t for name, t in tensors.items()}, folder / "model.safetensors")
    loaded = load_drafter(folder)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())
    tensors["mask_hidden"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput, match="mask_hidden"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "rope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids"),
        ({"speculators_model_type": "dflash"}, "speculators' format"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size.* allowed is 151936"),
        ({"target_hidden_size": 5120}, "target_hidden_size.* allowed is 4096"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (special(attention_sink_bias=True), "attention_sink_bias"),
        (special(attention_value_scale=0.5), "attention_value_scale"),
        (special(projector_type="domino"), "projector_type.* allowed is none"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=[
        "other_model",
        "partial_rotary",
        "scaled_rope",
        "no_layers",
        "speculators",
        "few_words",
        "wider_target",
        "interleaved_rotary",
        "activation",
        "sinks",
        "values",
        "domino",
        "quantized",
    ],
)
def test_unreadable_configs(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED_8B | changes))
    with pytest.raises(BadInput, match=word):
        load_drafter_config(tmp_path)
