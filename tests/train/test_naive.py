"""Training and decoding against the algorithm written out: plain zarr, dense masks, float64.

Nothing of the package takes part in what is expected. Every sample is in every step, with an anchor
wherever one may stand, so that neither order nor drawing matters. Letters: T tokens, A anchors,
B block size, K captured layers, H hidden, V vocabulary, C = T + A*B keys.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from safetensors.numpy import save
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_offline.common.target import load_target
from dflash_offline.train.decode import SpeculativeDecoder
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_offline.train.export import load_drafter, save_weights
from dflash_offline.train.loop import train

Weights = dict[str, Tensor]
LENGTHS = (24, 31, 18, 27, 22, 20)
LAYERS = {
    "full": {},
    "anchor_first": {"sample_from_anchor": True},
    "causal": {"layer_causal": (True, True)},
    "causal_window_and_full": {
        "layer_types": (SLIDING, FULL),
        "layer_causal": (True, False),
        "sliding_window": 6,
    },
    "window": {"layer_types": (SLIDING, SLIDING), "sliding_window": 4},
}
# Assistant, end of turn, last turn, reasoning, supplied by the template.
ASSISTANT, END, LAST, REASONING, TEMPLATE = 1, 2, 4, 8, 16
LR, STEPS, WARMUP, CLIP, DECAY, EMA = 2e-3, 3, 0.5, 0.05, 0.1, 0.8


def drafter_config(**changes) -> DrafterConfig:
    values = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "rope_theta": 1e4,
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
    }
    return DrafterConfig(**values | changes)


def write_drafter(folder: Path, **changes) -> tuple[Weights, dict]:
    """Write a drafter of random weights; return them in float64, and its config.json."""
    config = drafter_config(**changes)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: 0.12 * torch.randn(each.shape, generator=generator) + (each.dim() == 1)
        for name, each in Drafter(config).state_dict().items()
    }
    save_weights(config, weights, folder, torch.float32)
    written = {name: each.double() for name, each in weights.items()}
    return written, json.loads((folder / "config.json").read_text())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions on [n, heads, head_dim]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions[:, None] * rates)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible(config: dict, layer: int, length: int, anchors: Tensor) -> Tensor:
    """Return which keys [A*B, C] the slots of blocks see."""
    size = config["block_size"]
    block = torch.arange(len(anchors)).repeat_interleave(size)
    slot = torch.arange(size).repeat(len(anchors))
    anchor = anchors[block][:, None]
    own = block[:, None] == block[None]
    context = (torch.arange(length)[None] < anchor).expand(len(block), length)
    sliding = config["layer_types"][layer] == SLIDING
    if config.get("is_causal", sliding):
        own = own & (slot[None] <= slot[:, None])
    if sliding:
        distance = anchor + slot[:, None] - torch.arange(length)[None]
        context = context & (distance < config["sliding_window"])
    return torch.cat([context, own], dim=1)


def blocks(
    weights: Weights, config: dict, embed: Tensor, states: Tensor, tokens: Tensor, anchors: Tensor
) -> Tensor:
    """Return the final states [A, B, H] of blocks in one document with `states` [K, T, H]."""
    size, dim, theta = config["block_size"], config["head_dim"], config["rope_theta"]
    ids = torch.full((len(anchors), size), config["dflash_config"]["mask_token_id"])
    ids[:, 0] = tokens[anchors]
    context = rms(
        torch.cat(list(states), -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"]
    )
    positions = (anchors[:, None] + torch.arange(size)).flatten()
    all_positions = torch.cat([torch.arange(len(tokens)), positions])
    hidden = embed[ids.flatten()]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): each
            for name, each in weights.items()
        }
        x = rms(hidden, own["input_layernorm"])
        both = torch.cat([context, x])
        q = (x @ own["self_attn.q_proj"].T).unflatten(-1, (-1, dim))
        k = (both @ own["self_attn.k_proj"].T).unflatten(-1, (-1, dim))
        v = (both @ own["self_attn.v_proj"].T).unflatten(-1, (-1, dim))
        q = turned(rms(q, own["self_attn.q_norm"]), positions, theta)
        k = turned(rms(k, own["self_attn.k_norm"]), all_positions, theta)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        seen = visible(config, layer, len(tokens), anchors)
        chances = scores.masked_fill(~seen, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", chances, v).flatten(1)
        hidden = hidden + mixed @ own["self_attn.o_proj"].T
        x = rms(hidden, own["post_attention_layernorm"])
        gate = torch.nn.functional.silu(x @ own["mlp.gate_proj"].T)
        hidden = hidden + (gate * (x @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return rms(hidden, weights["norm.weight"]).unflatten(0, (-1, size))


@dataclasses.dataclass
class Text:
    """A sample as plain zarr reads it."""

    tokens: Tensor  # [T]
    labelled: list[bool]  # [T]
    states: Tensor  # [K, T, H]
    final: Tensor  # [T, H]

    @property
    def anchors(self) -> Tensor:
        both = zip(self.labelled, self.labelled[1:], strict=False)
        return torch.tensor([i for i, pair in enumerate(both) if all(pair)])


def read_texts(folder: Path) -> list[Text]:
    """Read all samples in the order of the plan."""
    store = zarr.open_group(str(folder), mode="r")

    def wide(bits: np.ndarray) -> Tensor:
        return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32)).double()

    found = {}
    for path in (folder / "commit").glob("[0-9]*.json"):
        record = json.loads(path.read_text())
        for sample, start, length in record["samples"]:
            pack, rows = record["pack"], slice(start, start + length)
            mask = store["loss_mask"][pack, rows]
            found[sample] = Text(
                tokens=torch.from_numpy(store["tokens"][pack, rows]).long(),
                labelled=[bool(m & (ASSISTANT | END)) and not m & TEMPLATE for m in mask],
                states=wide(store["features"][pack, :, rows]),
                final=wide(store["final"][pack, rows]),
            )
    return [found[sample] for sample in sorted(found)]


def slot_losses(logits: Tensor, teacher: Tensor, label: int, terms: dict[str, float]) -> Tensor:
    """Return the weighted sum of terms for one slot from logits [V] of drafter and target."""
    draft, target = logits.log_softmax(-1), teacher.log_softmax(-1)
    p, q = target.exp(), draft.exp()
    values = {
        "ce": -draft[label],
        "kl": (p * (target - draft)).sum(),
        "rkl": (q * (draft - target)).sum(),
        "tv": (p - q).abs().sum() / 2,
    }
    return sum(factor * values[name] for name, factor in terms.items())


def slot_weights(kind: str, number: float, nll: list[float | None]) -> list[float]:
    """Return the weights of a block's slots; None stands for a slot without a label."""
    if kind == "decay":
        return [0.0 if x is None else math.exp(-j / number) for j, x in enumerate(nll)]
    reached, chance = [], 1.0
    for x in nll:
        chance *= 1.0 if x is None else (1 - number) * math.exp(-x) + number
        reached.append(0.0 if x is None else chance)
    return [0.0 if x is None else sum(reached[j:]) for j, x in enumerate(nll)]


