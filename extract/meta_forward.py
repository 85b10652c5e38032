"""What a forward of a target takes, from its configuration alone: its own code on the meta device.

No weight is read and nothing is computed; tensors have shapes, and their sizes are added up while
they live. Letters: T padded tokens, H hidden, I width of the MLP.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_offline.common.target_parts import parts_of

# Ask for a value, which nothing has here; each asks whether a batch is free of padding.
_VALUES = ("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense")
_LINEAR_ATTENTION = "linear_attn"
_CHUNK_TOKENS = 64
# Which dimension of a weight each style of transformers' tensor-parallel plans deals out, and of a
# bias; what a style does not name stays whole in every process.
_DEALT_DIMS = {
    "colwise": (-2, -1),
    "colwise_gather_output": (-2, -1),
    "colwise_rep": (-2, -1),
    "packed_colwise": (-2, -1),
    "rowwise": (-1, None),
    "rowwise_rep": (-1, None),
    "rowwise_split_input": (-1, None),
    "packed_rowwise": (-1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
}
# Of these the forward sees parts; the other modules take and give whole states.
_PARTS_IN_FORWARD = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")
# Grouped products on the meta device know no other; in float32 everything is twice as large.
_MEASURED = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class ForwardCost:
    """Sizes of a target and of one forward of its decoder.

    Attributes:
        num_parameters: of the decoder and its embedding, without the head, in each process.
        is_tied: the head is the embedding.
        activation_bytes: largest sum of everything alive during the forward beside weights; None
            where the model's code does not run without values.
        flops_per_token: multiplications and additions of the matrices that a token meets, over
            all processes that share the target.
    """

    num_parameters: int
    is_tied: bool
    activation_bytes: int | None
    flops_per_token: int


def forward_cost(
    config: PreTrainedConfig,
    *,
    target: str,
    dtype: torch.dtype,
    num_tokens: int,
    max_length: int,
    shared_by: int = 1,
    trust_remote_code: bool = False,
) -> ForwardCost:
    """Return what a forward of `num_tokens` padded tokens takes, in samples of `max_length`.

    For a dense decoder (with scaled_dot_product_attention, which keeps no scores) the activations
    are `element_size * T * (4 * H + 3 * I)`: the embeddings, a layer's input, its residual and its
    normed state, then gate, up and their product. Mixtures of experts, soft-caps, sinks and sliding
    windows have terms of their own, which is why the code is run instead of a formula.

    Of a target that several processes share, what transformers' plan deals out is divided: weights
    of the plan's modules, and what attention and MLPs make between a module that gives parts and
    one that takes them (heads, gate, up and their product). Whole in every process are modules
    that the plan leaves out, states between layers, what linear attention works on, and all
    activations where the model's code does not run on parts.

    Linear attention is taken to run in flash-linear-attention's kernels; see `_fla_elements`.

    Args:
        config: text configuration of the target.
        target: what the user gave as it.
        dtype: of weights and activations.
        num_tokens: T, padding included.
        max_length: tokens of a sample; where scores are kept, the longest samples cost most.
        shared_by: processes that hold the target together.
        trust_remote_code: whether code shipped with the checkpoint may run.

    Raises:
        BadInput: it has not all parts of a target.
    """
    length = min(max_length, num_tokens)
    num_samples = num_tokens // length
    base = _decoder(config, target, trust_remote_code=trust_remote_code)
    ids = torch.zeros(num_samples, length, dtype=torch.int64, device="meta")
    flops_per_token = 2 * _active_parameters(base, config)
    dealt = _dealt_parameters(base, config) if shared_by > 1 else {}
    weights = dict(base.named_parameters())
    held = weights | {name: _part(weights[name], dealt[name][0], shared_by) for name in dealt}
    in_parts = {name: dim for name, (dim, style) in dealt.items() if style in _PARTS_IN_FORWARD}
    with _parts_of(base, in_parts, shared_by):
        peak = _peak_bytes(base, ids)
    if peak is None and in_parts:
        peak = _peak_bytes(base, ids)
    tokens = num_samples * length * _MEASURED.itemsize
    return ForwardCost(
        num_parameters=sum(weight.numel() for weight in held.values()),
        is_tied=bool(config.tie_word_embeddings),
        activation_bytes=None if peak is None else peak * num_tokens * dtype.itemsize // tokens,
        flops_per_token=flops_per_token,
    )


def _decoder(config: PreTrainedConfig, target: str, *, trust_remote_code: bool) -> nn.Module:
    """Return the target's decoder on the meta device, its linear attention as in fla."""
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(
            config, dtype=_MEASURED, trust_remote_code=trust_remote_code
        )
    base, *_ = parts_of(causal.eval(), target)
    for module in base.modules():
        linear = dict(module.named_children()).get(_LINEAR_ATTENTION)
        if linear is not None:
            linear.forward = _in_fla(linear, config)
    return base


