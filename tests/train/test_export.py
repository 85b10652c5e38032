"""The exported folder: tensor names, config keys, round trip, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.common.errors import BadInput
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.export import load_drafter, load_drafter_config, save_drafter

PER_LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}


def test_58_tensors_for_five_layers(config_maker, tmp_path):
    save_drafter(Drafter(config_maker(num_hidden_layers=5)).initialise(0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{layer}.{name}" for layer in range(5) for name in PER_LAYER}
    assert set(tensors) == names
    assert len(tensors) == 58
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (32, 64)
    assert tensors["layers.4.self_attn.k_proj.weight"].shape == (16, 32)
    assert tensors["layers.4.self_attn.q_norm.weight"].shape == (8,)


def test_config_keys_that_engines_read(config_maker, tmp_path):
    save_drafter(Drafter(config_maker()).initialise(0), tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["mask_token_id"] == 52
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert config["num_target_layers"] == 6
    assert config["tie_word_embeddings"] is False
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["use_sliding_window"] is False
    assert config["sliding_window"] is None
    assert config["max_window_layers"] == 2
    assert config["is_causal"] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["rope_scaling"] is None
    assert config["hidden_act"] == "silu"
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["sample_from_anchor"] is config["dflash_config"]["sample_from_anchor"] is False
    text = json.dumps(config)
    assert "mrope" not in text
    assert "partial_rotary_factor" not in text
    wanted = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
    wanted |= {"num_hidden_layers", "head_dim", "rms_norm_eps", "vocab_size", "attention_bias"}
    assert wanted <= set(config)


def test_target_transforms_are_written_only_where_the_target_has_them(config_maker):
    plain = config_maker().to_json()["dflash_config"]
    names = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
    assert not names & set(plain)
    config = config_maker(
        output_multiplier=0.5, final_logit_softcapping=30.0, input_embedding_scale=5.5
    )
    assert (
        config.to_json()["dflash_config"].items()
        >= {
            "output_multiplier": 0.5,
            "final_logit_softcapping": 30.0,
            "input_embedding_scale": 5.5,
        }.items()
    )
    assert DrafterConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sample_from_anchor": True},
        {"layer_causal": (True, True)},
        {
            "layer_types": ("sliding_attention", "full_attention"),
            "layer_causal": (True, False),
            "sliding_window": 7,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_round_trip(config_maker, tmp_path, changes, dtype):
    drafter = Drafter(config_maker(**changes)).initialise(0)
    save_drafter(drafter, tmp_path, dtype)
    loaded = load_drafter(tmp_path)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


def test_a_released_config_is_read(config_maker):
    # Block size only at the top, one RoPE spelling, no causality key: as z-lab writes them.
    config = config_maker(
        layer_types=("sliding_attention", "full_attention"),
        layer_causal=(True, False),
        sliding_window=7,
    ).to_json()
    for key in ("rope_parameters", "sample_from_anchor"):
        del config[key]
    del config["dflash_config"]["block_size"], config["dflash_config"]["sample_from_anchor"]
    read = DrafterConfig.from_json(config)
    assert read.block_size == 4
    assert read.layer_causal == (True, False)
    assert read.window(0) == 7
    assert read.window(1) is None
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert DrafterConfig.from_json(config).rope_theta == 5e5


def test_a_prefix_of_other_trainers_is_read(config_maker, tmp_path):
    drafter = Drafter(config_maker()).initialise(0)
    save_drafter(drafter, tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    assert torch.equal(load_drafter(tmp_path).fc.weight, drafter.fc.weight)


def damaged(folder, change):
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, config: tensors.pop("fc.weight"), "lacks fc.weight"),
        (lambda tensors, config: tensors.update(d2t=torch.zeros(2)), "holds d2t"),
        (lambda tensors, config: config.update(intermediate_size=7), "has shape"),
        (lambda tensors, config: config["dflash_config"].pop("mask_token_id"), "mask_token_id"),
        (lambda tensors, config: config.update(architectures=["DFlash2DraftModel"]), "DFlash2"),
        (lambda tensors, config: config["dflash_config"]["target_layer_ids"].reverse(), "3,1"),
        (lambda tensors, config: config["dflash_config"].update(use_swa=True), "use_swa"),
        (
            lambda tensors, config: config["rope_parameters"].update(partial_rotary_factor=0.25),
            "rope_parameters",
        ),
    ],
    ids=["missing", "unknown", "shape", "mask", "architecture", "order", "window", "rotary"],
)
def test_folders_that_are_refused(config_maker, tmp_path, change, words):
    save_drafter(Drafter(config_maker()).initialise(0), tmp_path)
    damaged(tmp_path, change)
    with pytest.raises(BadInput, match=words):
        load_drafter(tmp_path)


def test_no_drafter_there(tmp_path):
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_drafter(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        load_drafter_config(tmp_path)