def step_sums(
    weights: Weights, config: dict, texts: list[Text], tables: Weights, loss: tuple
) -> tuple[Tensor, float, float, float]:
    """Return weighted loss, weights, and acceptance without and with the end of the text."""
    kind, number, terms = loss
    head = tables.get("lm_head.weight", tables["embed_tokens.weight"]).double()
    ahead = int(config["dflash_config"]["sample_from_anchor"])
    total, weight, gained, capped = torch.zeros((), dtype=torch.float64), 0.0, [], []
    for text in texts:
        embed, anchors = tables["embed_tokens.weight"].double(), text.anchors
        hidden = blocks(weights, config, embed, text.states, text.tokens, anchors)
        logits = hidden[:, 1 - ahead :] @ head.T
        for anchor, rows in zip(anchors.tolist(), logits, strict=True):
            places = [anchor + 1 + j for j in range(len(rows))]
            known = [place < len(text.tokens) and text.labelled[place] for place in places]
            labels = [int(text.tokens[p]) if k else -1 for p, k in zip(places, known, strict=True)]
            nll = [
                -float(row.detach().log_softmax(-1)[label]) if label >= 0 else None
                for row, label in zip(rows, labels, strict=True)
            ]
            factors = slot_weights(kind, number, nll)
            for row, place, label, factor in zip(rows, places, labels, factors, strict=True):
                if label >= 0:
                    teacher = text.final[place - 1] @ head.T
                    total = total + factor * slot_losses(row, teacher, label, terms)
            weight += sum(factors)
            right = [int(row.argmax()) == label for row, label in zip(rows, labels, strict=True)]
            gained.append(1 + [*right, False].index(False))
            left = [*text.labelled[anchor:], False].index(False) - 1
            capped.append(min(gained[-1], left))
    return total, weight, float(np.mean(gained)), float(np.mean(capped))