def _peak_bytes(base: nn.Module, ids: Tensor) -> int | None:
    """Return the largest sum of a forward's tensors; None where it does not run without values."""
    live = _LiveBytes([*base.parameters(), *base.buffers()])
    try:
        with torch.no_grad(), _FusedAttention(), live:
            base(input_ids=ids, use_cache=False)
    except (RuntimeError, NotImplementedError):
        return None
    return live.peak


def _dealt_parameters(base: nn.Module, config: PreTrainedConfig) -> dict[str, tuple[int, str]]:
    """Return dimension and style of every parameter that the target's plan deals out."""
    plan = config.base_model_tp_plan or {}
    dealt = {}
    for name, weight in base.named_parameters():
        # A plan names modules, or parameters that have none of their own.
        generic = re.sub(r"\.\d+(?=\.)", ".*", name)
        style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
        dims = _DEALT_DIMS.get(style or "")
        dim = None if dims is None else dims[weight.ndim == 1]
        if dim is not None:
            dealt[name] = dim, style
    return dealt


def _part(weight: Tensor, dim: int, shared_by: int) -> Tensor:
    """Return the largest of the parts that processes have of a weight."""
    return weight.chunk(shared_by, dim)[0]


@contextmanager
def _parts_of(base: nn.Module, dims: dict[str, int], shared_by: int) -> Iterator[None]:
    """Let modules hold one process's part of their weights inside."""
    whole = {name: base.get_parameter(name) for name in dims}

    def put(name: str, weight: Tensor) -> None:
        module, _, own = name.rpartition(".")
        base.get_submodule(module).register_parameter(own, nn.Parameter(weight, False))

    for name, weight in whole.items():
        put(name, _part(weight, dims[name], shared_by).clone())
    try:
        yield
    finally:
        for name, weight in whole.items():
            put(name, weight)


class _LiveBytes(TorchDispatchMode):
    """Add up the storages that exist, and remember the largest sum."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _VALUES:
            return True
        result = func(*args, **(kwargs or {}))
        for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:
            self._now -= self._alive.pop(key)[1]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known and key not in self._alive:
                    self._alive[key] = StorageWeakRef(storage), storage.nbytes()
                    self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        return result


class _FusedAttention(TorchFunctionMode):
    """Scores of attention exist nowhere in a GPU's memory; the meta device would make them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, _key, value = args[:3]
        batch, heads, length, _ = query.shape
        # Token-major in memory, as the fused kernels write it.
        return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def _in_fla(module: nn.Module, config: PreTrainedConfig) -> Callable[..., Tensor]:
    elements = _fla_elements(config)

    def forward(hidden_states: Tensor, **_rest: Any) -> Tensor:
        kept = hidden_states.new_empty(hidden_states.shape[:2].numel() * elements)
        out = torch.empty_like(hidden_states)
        del kept
        return out

    return forward


def _fla_elements(config: PreTrainedConfig) -> int:
    """Return the elements a token that a GatedDeltaNet layer keeps at its peak in fla's kernels.

    Projected and convolved q, k, v; the gate z; q and k repeated for every value head and then
    normalised; the inverse of each chunk's triangle; w, u, v' and the output; a state a chunk.
    """
    heads, key, value = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    projected = 2 * config.linear_num_key_heads * key + heads * value
    chunk = heads * _CHUNK_TOKENS + heads * key + 3 * heads * value
    state = heads * key * value // _CHUNK_TOKENS
    return projected + heads * value + 4 * heads * key + chunk + state


def _active_parameters(base: nn.Module, config: PreTrainedConfig) -> int:
    """Return the weights that a token meets: all but the embedding and the experts not chosen."""
    # Only mixtures of experts have these keys, under either name.
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 1)
    chosen = getattr(config, "num_experts_per_tok", num_experts) if num_experts else 1
    count = 0
    for name, weight in base.named_parameters():
        if weight is base.get_input_embeddings().weight:
            continue
        is_expert = ".experts." in name and num_experts
        count += weight.numel() * chosen // num_experts if is_expert else weight.numel()
    return count
