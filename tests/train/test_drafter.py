"""What a block may see, training against serving, and both against a plain implementation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_offline.common.errors import BadInput
from dflash_offline.kernels.reference import rms_norm
from dflash_offline.train.anchors import build_pass
from dflash_offline.train.drafter import Drafter, Norm
from dflash_offline.train.stream import assemble

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
KINDS = {
    "full": {},
    "all-causal": {"layer_causal": (True, True)},
    "sliding-causal": {**SLIDING, "layer_causal": (True, False)},
    "all-sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6},
    "anchor-first": {"sample_from_anchor": True},
    # Other than the defaults of the functions that take them.
    "theta and epsilon": {"rope_theta": 700.0, "rms_norm_eps": 0.03},
    "slower angles": {"rope_scaling": (("factor", 4.0), ("rope_type", "linear"))},
}


def logits_of(toy, documents) -> torch.Tensor:
    """Return logits [A, B, V] of one pass."""
    given = toy.given(documents)
    hidden = toy.drafter(
        given.features, toy.head.embeddings(given.tables.block_tokens), given.tables
    )
    return (hidden @ toy.head.weight.T).view(given.tables.num_anchors, toy.layout.block_size, -1)


def plain_block(toy, features, tokens, anchor) -> torch.Tensor:
    """One block by the definition: dense masks, no shared code. Returns logits [B, V]."""
    config, size = toy.config, toy.config.block_size
    weights = {name: value.detach() for name, value in toy.drafter.state_dict().items()}
    ids = torch.full((size,), config.mask_token_id)
    ids[0] = int(tokens[anchor])
    x = toy.head.embed[ids]

    def norm(values, weight):
        root = values.pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
        return values / root * weight

    def rotate(values, positions):  # [R, heads, D]
        half = values.shape[-1] // 2
        # Angles are float32 in every implementation.
        inverse = 1.0 / config.rope_theta ** (torch.arange(half).float() / half)
        inverse = inverse / dict(config.rope_scaling).get("factor", 1.0)
        angles = positions.float()[:, None, None] * inverse
        cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
        a, b = values[..., :half], values[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    places = torch.arange(anchor + size)
    for layer in range(config.num_hidden_layers):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in weights.items()}
        y = norm(x, own["input_layernorm.weight"])
        both = torch.cat([context, y])
        heads = [
            (part @ own[f"self_attn.{kind}_proj.weight"].T).view(len(part), -1, config.head_dim)
            for kind, part in (("q", y), ("k", both), ("v", both))
        ]
        q = rotate(norm(heads[0], own["self_attn.q_norm.weight"]), places[anchor:])
        k = rotate(norm(heads[1], own["self_attn.k_norm.weight"]), places)
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = (part.repeat_interleave(group, 1) for part in (k, heads[2]))
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        distance = places[anchor:, None] - places[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if config.window(layer) is not None:
            visible &= distance < config.window(layer)
        if config.layer_causal[layer]:
            visible &= distance >= 0
        weighted = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weighted, v).flatten(1)
        x = x + attended @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate = F.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + gate @ own["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"]) @ toy.head.weight.T


def with_states(document, values: torch.Tensor):
    return replace(document, features=replace(document.features, values=values))


def token_major(document) -> torch.Tensor:
    return document.features.values.transpose(0, 1).flatten(1).double()


@pytest.mark.parametrize("kind", KINDS)
def test_pass_equals_the_definition(toy_maker, kind):
    toy = toy_maker(**KINDS[kind])
    documents = [toy.document(9, seed=1), toy.document(14, seed=2)]
    logits = logits_of(toy, documents)
    row = 0
    for document in documents:
        for anchor in document.anchored.anchors:
            expected = plain_block(
                toy, token_major(document), document.anchored.tokens, int(anchor)
            )
            torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)
            row += 1
    assert row == len(logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["fp64", "fp32"]
)
def test_training_equals_serving(toy_maker, kind, dtype, tolerance):
    toy = toy_maker(dtype, **KINDS[kind])
    document = toy.document(20, anchors=[3, 4, 8, 13, 18])
    logits = logits_of(toy, [toy.document(11, seed=5), document])[-5:]
    features = token_major(document).to(dtype)
    cache, done = toy.drafter.new_cache(), 0
    ids = torch.full((toy.layout.block_size,), toy.config.mask_token_id)
    for block, anchor in enumerate([3, 4, 8, 13, 18]):
        ids[0] = int(document.anchored.tokens[anchor])
        hidden = toy.drafter.draft(cache, features[done:anchor], toy.head.embeddings(ids), anchor)
        served = hidden @ toy.head.weight.T
        torch.testing.assert_close(served, logits[block], rtol=0, atol=tolerance)
        done = anchor
    assert cache.length == 18


@pytest.mark.parametrize("kind", ["full", "all-causal", "sliding-causal", "all-sliding"])
def test_short_blocks_near_the_end(toy_maker, kind):
    # The last block of an answer may be shorter; causal layers then draft the same tokens.
    toy = toy_maker(**KINDS[kind])
    document = toy.document(12, anchors=[9])
    features = token_major(document)[:9]
    ids = torch.full((4,), toy.config.mask_token_id)
    whole = toy.drafter.draft(toy.drafter.new_cache(), features, toy.head.embeddings(ids), 9)
    short = toy.drafter.draft(toy.drafter.new_cache(), features, toy.head.embeddings(ids[:2]), 9)
    same = torch.allclose(short, whole[:2], atol=1e-10)
    assert same == (kind == "all-causal")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_into_a_block(toy_maker, kind):
    toy = toy_maker(**KINDS[kind])
    anchors = [4, 7, 9]
    document = toy.document(16, anchors=anchors)
    other = toy.document(13, seed=9, anchors=[3, 8])
    base = logits_of(toy, [other, document])[2:]

    def block(number: int, documents) -> torch.Tensor:
        return logits_of(toy, documents)[2 + number]

    for number, anchor in enumerate(anchors):
        unseen = document.features.values.clone()
        unseen[:, anchor:] = torch.randn(unseen[:, anchor:].shape).bfloat16() * 9
        changed = with_states(document, unseen)
        assert torch.equal(block(number, [other, changed]), base[number]), (
            "features from the anchor"
        )

        tokens = document.anchored.tokens.copy()
        tokens[anchor + 1 :] = (tokens[anchor + 1 :] + 1) % 50
        # Other blocks' anchor tokens change with it, so this is a change to another block too.
        changed = replace(document, anchored=replace(document.anchored, tokens=tokens))
        assert torch.equal(block(number, [other, changed]), base[number]), "tokens after the anchor"

    elsewhere = replace(
        with_states(other, other.features.values * -3),
        anchored=replace(other.anchored, tokens=(other.anchored.tokens + 1) % 50),
    )
    assert torch.equal(logits_of(toy, [elsewhere, document])[2:], base), "another document"


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sees_what_it_must(toy_maker, kind):
    toy = toy_maker(**KINDS[kind])
    document = toy.document(16, anchors=[8])
    base = logits_of(toy, [document])[0]

    features = document.features.values.clone()
    features[:, 7] *= -1
    before = logits_of(toy, [with_states(document, features)])[0]
    assert (before - base).abs().amax(-1).min() > 1e-6, "every slot sees the features before"

    tokens = document.anchored.tokens.copy()
    tokens[8] = (tokens[8] + 1) % 50
    anchored = replace(document.anchored, tokens=tokens)
    token = logits_of(toy, [replace(document, anchored=anchored)])[0]
    assert (token - base).abs().amax(-1).min() > 1e-6, "every slot sees the anchor's token"


def test_context_is_projected_once_and_not_normed_per_layer(toy_maker):
    toy = toy_maker()
    document = toy.document(10, anchors=[6])
    base = logits_of(toy, [document])
    with torch.no_grad():
        # Features times a constant: `hidden_norm` removes the scale before any layer.
        scaled = with_states(document, document.features.values * 4)
        torch.testing.assert_close(logits_of(toy, [scaled]), base, rtol=0, atol=1e-5)
        toy.drafter.hidden_norm.weight.mul_(0.25)
        assert (logits_of(toy, [document]) - base).abs().max() > 1e-4


def test_no_anchors_give_no_rows(toy_maker):
    toy = toy_maker()
    tables = build_pass([toy.document(5, anchors=[]).anchored], toy.layout)
    hidden = toy.drafter(torch.empty(0, 64).double(), torch.empty(0, 32).double(), tables)
    assert hidden.shape == (0, 32)


def test_initialisation_is_a_function_of_the_seed(config_maker):
    first, again, other = (Drafter(config_maker()).initialise(seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c), name
        if a.dim() == 1:
            assert bool((a == 1).all()), name
        else:
            assert float(a.detach().std()) == pytest.approx(0.2, rel=0.1), name


def test_parameters_may_be_wider_than_the_states(toy_maker):
    # fp32 masters and bfloat16 passes: gradients arrive in fp32.
    toy = toy_maker(torch.float32)
    given = assemble([toy.document(10)], toy.options()).to(torch.device("cpu"), torch.bfloat16)
    embeddings = toy.head.to("cpu", torch.bfloat16).embeddings(given.tables.block_tokens)
    hidden = toy.drafter(given.features, embeddings, given.tables)
    assert hidden.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert {p.grad.dtype for p in toy.drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("is_master", [True, False], ids=["fp32 master", "gathered in bfloat16"])
def test_gradients_of_norms_are_not_rounded(is_master):
    torch.manual_seed(0)
    norm = Norm(32, 1e-6)
    torch.nn.init.normal_(norm.weight)
    if not is_master:  # as while a layer of slices runs
        norm = norm.bfloat16()
        norm.weight.grad_dtype = torch.float32
    x, upstream = (torch.randn(37, 32).bfloat16() for _ in range(2))
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rms_norm(x, norm.weight.detach().bfloat16(), 1e-6))
    with torch.no_grad():
        assert torch.equal(out, norm(x)), "trains with the weights that serve"
    out.backward(upstream)
    wide = x.double()
    unit = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = (upstream.double() * unit).sum(0)
    torch.testing.assert_close(norm.weight.grad.double(), exact, rtol=1e-5, atol=1e-5)
    assert (exact.bfloat16() - exact).abs().max() > 1e-3, "the bound above would let rounding pass"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_causal": (True, False)}, "causality"),
        ({**SLIDING, "layer_causal": (False, True)}, "causality"),
        ({**SLIDING, "sliding_window": 3}, "sliding_window"),
        ({**SLIDING, "sliding_window": None}, "sliding_window"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention", "linear_attention")}, "layer_types"),
    ],
    ids=str,
)
def test_shapes_that_are_refused(config_maker, changes, word):
    with pytest.raises(BadInput, match=word):
        config_maker(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"layer_causal": (True, True)}, True),
        ({**SLIDING, "layer_causal": (True, False)}, None),
        ({**SLIDING, "layer_causal": (False, False)}, False),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}, False),
    ],
    ids=str,
)
def test_is_causal_says_what_was_trained(config_maker, changes, expected):
    config = config_maker(**changes)
    assert config.is_causal is expected
    assert ("is_causal" in config.to_json()) == (expected is not None)
    # What engines resolve from the file: the key for all layers, else sliding layers causal.
    written = config.to_json().get("is_causal")
    resolved = tuple(
        kind == "sliding_attention" if written is None else written
        for kind in config.to_json()["layer_types"]
    )
    assert resolved == config.layer_causal
    assert np.all(type(config).from_json(config.to_json()).layer_causal == config.layer_causal)


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        (True, False, (True, True)),
        (False, True, (False, False)),
        (None, True, (True, True)),
        (None, False, (False, False)),
        (None, None, (True, False)),
    ],
)
def test_is_causal_at_the_top_counts_before_dflash_config(config_maker, top, nested, expected):
    written = config_maker(**SLIDING).to_json()
    written["is_causal"] = top
    written["dflash_config"]["causal"] = nested
    assert type(config_maker()).from_json(written).layer_causal == expected
