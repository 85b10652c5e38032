"""The DFlash drafter: a block-parallel Qwen3-style stack over a target's captured states.

Tensor names are z-lab's. The context enters once (`fc`, then `hidden_norm`) and only as keys and
values, through every layer's own `k_proj`, `v_proj` and `k_norm`; queries come from block rows.
Embedding and head belong to the target and are not part of the model.

Weights are cast to the dtype of the features, inside the graph or once a step (`projections`), so
the same module trains bfloat16 passes on fp32 masters, with fp32 gradients, and serves in any
dtype.

Letters: T context tokens, N block rows, B block size, K captured layers, H hidden.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from dflash_offline.kernels.block_attention import BlockTables, block_attention, build_tables
from dflash_offline.kernels.norm_rope import (
    add_rms_norm,
    norm_rope,
    rms_norm,
    rotary_table,
    swiglu,
)
from dflash_offline.train.anchors import PassTables
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.projections import (
    Copies,
    Gathered,
    Linear,
    Shared,
    project,
    project_shared,
    project_wide,
    share,
)
from dflash_offline.train.rotary import frequencies


class _Rounded(torch.autograd.Function):
    """Values of a dtype as fp32 numbers, so that the gradient, a sum over rows, is one too."""

    @staticmethod
    def forward(_ctx, weight, dtype):
        return weight.to(dtype).to(torch.promote_types(dtype, torch.float32))

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


class Norm(nn.Module):
    """RMSNorm with a weight; statistics and the weight's gradient in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, rounded to a dtype."""
        if not torch.is_grad_enabled():
            return self.weight.to(dtype)
        return _Rounded.apply(self.weight, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight_in(x.dtype), self.eps)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum, and the sum."""
        return add_rms_norm(x, residual, self.weight_in(x.dtype), self.eps)


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
        self.window = config.window(layer)
        self.causal = config.layer_causal[layer]

    def keys(self, projected: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Norm and rotate projected keys [R, Hkv·D] by places [R, D] to [R, Hkv, D]."""
        return self._rotated(projected, self.k_norm, places)

    def context_pair(
        self, states: Shared, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this layer's keys and values, [T, Hkv, D] each, of the context states [T, H]."""
        key, value = project_shared(states, self.k_proj, self.v_proj)
        return self.keys(key, places), self.values(value)

    def values(self, projected: torch.Tensor) -> torch.Tensor:
        """View projected values [R, Hkv·D] as [R, Hkv, D]."""
        return self._heads(projected)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        *,
        tables: BlockTables,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Attend from normed block rows [N, H], given the context's keys and values."""
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        attended_NhD = block_attention(
            self._rotated(q, self.q_norm, places),
            *context,
            self.keys(k, places),
            self.values(v),
            tables,
            window=self.window,
            causal=self.causal,
        )
        return self.o_proj(attended_NhD.flatten(1))

    def _rotated(self, projected: torch.Tensor, norm: Norm, places: torch.Tensor) -> torch.Tensor:
        weight = norm.weight_in(projected.dtype)
        return norm_rope(self._heads(projected), weight, places, eps=norm.eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.head_dim))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows [N, H] to [N, H]."""
        return self.down_proj(swiglu(*project(x, self.gate_proj, self.up_proj)))


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
        added: torch.Tensor | None,
        context: tuple[torch.Tensor, torch.Tensor] | Shared,
        *,
        tables: BlockTables,
        places: torch.Tensor,
        context_places: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map the residual stream to the next layer's.

        Args:
            x: [N, H] residual stream.
            added: [N, H], what the layer before adds to it; each sum is made with its norm.
            context: keys and values of the context, [T, Hkv, D] each, or the states [T, H] to make
                them from.
            places, context_places: rotary tables of the rows, [N, D], and of the states, [T, D].

        Returns:
            The stream, and what this layer adds to it.
        """
        norm = self.input_layernorm
        normed, x = (norm(x), x) if added is None else norm.added(added, x)
        if context_places is not None:
            context = self.self_attn.context_pair(context, context_places)
        attended = self.self_attn(normed, context, tables=tables, places=places)
        normed, x = self.post_attention_layernorm.added(attended, x)
        return x, self.mlp(normed)


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
        self._copies: Copies | Gathered = Copies(self._projections())

    def _projections(self) -> list[Linear]:
        """All projections, those that make the context's keys and values first."""
        context = self._context_projections()
        return context + [p for p in self.modules() if isinstance(p, Linear) and p not in context]

    def use_fp8(self) -> None:
        """Have passes inside `cast_once` multiply in FP8, but for keys and values.

        Call it where the parameters are on their device.

        Raises:
            ValueError: a width is not a multiple of 16.
        """
        projections = self._projections()
        in_fp8 = projections[len(self._context_projections()) :]
        self._copies = type(self._copies)(projections, in_fp8)

    def use_gathered(self) -> None:
        """Have passes read weights that are there, in the compute dtype, while their layer runs.

        Each layer then makes its own keys and values of the context.
        """
        self._copies = Gathered(self._projections())

    def cast_once(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Inside, passes in `dtype` read weights that were cast on entry; see `projections`."""
        return self._copies.in_use(dtype)

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

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotary table of rows' positions, float32 [R, D], one for all layers."""
        config = self.config
        scaled = frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, positions.device
        )
        return rotary_table(positions, *scaled)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Project captured states [T, K·H] to the context states [T, H] that all layers share."""
        return self.hidden_norm(self.fc(features))

    def context_pairs(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the context's keys and values of every layer, [T, Hkv, D] each.

        One projection makes all of them: the layers' `k_proj` and `v_proj` side by side.
        """
        places = self.places(positions)
        parts = project_wide(self.context(features), self._context_projections())
        return [
            (layer.self_attn.keys(key, places), layer.self_attn.values(value))
            for layer, key, value in zip(self.layers, parts[::2], parts[1::2], strict=True)
        ]

    def _context_projections(self) -> list[Linear]:
        attentions = [layer.self_attn for layer in self.layers]
        return [each for own in attentions for each in (own.k_proj, own.v_proj)]

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
        if isinstance(self._copies, Gathered):
            contexts = [share(self.context(features))] * len(self.layers)
            places = self.places(tables.positions_ctx)
        else:
            contexts, places = self.context_pairs(features, tables.positions_ctx), None
        return self._blocks(embeddings, contexts, tables.attention, tables.positions_block, places)

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
        contexts: list[tuple[torch.Tensor, torch.Tensor]] | list[Shared],
        tables: BlockTables,
        positions: torch.Tensor,
        context_places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = {
            "tables": tables,
            "places": self.places(positions),
            "context_places": context_places,
        }
        added = None
        for layer, context in zip(self.layers, contexts, strict=True):
            x, added = layer(x, added, context, **given)
        return self.norm.added(added, x)[0]


def _grown(old: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    new = old.new_empty(capacity, *old.shape[1:])
    new[:length] = old[:length]
    return new
