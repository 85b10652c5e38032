"""The shape of a new drafter: defaults of the target, a file over them, the user over both."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save

from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.train.draft_shape import (
    ShapeWishes,
    check_kernels,
    new_drafter_config,
    read_draft_config,
)
from dflash_offline.train.target_head import TargetHead, load_target_head


@pytest.fixture
def shape_for(corpus_maker, tmp_path):
    """Return the drafter's shape for a target's config, wishes and a partial config file."""

    def make(target: dict | None = None, file: dict | None = None, **wishes):
        corpus = corpus_maker()
        config = json.loads(corpus.target_files["config.json"]) | (target or {})
        corpus.target_files["config.json"] = json.dumps(config).encode()
        folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        corpus.write(folder)
        cache = open_cache(str(folder))
        if file is not None:
            (tmp_path / "draft.json").write_text(json.dumps(file))
            wishes["file"] = read_draft_config(tmp_path / "draft.json")
        head = load_target_head(cache)
        return new_drafter_config(
            cache, head, ShapeWishes(**wishes), layers=(1, 3), mask_token_id=96
        )

    return make


def test_defaults_follow_the_target(shape_for):
    shape = shape_for()
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers) == (64, 97, 6)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.intermediate_size, shape.rope_theta, shape.rms_norm_eps) == (96, 1e4, 1e-6)
    assert (shape.num_hidden_layers, shape.block_size, shape.mask_token_id) == (5, 16, 96)
    assert shape.target_layer_ids == (1, 3)
    assert shape.is_causal is False
    assert shape.sample_from_anchor is False


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_make_the_mlp_three_times_the_width(shape_for, key):
    assert shape_for({key: 8}).intermediate_size == 192


@pytest.mark.parametrize(
    ("target", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 2e5}}, 2e5),
        (
            {
                "rope_theta": None,
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_theta": 1e6},
                },
            },
            1e6,
        ),
    ],
    ids=["key", "parameters", "by-kind"],
)
def test_rope_base_of_the_target_with_full_rotary(shape_for, target, theta):
    shape = shape_for(target)
    assert shape.rope_theta == theta
    assert shape.to_json()["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}


def test_a_multimodal_target_is_read_by_its_text_part(shape_for):
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 80,
        "rope_theta": 3e4,
        "tie_word_embeddings": True,
    }
    shape = shape_for({"text_config": text})
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (8, 8, 8)
    assert (shape.intermediate_size, shape.rope_theta) == (80, 3e4)


def test_scales_of_the_target_are_written_for_engines(shape_for):
    shape = shape_for({"final_logit_softcapping": 30.0, "model_type": "gemma2"})
    assert shape.final_logit_softcapping == 30.0
    assert shape.input_embedding_scale == 8.0
    assert shape_for({"model_type": "vaultgemma"}).input_embedding_scale == 8.0
    for keys in (
        {"logits_scaling": 4.0, "embedding_multiplier": 12.0},
        {"dim_model_base": 16, "scale_emb": 12},
    ):
        shape = shape_for(keys)
        assert (shape.output_multiplier, shape.input_embedding_scale) == (0.25, 12.0)


def test_gemmas_scale_is_rounded_as_gemma_rounds_it(small_store):
    cache = open_cache(small_store[0])
    for dtype, scale in ((torch.float32, 1152**0.5), (torch.bfloat16, 34.0)):
        stored = SimpleNamespace(
            target_config=cache.target_config | {"model_type": "gemma3_text"},
            target_tensor=lambda _, dtype=dtype: torch.zeros(3, 1152, dtype=dtype),
        )
        assert load_target_head(stored).embedding_scale == pytest.approx(scale, rel=1e-6)


def test_the_user_wins_over_the_file_and_the_file_over_the_target(shape_for):
    file = {"num_hidden_layers": 3, "block_size": 8, "intermediate_size": 72}
    shape = shape_for(file=file)
    assert (shape.num_hidden_layers, shape.block_size, shape.intermediate_size) == (3, 8, 72)
    shape = shape_for(file=file, draft_layers=2, block_size=10)
    assert (shape.num_hidden_layers, shape.block_size) == (2, 10)
    assert shape.layer_types == ("full_attention",) * 2


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "top"])
def test_the_slot_layout_comes_from_the_file(shape_for, nested):
    key = {"sample_from_anchor": True}
    shape = shape_for(file={"dflash_config": key} if nested else key)
    assert shape.sample_from_anchor is True
    assert shape.layout.num_predictions == shape.block_size


def test_sliding_layers_come_from_the_file(shape_for):
    kinds = ["sliding_attention", "full_attention"]
    file = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 32}
    # Without `is_causal` the file means what engines make of it.
    shape = shape_for(file=file)
    assert shape.layer_causal == (True, False)
    assert shape.window(0) == 32
    assert shape_for(file=file | {"is_causal": False}).layer_causal == (False, False)


def test_a_released_config_is_a_file(shape_for, config_maker):
    released = config_maker(hidden_size=64, vocab_size=97, target_layer_ids=(1, 3)).to_json()
    # As SpecForge ships them.
    others = {"dtype": "bfloat16", "transformers_version": "5.0", "auto_map": {"AutoModel": "x"}}
    others |= {"bos_token_id": 1, "eos_token_id": 7, "tie_word_embeddings": True}
    # And as later ones have them.
    others |= {"draft_vocab_size": 97, "target_hidden_size": 64, "is_neox_style": True}
    del released["rope_parameters"], released["is_causal"]
    shape = shape_for(file=released | others | {"rope_theta": 1000000})
    assert shape.intermediate_size == 48
    assert shape.block_size == 4
    assert shape.rope_theta == 1e6


def test_layers_left_open(shape_for):
    given = shape_for(file={"dflash_config": {"target_layer_ids": None}})
    assert given.target_layer_ids == shape_for().target_layer_ids


def test_causality_in_the_other_place(shape_for):
    assert shape_for(file={"dflash_config": {"causal": True}}).layer_causal == (True,) * 5


@pytest.mark.parametrize(
    ("file", "wishes", "words"),
    [
        ({"num_layers": 3}, {}, "num_layers"),
        ({"layer_types": ["sliding_attention"] * 5}, {}, "sliding_window"),
        (
            {
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 64,
            },
            {"draft_layers": 3},
            "--draft-layers 3",
        ),
        ({"num_key_value_heads": 3}, {}, "num_attention_heads"),
        ({"num_attention_heads": "4"}, {}, "num_attention_heads of the drafter: '4' given"),
        ({"head_dim": 15}, {}, "head_dim"),
        ({"block_size": 65}, {}, "block_size of the drafter: 65 given, 2 to 64 allowed"),
        ({"sliding_window": 32}, {}, "sets sliding_window to 32, but"),
        ({"hidden_act": "gelu"}, {}, "hidden_act of the drafter: 'gelu' given; allowed is 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "lack original_max_posit"),
        ({"dflash_config": {"gamma": 3}}, {}, "sets gamma to 3"),
        ({"dflash_config": 3}, {}, "dflash_config is no JSON object"),
        ({"dflash_config": {"mask_token_id": "<m>"}}, {}, "mask_token_id of the drafter: '<m>' g"),
        ({"dflash_config": {"mask_token_id": 96.5}}, {}, "a whole number is needed"),
        ({"dflash_config": {"target_layer_ids": 3}}, {}, "a list of whole numbers is needed"),
        ({"dflash_config": {"output_multiplier": -1}}, {}, "output_multiplier of the drafter: -1"),
        ({"layer_types": "full_attention"}, {}, "a list of names is needed"),
        ({"sliding_window": "64"}, {}, "sliding_window of the drafter: '64' given"),
        ({"rope_theta": "x"}, {}, "a number above 0 is needed"),
        ({"rope_theta": 0}, {}, "rope_theta of the drafter: 0.0 given"),
        ({"rope_parameters": "x"}, {}, "an object is needed"),
        ({"rms_norm_eps": float("nan")}, {}, "rms_norm_eps of the drafter: nan given"),
        ({"is_causal": "no"}, {}, "true or false is needed"),
    ],
    ids=[
        "unknown",
        "no-window",
        "layers",
        "heads",
        "text",
        "odd",
        "block",
        "window-alone",
        "activation",
        "scaled-rope",
        "unknown-inside",
        "inside",
        "mask-text",
        "mask-fraction",
        "layer-number",
        "negative-scale",
        "types-text",
        "window-text",
        "rope-text",
        "rope-zero",
        "rope-object",
        "eps-nan",
        "causal-text",
    ],
)
def test_files_that_are_refused(shape_for, file, wishes, words):
    with pytest.raises(BadInput, match=words):
        shape_for(file=file, **wishes)


def test_a_target_that_lacks_a_key_says_so(shape_for):
    with pytest.raises(BadInput, match="--draft-config"):
        shape_for({"intermediate_size": None})


def test_a_stored_head_counts_whatever_the_config_says(corpus_maker, tmp_path):
    corpus = corpus_maker()
    tensors = load(corpus.target_files["tensors.safetensors"])
    tensors["lm_head.weight"] = 2 * tensors["embed_tokens.weight"]
    corpus.target_files["tensors.safetensors"] = save(tensors)
    assert json.loads(corpus.target_files["config.json"])["tie_word_embeddings"] is True
    corpus.write(tmp_path / "store")
    head = load_target_head(open_cache(str(tmp_path / "store")))
    assert torch.equal(head.weight, 2 * head.embed)


def test_a_head_of_its_own(small_store):
    cache = open_cache(small_store[0])
    head = load_target_head(cache)
    assert head.weight is head.embed
    assert (head.logit_scale, head.softcap, head.embedding_scale) == (1.0, None, 1.0)
    moved = head.to("cpu", torch.float64)
    assert moved.weight is moved.embed
    assert moved.embed.dtype == torch.float64
    untied = TargetHead(embed=torch.ones(3, 2), weight=torch.zeros(3, 2), embedding_scale=2.0)
    assert untied.to("cpu", torch.float64).weight.sum() == 0
    assert untied.embeddings(torch.tensor([1])).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("file", "dtype", "message"),
    [
        ({"head_dim": 80}, torch.bfloat16, "head_dim of the drafter: 80 given; .* 64, 96, 128"),
        ({"head_dim": 256}, torch.float32, "in float32 a GPU takes 64, 96, 128; train"),
        ({"num_attention_heads": 32, "num_key_value_heads": 1}, torch.bfloat16, "at most 16"),
    ],
)
def test_what_a_gpu_has_no_kernel_for(shape_for, file, dtype, message):
    check_kernels(shape_for(file={"head_dim": 128, "num_attention_heads": 32}), dtype)
    with pytest.raises(BadInput, match=message):
        check_kernels(shape_for(file={"head_dim": 64} | file), dtype)
