"""Training steps of the DFlash trainers of SpecForge and speculators, on given weights and data.

Each peer runs its own model, loss and optimiser. Weights, states, head and anchors are ours, so its
loss can be compared; the batch lies on the device already, and nothing is drawn in the step.
Otherwise the settings are the ones its documentation gives for DFlash, and where it leaves a choice
there is a contender for each.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from step_shapes import DEVICE, DTYPE, LR, random_drafter
from torch import Tensor, nn
from transformers import Qwen3Config

from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.target_head import TargetHead

# Neither FlexAttention's backward nor speculators' fused loss runs on a CPU.
_HAS_FLEX = DEVICE.type == "cuda"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all train on: D documents of L tokens, all supervised, with A anchors each."""

    shape: DrafterConfig
    head: TargetHead
    tokens: np.ndarray  # int32 [D, L]
    states: Tensor  # bfloat16 [K, D * L, H], on the CPU
    anchors: np.ndarray  # int64 [D, A], ascending; every block ends inside its document
    gamma: float

    @property
    def num_rows(self) -> int:
        """Supervised rows of a step."""
        return self.anchors.size * (self.shape.block_size - 1)

    def weights(self) -> dict[str, Tensor]:
        """Draw the drafter's weights, fp32 on the device, such as bfloat16 holds exactly."""
        drawn = random_drafter(self.shape).state_dict()
        return {name: each.bfloat16().float() for name, each in drawn.items()}

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return tokens [D, L] and states [D, L, K * H], on the device."""
        layers, _, hidden = self.states.shape
        rows = self.states.to(DEVICE, DTYPE).transpose(0, 1).reshape(-1, layers * hidden)
        return torch.from_numpy(self.tokens).to(DEVICE).long(), rows.view(*self.tokens.shape, -1)


@dataclass(frozen=True)
class Contender:
    """A step to time; it returns the weighted sum of the rows' cross-entropies."""

    name: str
    step: Callable[[], Tensor]


