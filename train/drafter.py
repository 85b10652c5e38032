"""The DFlash drafter: a block-parallel Qwen3-style stack over a target's captured states.

Tensor names are z-lab's. The context enters once (`fc`, then `hidden_norm`) and only as keys and
values, through every layer's own `k_proj`, `v_proj` and `k_norm`; queries come from block rows.
Embedding and head belong to the target and are not part of the model.

Weights are cast to the dtype of the features inside the graph, so the same module trains bfloat16
passes on fp32 masters, with fp32 gradients, and serves in any dtype.

Letters: T context tokens, N block rows, B block size, K captured layers, H hidden.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dflash_offline.kernels.block_attention import BlockTables, block_attention, build_tables
from dflash_offline.kernels.norm_rope import norm_rope, rms_norm, swiglu_linear
from dflash_offline.train.anchors import PassTables
from dflash_offline.train.drafter_config import DrafterConfig


class Norm(nn.Module):
    """RMSNorm with a weight; statistics in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Linear(nn.Module):
    """Bias-free projection; the weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project the last dimension."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Block rows attend to the context before their anchor and to their own block."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, config.num_attention_heads * size)
        self.k_proj = Linear(hidden, config.num_key_value_heads * size)
        self.v_proj = Linear(hidden, config.num_key_value_heads * size)
        self.o_proj = Linear(config.num_attention_heads * size, hidden)
        self.q_norm = Norm(size, config.rms_norm_eps)
        self.k_norm = Norm(size, config.rms_norm_eps)
        self.head_dim = size
        self.theta = config.rope_theta
        self.window = config.window(layer)
        self.causal = config.layer_causal[layer]

    def keys(self, projected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Norm and rotate projected keys [R, Hkv·D] to [R, Hkv, D]."""
        return self._rotated(self._heads(projected), self.k_norm, positions)

    def values(self, projected: torch.Tensor) -> torch.Tensor:
        """View projected values [R, Hkv·D] as [R, Hkv, D]."""
        return self._heads(projected)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        *,
        tables: BlockTables,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from normed block rows [N, H], given the context's keys and values."""
        q_NhD = self._rotated(self._heads(self.q_proj(x)), self.q_norm, positions)
        attended_NhD = block_attention(
            q_NhD,
            *context,
            self.keys(self.k_proj(x), positions),
            self.values(self.v_proj(x)),
            tables,
            window=self.window,
            causal=self.causal,
        )
        return self.o_proj(attended_NhD.flatten(1))

    def _rotated(self, x: torch.Tensor, norm: Norm, positions: torch.Tensor) -> torch.Tensor:
        weight = norm.weight.to(x.dtype)
        return norm_rope(x, weight, positions, theta=self.theta, eps=norm.eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows [N, H] to [N, H]."""
        weight = self.down_proj.weight.to(x.dtype)
        return swiglu_linear(self.gate_proj(x), self.up_proj(x), weight)


class Layer(nn.Module):
    """Pre-norm attention and MLP over block rows."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        *,
        tables: BlockTables,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Map rows [N, H] to [N, H]."""
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, context, tables=tables, positions=positions)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class ContextCache:
    """Keys and values of the verified tokens of one sequence, per layer, grown by doubling."""

    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)  # L of [capacity, Hkv, D]
    values: list[torch.Tensor] = field(default_factory=list)

    def append(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add the keys and values of new tokens, one pair a layer."""
        added = pairs[0][0].shape[0]
        if not self.keys:
            self.keys = [key.new_empty(0, *key.shape[1:]) for key, _ in pairs]
            self.values = [value.new_empty(0, *value.shape[1:]) for _, value in pairs]
        if self.length + added > self.keys[0].shape[0]:
            capacity = max(256, 2 * (self.length + added))
            self.keys = [_grown(old, self.length, capacity) for old in self.keys]
            self.values = [_grown(old, self.length, capacity) for old in self.values]
        for layer, (key, value) in enumerate(pairs):
            self.keys[layer][self.length : self.length + added] = key
            self.values[layer][self.length : self.length + added] = value
        self.length += added

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the filled part of each layer."""
        filled = slice(self.length)
        return [(k[filled], v[filled]) for k, v in zip(self.keys, self.values, strict=True)]


class Drafter(nn.Module):
    """The whole drafter; see the module docstring."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.num_features * config.hidden_size, config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def initialise(self, seed: int) -> "Drafter":
        """Draw all projections from normal(0, initializer_range), norms 1, the same everywhere."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
                continue
            # Drawn in fp32 on the CPU whatever the parameter's dtype and device.
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            drawn.normal_(0.0, self.config.initializer_range, generator=generator)
            parameter.data.copy_(drawn)
        return self

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Project captured states [T, K·H] to the context states [T, H] that all layers share."""
        return self.hidden_norm(self.fc(features))

    def context_pairs(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the context's keys and values of every layer, [T, Hkv, D] each.

        One projection makes all of them: the layers' `k_proj` and `v_proj` side by side.
        """
        projections = [
            projection.weight
            for layer in self.layers
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]
        wide = torch.cat([weight.to(features.dtype) for weight in projections])
        parts = F.linear(self.context(features), wide).chunk(len(projections), dim=-1)
        return [
            (
                layer.self_attn.keys(parts[2 * i], positions),
                layer.self_attn.values(parts[2 * i + 1]),
            )
            for i, layer in enumerate(self.layers)
        ]

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, tables: PassTables
    ) -> torch.Tensor:
        """Run one training pass.

        Args:
            features: [T, K·H] captured states of the context, in the compute dtype.
            embeddings: [N, H] scaled target embeddings of the block tokens.
            tables: index tables of the pass, on the same device.

        Returns:
            [N, H] block states after the final norm, ready for the target's head.
        """
        pairs = self.context_pairs(features, tables.positions_ctx)
        return self._blocks(embeddings, pairs, tables.attention, tables.positions_block)

    def new_cache(self) -> ContextCache:
        """Return an empty context cache for one sequence."""
        return ContextCache()

    def draft(
        self,
        cache: ContextCache,
        new_features: torch.Tensor,
        block_embeddings: torch.Tensor,
        start: int,
    ) -> torch.Tensor:
        """Draft one block, as serving engines do.

        Args:
            cache: context of the sequence; the new tokens' keys and values are appended, and
                nothing of the block stays.
            new_features: [t, K·H] captured states of the tokens verified since the last call.
            block_embeddings: [b, H] scaled embeddings of the last token and the masks, b ≤ B.
            start: position of the last token, which is the number of tokens in the context.

        Returns:
            [b, H] states after the final norm.
        """
        positions = torch.arange(cache.length, start, device=new_features.device)
        assert len(positions) == new_features.shape[0], "features must fill the context to `start`"
        cache.append(self.context_pairs(new_features, positions))
        rows = block_embeddings.shape[0]
        tables = build_tables(np.array([0]), np.array([start]), block_size=rows, num_ctx=start).to(
            new_features.device
        )
        positions = torch.arange(start, start + rows, device=new_features.device)
        return self._blocks(block_embeddings, cache.pairs(), tables, positions)

    def _blocks(
        self,
        x: torch.Tensor,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        tables: BlockTables,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        for layer, context in zip(self.layers, pairs, strict=True):
            x = layer(x, context, tables=tables, positions=positions)
        return self.norm(x)


def _grown(old: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    new = old.new_empty(capacity, *old.shape[1:])
    new[:length] = old[:length]
    return new
