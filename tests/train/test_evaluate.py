"""Acceptance on a store: as counted block by block, and as real decoding gains it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_offline.common.cache import Document, open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask, supervised
from dflash_offline.common.target import load_target
from dflash_offline.train.anchors import AnchoredDocument, build_pass, candidates
from dflash_offline.train.decode import SpeculativeDecoder, decode_greedy
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.evaluate import (
    AnchoredSample,
    BlockJudge,
    CacheEvaluation,
    SourceCounts,
    evaluate_cache,
    merge,
)

BLOCK, VOCAB = 5, 97


def drafter_config(hidden: int = 64, **changes) -> DrafterConfig:
    values = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "initializer_range": 0.2,
    }
    return DrafterConfig(**values | changes)


def drafted_tokens(drafter: Drafter, embed, document: Document, anchor: int, token: int):
    """Draft one block as in serving: one cache, the features before the anchor, one block."""
    config = drafter.config
    features = document.features_torch()[:, :anchor].transpose(0, 1).flatten(1).float()
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = token
    scaled = embed[ids] * config.input_embedding_scale
    hidden = drafter.draft(drafter.new_cache(), features, scaled, anchor)
    return (hidden[config.layout.first_slot :] @ embed.T).argmax(dim=-1).tolist()


def rewrite(drafter: Drafter, embed, document: Document, tokens: np.ndarray, seed: int) -> None:
    """Make a text in which the drafter is right for a random number of tokens at a time."""
    rng = np.random.default_rng(seed)
    anchor = 8
    while anchor + BLOCK < len(tokens):
        drafted = drafted_tokens(drafter, embed, document, anchor, int(tokens[anchor]))
        right = int(rng.integers(0, len(drafted) + 1))
        tokens[anchor + 1 : anchor + 1 + right] = drafted[:right]
        anchor += right + 1


def expected_gains(drafter, embed, document: Document, rule: str) -> tuple[list, list, list]:
    """Count block by block, with nothing shared between blocks."""
    mask = supervised(document.loss_mask, rule)
    produced, accepted, reach = [], [], []
    for anchor in candidates(mask):
        drafted = drafted_tokens(drafter, embed, document, anchor, int(document.tokens[anchor]))
        right = 0
        text = [
            int(token) if allowed else None
            for token, allowed in zip(document.tokens, mask, strict=True)
        ][anchor + 1 :]
        left = text.index(None) if None in text else len(text)
        while right < len(drafted) and right < left and drafted[right] == text[right]:
            right += 1
        accepted.append(right)
        produced.append(min(right + 1, left))
        reach.append(min(left, len(drafted)))
    return produced, accepted, reach


@pytest.fixture
def store(tmp_path: Path, corpus_maker):
    """Three held-out samples whose texts agree with the drafter here and there."""
    corpus = corpus_maker(lengths=(40, 33, 70, 64, 51), num_held_out=3)
    embed = torch.from_numpy(np.random.default_rng(1).standard_normal((VOCAB, 64), np.float32))
    drafter = Drafter(drafter_config(input_embedding_scale=0.5)).initialise(0)
    for index in (2, 3, 4):
        document = Document(
            index=index,
            id=str(index),
            source="test",
            tokens=corpus.tokens[index],
            loss_mask=corpus.masks[index],
            features=corpus.features[index],
            final=None,
        )
        with torch.no_grad():
            rewrite(drafter, embed, document, corpus.tokens[index], index)
    # A user turn and one token in the middle, and template tokens that end the text early.
    corpus.masks[3][30:37] = 0
    corpus.masks[2][40] = 0
    corpus.masks[4][-4:] |= LossMask.TEMPLATE
    corpus.write(tmp_path / "store")
    return open_cache(str(tmp_path / "store")), drafter, embed


@pytest.mark.parametrize("rows_per_pass", [1, 50, 300, 10**6])
def test_evaluate_cache(store, monkeypatch, rows_per_pass: int) -> None:
    cache, drafter, embed = store
    sizes = []
    plain = BlockJudge.run

    def run(self, parts):
        sizes.append(sum(len(part.anchored.anchors) for part in parts) * BLOCK)
        return plain(self, parts)

    monkeypatch.setattr(BlockJudge, "run", run)
    result = evaluate_cache(drafter, cache, embed=embed, head=embed, rows_per_pass=rows_per_pass)
    assert max(sizes) <= max(rows_per_pass, BLOCK)
    produced, accepted, reach = [], [], []
    with torch.no_grad():
        for document in cache.read_many(cache.held_out_samples):
            more = expected_gains(drafter, embed, document, "all")
            produced += more[0]
            accepted += more[1]
            reach += more[2]
    assert max(accepted) == BLOCK - 1
    assert len(set(accepted)) == BLOCK
    assert result.num_anchors == len(produced) > 140
    assert result.acceptance_length == pytest.approx(np.mean(produced))
    assert result.by_source == {"test": pytest.approx(np.mean(produced))}
    # The first slot is judged at every anchor, the others where the text goes on that far.
    shares = result.accepted_by_position
    for slot, share in enumerate(shares):
        judged = np.array(reach) > slot
        assert share == pytest.approx(np.mean(np.array(accepted)[judged] > slot))
    assert len(shares) == BLOCK - 1
    assert all(0 < share < 1 for share in shares)


def test_max_anchors_and_merge(store) -> None:
    cache, drafter, embed = store
    whole = evaluate_cache(drafter, cache, embed=embed, head=embed)
    some = evaluate_cache(drafter, cache, embed=embed, head=embed, max_anchors=10)
    assert some.num_anchors == 30
    again = evaluate_cache(drafter, cache, embed=embed, head=embed, max_anchors=10)
    assert again.acceptance_length == some.acceptance_length
    parts = [
        evaluate_cache(drafter, cache, embed=embed, head=embed, samples=[index])
        for index in cache.held_out_samples
    ]
    merged = merge(parts)
    assert merged.num_anchors == whole.num_anchors
    assert merged.acceptance_length == pytest.approx(whole.acceptance_length)
    assert merged.accepted_by_position == pytest.approx(whole.accepted_by_position)


def test_the_whole_is_the_mean_over_blocks_not_over_sources() -> None:
    def part(source: str, blocks: int, produced: int, judged: int) -> CacheEvaluation:
        counts = SourceCounts(
            num_anchors=blocks,
            produced=produced,
            judged=np.array([blocks, judged]),
            accepted=np.array([blocks, judged // 2]),
        )
        return CacheEvaluation(counts={source: counts})

    whole = merge([part("a", 10, 30, 8), part("b", 6, 6, 0), part("a", 4, 4, 2)])
    assert whole.num_anchors == 20
    assert whole.acceptance_length == 2.0
    assert whole.by_source == {"a": 34 / 14, "b": 1.0}
    assert whole.accepted_by_position == [1.0, 0.5]


def test_few_anchors_of_long_samples_do_not_add_up(store, monkeypatch) -> None:
    cache, drafter, embed = store
    given = {"embed": embed, "head": embed, "max_anchors": 1}
    whole = evaluate_cache(drafter, cache, **given)
    contexts = []
    plain = BlockJudge.run

    def run(self, parts):
        contexts.append([part.anchored.num_context for part in parts])
        return plain(self, parts)

    monkeypatch.setattr(BlockJudge, "run", run)
    rows = 3 * BLOCK  # of all samples together
    limited = evaluate_cache(drafter, cache, rows_per_pass=rows, **given)
    assert sum(map(sum, contexts)) > 4 * rows
    assert max(map(sum, contexts)) <= 4 * rows
    assert limited.counts.keys() == whole.counts.keys()
    assert limited.acceptance_length == whole.acceptance_length


def test_training_samples_are_never_touched(store) -> None:
    cache, drafter, embed = store
    read = []
    plain = cache.read_many
    cache.read_many = lambda indices, layers: read.extend(indices) or plain(indices, layers)
    evaluate_cache(drafter, cache, embed=embed, head=embed)
    assert sorted(read) == cache.held_out_samples
    assert not set(read) & set(cache.training_samples)


def test_nothing_to_evaluate(tmp_path: Path, corpus_maker) -> None:
    corpus_maker(num_held_out=0).write(tmp_path / "store")
    cache = open_cache(str(tmp_path / "store"))
    drafter = Drafter(drafter_config()).initialise(0)
    embed = torch.zeros(VOCAB, 64)
    with pytest.raises(BadInput, match="--holdout"):
        evaluate_cache(drafter, cache, embed=embed, head=embed)


def greedy_documents(target, prompts, limit: int) -> list[Document]:
    """Texts that the target writes itself, with its states in fp32."""
    documents = []
    for prompt in prompts:
        text = prompt + decode_greedy(target, prompt, max_new_tokens=limit).tokens
        with torch.inference_mode():
            states = target.causal(torch.tensor([text]), output_hidden_states=True).hidden_states
        features = torch.stack([states[i + 1][0] for i in (1, 3)]).clone()  # [K, T, H]
        mask = np.full(len(text), LossMask.ASSISTANT, np.uint8)
        mask[: len(prompt)] = 0
        documents.append(
            SimpleNamespace(
                source="test",
                tokens=np.array(text, np.int32),
                loss_mask=mask,
                features_torch=lambda features=features: features,
            )
        )
    return documents


def sample_of(document, anchors) -> AnchoredSample:
    anchored = AnchoredDocument(
        tokens=document.tokens,
        supervised=supervised(document.loss_mask),
        anchors=np.asarray(anchors, np.int64),
    )
    return AnchoredSample(document=document, anchored=anchored)


def train_a_little(drafter: Drafter, documents, embed: torch.Tensor, steps: int) -> None:
    parts = [sample_of(d, candidates(supervised(d.loss_mask))) for d in documents]
    tables = build_pass([part.anchored for part in parts], drafter.config.layout)
    features = torch.cat(
        [
            part.document.features_torch()[:, : part.anchored.num_context]
            .transpose(0, 1)
            .flatten(1)
            for part in parts
        ]
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        hidden = drafter(features, embed[tables.block_tokens], tables)
        rows = tables.label_rows
        F.cross_entropy(hidden[rows] @ embed.T, tables.labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("sample_from_anchor", [False, True], ids=["1+N", "anchor_first"])
def test_agrees_with_real_decoding(sample_from_anchor: bool, tmp_path: Path) -> None:
    """At the anchors that decoding visits, cached evaluation counts what decoding gains."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=torch.float32, device="cpu", head=True)
    prompts = [[7, 3, i, 2 * i, 5] for i in range(1, 6)]
    limit = 20
    documents = greedy_documents(target, prompts, limit)
    embed = target.embed_weight().clone()
    drafter = Drafter(drafter_config(32, sample_from_anchor=sample_from_anchor)).initialise(0)
    train_a_little(drafter, documents[:3], embed, steps=25)

    judge = BlockJudge(drafter, embed, embed)
    gained, counted = [], []
    for prompt, document in zip(prompts, documents, strict=True):
        with SpeculativeDecoder(target, drafter) as decoder:
            decoded = decoder.decode(prompt, max_new_tokens=limit)
        assert prompt + decoded.tokens == document.tokens.tolist()
        gained += [cycle.produced for cycle in decoded.cycles]
        anchors = [cycle.anchor for cycle in decoded.cycles]
        counted += judge.run([sample_of(document, anchors)])[0].produced.tolist()
    assert gained == counted
    assert 1.5 < np.mean(gained) < BLOCK - 0.2