def specforge(case: Case, *, whole: bool, chunk: int, liger: bool) -> Contender:
    """SpecForge's DFlash step, FlexAttention compiled by transformers as in its recipes.

    Args:
        whole: with `BF16Optimizer`, AdamW on fp32 masters of bf16 weights; else no optimiser.
        chunk: `training.objective_chunk_blocks`, 128 by default; 0 keeps all logits.
        liger: `model.use_liger_kernel`.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels
    from specforge.optimizer import BF16Optimizer

    config = _qwen3(case.shape)
    config.num_target_layers = case.shape.num_target_layers
    config.block_size = case.shape.block_size
    config.dflash_config = {
        "mask_token_id": case.shape.mask_token_id,
        "target_layer_ids": list(case.shape.target_layer_ids),
    }
    config._attn_implementation = "flex_attention" if _HAS_FLEX else "sdpa"
    kernels = load_liger_dflash_kernels() if liger else None
    with torch.device(DEVICE), _default_dtype(DTYPE):
        draft = DFlashDraftModel(config, kernels)
    _fill(draft, case.weights())
    online = OnlineDFlashModel(
        draft,
        _linear(case.head.weight),
        nn.Embedding(*case.head.embed.shape, _weight=case.head.embed, _freeze=True),
        mask_token_id=case.shape.mask_token_id,
        block_size=case.shape.block_size,
        attention_backend=config._attn_implementation,
        num_anchors=case.anchors.shape[1],
        loss_decay_gamma=case.gamma,
        objective_chunk_blocks=chunk,
    ).train()
    anchors = torch.from_numpy(case.anchors).to(DEVICE)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    online._sample_anchor_positions = lambda *_: (anchors, keep)
    optimizer = BF16Optimizer(draft, LR, max_grad_norm=1.0) if whole else None
    tokens, states = case.batch()
    mask = torch.ones(tokens.shape, device=DEVICE)

    def step() -> Tensor:
        _drop_gradients(draft)
        loss, _, metrics = online(tokens, states, mask)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return metrics["loss_terms"][0].detach()

    return Contender(f"SpecForge, chunk {chunk}{', Liger' if liger else ''}", step)


def speculators(case: Case, *, whole: bool, fused: bool) -> Contender:
    """The DFlash step of speculators, its forward compiled, on one packed row.

    Its labels are its target's best tokens: the states that it gets for them are the rows of the
    head of the tokens wanted, which no other token scores higher. Its fused loss does not compile
    inside the graph on torch 2.11, so it runs between two graphs, as it is.

    Args:
        whole: fp32 weights under autocast, and AdamW on them, as its trainer; else bf16 weights
            and no optimiser. The frozen heads are bf16 either way, as autocast makes them.
        fused: `--loss-implementation fused`, the default; else eager, compiled with the rest.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig, core

    config = _qwen3(case.shape)
    config._attn_implementation = "simple_flex_attention" if _HAS_FLEX else "sdpa"
    with torch.device(DEVICE), _default_dtype(torch.float32 if whole else DTYPE):
        model = core.DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=case.shape.vocab_size,
                block_size=case.shape.block_size,
                # Numbered from the embedding's output on.
                aux_hidden_state_layer_ids=[each + 1 for each in case.shape.target_layer_ids],
                mask_token_id=case.shape.mask_token_id,
            )
        )
    frozen = {"verifier_norm.weight": torch.ones(case.shape.hidden_size)}
    model.embed_tokens = nn.Embedding(
        *case.head.embed.shape,
        _weight=case.head.embed.to(model.embed_tokens.weight.dtype),
        _freeze=True,
    )
    model.lm_head = model.verifier_lm_head = _linear(case.head.weight)
    _fill(model, case.weights() | frozen)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR) if whole else None
    given, autocast = _packed_row(case), whole and DTYPE is torch.bfloat16
    loss_config = resolve_loss_config("ce", "fused" if fused and _HAS_FLEX else "eager")
    if fused:
        loss, weight = loss_config["ce"]
        loss_config = {"ce": (torch.compiler.disable(loss), weight)}
    chosen = torch.from_numpy(_anchors_of_row(case)).to(DEVICE)
    valid = torch.ones_like(chosen, dtype=torch.bool)
    core.select_anchors = lambda *_: (chosen, valid)

    def step() -> Tensor:
        _drop_gradients(model)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            _, loss, _ = model(
                **given, loss_config=loss_config, gamma=case.gamma, max_anchors=len(chosen)
            )
        loss.backward()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        # It divides by the number of rows.
        return loss.detach() * case.num_rows

    return Contender(f"speculators, {'fused' if fused else 'eager'} loss", step)


# What a run can choose from; each takes a case and `whole`.
PEERS = {
    "specforge": partial(specforge, chunk=128, liger=False),
    "specforge-liger": partial(specforge, chunk=128, liger=True),
    "specforge-liger-logits": partial(specforge, chunk=0, liger=True),
    "speculators": partial(speculators, fused=True),
    "speculators-eager": partial(speculators, fused=False),
}


def _packed_row(case: Case) -> dict[str, Tensor]:
    """Return what speculators' collator gives: all documents in one row."""
    tokens, states = case.batch()
    documents, length = tokens.shape
    following = tokens.flatten().roll(-1)
    numbers = torch.arange(documents * length, device=DEVICE)
    return {
        "hidden_states": states.view(1, documents * length, -1),
        "input_ids": tokens.view(1, -1),
        "loss_mask": torch.ones(1, documents * length, device=DEVICE),
        "verifier_last_hidden_states": case.head.weight[following][None],
        "document_ids": (numbers // length)[None],
        "position_ids": (numbers % length)[None],
    }


def _anchors_of_row(case: Case) -> np.ndarray:
    documents, length = case.tokens.shape
    return (case.anchors + length * np.arange(documents)[:, None]).ravel()


def _qwen3(shape: DrafterConfig) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        layer_types=["full_attention"] * shape.num_hidden_layers,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


def _linear(weight: Tensor) -> nn.Linear:
    """Wrap a frozen head without a copy."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into parameters of the same names, which must be all that train."""
    named = dict(model.named_parameters())
    missing = {name for name, each in named.items() if each.requires_grad} - set(weights)
    assert not missing, f"no weights for {sorted(missing)}"
    with torch.no_grad():
        for name, value in weights.items():
            named[name].copy_(value)


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