def trained(
    weights: Weights, config: dict, texts: list[Text], tables: Weights, loss: tuple
) -> tuple[Weights, Weights, list[float], list[float]]:
    """Run AdamW by hand; return weights, their running averages, losses and acceptances."""
    averages = {name: each.clone() for name, each in weights.items()}
    first = {name: torch.zeros_like(each) for name, each in weights.items()}
    second = {name: torch.zeros_like(each) for name, each in weights.items()}
    losses, gains = [], []
    for step in range(1, STEPS + 1):
        leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
        total, weight, gained, _ = step_sums(leaves, config, texts, tables, loss)
        (total / weight).backward()
        losses.append(float(total.detach()) / weight)
        gains.append(gained)
        gradients = {name: each.grad for name, each in leaves.items()}
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
        assert norm > CLIP, "nothing would be clipped"
        lr = LR * min(1.0, step / STEPS / WARMUP)
        kept = min(EMA, (1 + step) / (10 + step))
        for name, gradient in gradients.items():
            given = gradient * CLIP / norm
            first[name] = 0.9 * first[name] + 0.1 * given
            second[name] = 0.95 * second[name] + 0.05 * given.square()
            size = (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            decayed = weights[name] * (1 - lr * DECAY * (gradient.dim() == 2))
            weights[name] = decayed - lr * first[name] / (1 - 0.9**step) / size
            averages[name] = kept * averages[name] + (1 - kept) * weights[name]
    return weights, averages, losses, gains


def write_store(corpus, folder: Path) -> None:
    """Write samples of few words with gaps in what is supervised, inside and between turns."""
    rng = np.random.default_rng(1)
    masks = []
    for length in LENGTHS:
        mask = np.full(length, ASSISTANT, np.uint8)
        mask[:4] = mask[12:15] = 0
        mask[5:7] |= REASONING
        mask[9] |= TEMPLATE
        mask[11] = END
        mask[15:] |= LAST
        masks.append(mask)
    embed = 0.3 * rng.standard_normal((97, 64), np.float32)
    # Drafts are right now and then where the words that occur are the likely ones.
    embed[:3] *= 4
    tables = {"embed_tokens.weight": embed, "norm.weight": np.ones(64, np.float32)}
    corpus = dataclasses.replace(
        corpus,
        target_files=corpus.target_files | {"tensors.safetensors": save(tables)},
        masks=masks,
        tokens=[rng.integers(0, 3, length).astype(np.int32) for length in LENGTHS],
    )
    corpus.write(folder)


@pytest.mark.parametrize(
    ("layers", "option", "loss"),
    [
        ("full", "decay=2", ("decay", 2.0, {"ce": 1.0})),
        ("anchor_first", "dpace=0.3", ("dpace", 0.3, {"ce": 1.0})),
        ("causal", "dpace", ("dpace", 0.5, {"ce": 1.0})),
        ("causal_window_and_full", "decay,kl=0.5,ce=0.1", ("decay", 2.0, {"kl": 0.5, "ce": 0.1})),
        ("window", "decay=3,rkl=0.3,tv", ("decay", 3.0, {"rkl": 0.3, "tv": 1.0})),
    ],
)
def test_training(layers, option, loss, config, corpus_maker, tmp_path):
    """From the bytes of a store to weights after three steps, and the acceptance on the way."""
    write_store(corpus_maker(lengths=LENGTHS, teacher="final"), tmp_path / "store")
    weights, shape = write_drafter(tmp_path / "init", **LAYERS[layers])
    start = {name: each.clone() for name, each in weights.items()}
    options = {
        "init_from": tmp_path / "init",
        "draft_layers": None,
        "block_size": None,
        "mask_token_id": None,
        "num_anchors": 99,
        "samples_per_step": len(LENGTHS) - 1,
        "num_steps": STEPS,
        "lr": LR,
        "lr_schedule": "constant",
        "warmup": WARMUP,
        "clip": CLIP,
        "weight_decay": DECAY,
        "ema": EMA,
        "loss": option,
        "rows_per_pass": 64,
    }
    folder = train(config(tmp_path / "store", tmp_path / "run", **options))

    *texts, held_out = read_texts(tmp_path / "store")
    tables = load_file(tmp_path / "store/target/tensors.safetensors")
    _, averages, losses, gains = trained(weights, shape, texts, tables, loss)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    records = [record for record in log if record["kind"] == "train"]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert max(gains) > 1.05, "no draft would be right"
    assert [record["acceptance"] for record in records] == pytest.approx(gains)
    found = {name: each.double() for name, each in load_drafter(folder).state_dict().items()}
    moved = torch.cat([(averages[name] - start[name]).flatten() for name in start])
    wrong = torch.cat([(found[name] - averages[name]).flatten() for name in start])
    assert float(wrong.norm() / moved.norm()) < 1e-3
    accepted = step_sums(found, shape, [held_out], tables, loss)[3]
    assert log[-1]["acceptance_length"] == pytest.approx(accepted)


def test_decoding(tmp_path):
    """A drafter's cycles, from forwards over the whole text so far and no cache of any kind."""
    words, length = 5, 20
    torch.manual_seed(5)
    shape = {"vocab_size": words, "hidden_size": 64, "intermediate_size": 96}
    llama = LlamaConfig(
        **shape,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
    )
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "target")
    exact = LlamaForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64).eval()
    target = load_target(tmp_path / "target", dtype=torch.float32, device="cpu", head=True)
    embed, head = exact.get_input_embeddings().weight, exact.lm_head.weight
    accepted = set()
    for kind, layers in LAYERS.items():
        weights, config = write_drafter(
            tmp_path / kind, vocab_size=words, mask_token_id=words - 1, **layers
        )
        ahead = int(config["dflash_config"]["sample_from_anchor"])
        text = [0, 3, 1, 1, 4, 2]
        with SpeculativeDecoder(target, load_drafter(tmp_path / kind)) as decoder:
            decoded = decoder.decode(text, max_new_tokens=length)
        with torch.no_grad():
            for _ in range(length):
                text.append(int(exact(torch.tensor([text])).logits[0, -1].argmax()))
            assert decoded.tokens == text[-length:]
            ids = torch.tensor(text)
            output = exact(ids[None], output_hidden_states=True)
            states = torch.stack([output.hidden_states[i + 1][0] for i in (1, 3)])
            anchor, cycles = len(text) - length, []
            while anchor < len(text) - 1:
                before = states[:, :anchor], ids[: anchor + 1]
                # The state at the anchor does not exist yet.
                padded = torch.cat([before[0], torch.zeros_like(states[:, :1])], dim=1)
                slots = blocks(weights, config, embed, padded, before[1], torch.tensor([anchor]))
                drafts = (slots[0, 1 - ahead :] @ head.T).argmax(-1)[: len(text) - anchor - 2]
                right = (drafts == ids[anchor + 1 :][: len(drafts)]).tolist()
                good = [*right, False].index(False)
                cycles.append((anchor, len(drafts), good))
                anchor += good + 1
        assert [(c.anchor, c.proposed, c.accepted) for c in decoded.cycles] == cycles
        accepted |= {good for *_, good in cycles}
    assert len(accepted) > 2, "drafts of one length would hide faults"
