"""What training takes of a GPU's memory, before anything is put there, and what to change.

Pure, apart from `check_memory`, which asks how much is free. Letters: T context tokens of a pass,
N block rows of it, C rows of a chunk of logits, P parameters, H hidden, I MLP width, q and kv
projected query and key widths, K captured layers, L draft layers, V vocabulary, W processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dflash_offline.common.cache import Cache
from dflash_offline.common.codecs import code_bytes, num_scales
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import Schema
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.fp8 import ALL, NONE
from dflash_offline.train.objective import Objective
from dflash_offline.train.sources import planned
from dflash_offline.train.stream import CONTEXT_FACTOR
from dflash_offline.train.target_head import TargetHead

_GB = 1e9
_FP32, _BF16 = 4, 2
_MIN_ROWS = 64
# What the allocator cannot use of every gap, and the libraries' workspaces.
_SPARE_FRAC = 0.03


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run puts on one GPU.

    Attributes:
        rows: N.
        context: T.
        chunk_rows: C.
        head_copies: matrices [V, H] of the target: 1 where embedding and head are tied, else 2.
        num_chunks: chunks of logits that exist at a time.
        optimizer: `adamw` or `muon`.
        has_average: `--ema`.
        has_noise: states are held once more, with noise.
        world_size: W.
        shares_all: `--shard all`, by several processes.
        compute_bytes: of an element of the compute dtype.
        stored_bytes: of a token of one layer on its way to the GPU.
        fp8: as `--fp8` says.
    """

    rows: int
    context: int
    chunk_rows: int
    head_copies: int
    num_chunks: int = 2
    optimizer: str = "adamw"
    has_average: bool = False
    has_noise: bool = False
    world_size: int = 1
    shares_all: bool = False
    compute_bytes: int = _BF16
    stored_bytes: int
    fp8: str = NONE


def memory_of(shape: DrafterConfig, load: Load) -> dict[str, int]:
    """Return the bytes at the peak, in backward, by what they are for.

    With b bytes a compute element and P = K H^2 + L (2 H q + 2 H kv + 3 H I), vectors left out:
    target: copies V H b. drafter: masters 4 P, gradients 4 P, and b P of copies if b < 4. FP8: two
    bytes more for each element of the head, and with `all` of P but keys' and values'.
    optimiser: AdamW 8 P / W, Muon 4 P / W (all but some vectors are matrices), and 4 P / W for a
    running average. activations: b N L (4 H + 3 q + 3 kv + 3 I) that backward needs, and
    3 I N b that it makes. context: b T (2 H + 5 kv L). states: T K (H b + stored), and
    H b more with noise. logits: C V b for each chunk that exists at a time, two, as many of a
    teacher beside them and one that its labels come from, and 3 N H b of rows around them. What
    `--shard all` changes: see `_shared_out`.
    """
    hidden, middle, layers = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    features, each = shape.num_features, load.compute_bytes
    parameters = features * hidden**2
    parameters += layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * middle)
    moments = 2 if load.optimizer == "adamw" else 1
    copies = each if each < _FP32 else 0
    in_fp8 = 2 * (parameters - layers * 2 * hidden * kv) if load.fp8 == ALL else 0
    head_bytes = load.head_copies * each + (2 if load.fp8 != NONE else 0)
    saved = layers * (4 * hidden + 3 * q + 3 * kv + 3 * middle)
    activations = load.rows * (saved + 3 * middle) * each
    context = load.context * (2 * hidden + 5 * kv * layers) * each
    drafter = (2 * _FP32 + copies) * parameters + in_fp8
    if load.shares_all:
        drafter = _shared_out(shape, load, parameters, activations + context)
    return {
        "target": shape.vocab_size * hidden * head_bytes,
        "drafter": drafter,
        "optimiser": -(-(moments + load.has_average) * _FP32 * parameters // load.world_size),
        "activations": activations,
        "context": context,
        "states": load.context
        * features
        * ((1 + load.has_noise) * hidden * each + load.stored_bytes),
        "logits": load.num_chunks * load.chunk_rows * shape.vocab_size * each
        + 3 * load.rows * hidden * each,
    }


def _shared_out(shape: DrafterConfig, load: Load, parameters: int, of_pass: int) -> int:
    """Return the bytes of masters, gradients and what of the weights is whole for a while.

    8 P / W of slices. With R = K H^2 outside of layers and M = (P - R) / L in one: b (R + 3 M) of
    weights, for a layer, the next one and the buffer that they arrive in; 8 max(R, M) of
    gradients, as they are made and on their way, and 8 T H of the context's; with FP8 2 max(R, H I)
    of one matrix. An evaluation has b P instead, and nothing of a pass.

    Args:
        parameters: P.
        of_pass: bytes of activations and context, which an evaluation has no need of.
    """
    outside = shape.num_features * shape.hidden_size**2
    layer = (parameters - outside) // shape.num_hidden_layers
    whole = load.compute_bytes * (outside + 3 * layer) + 2 * _FP32 * max(outside, layer)
    whole += 2 * _FP32 * load.context * shape.hidden_size
    if load.fp8 == ALL:
        whole += 2 * max(outside, shape.hidden_size * shape.intermediate_size)
    in_evaluation = load.compute_bytes * parameters - of_pass
    return -(-2 * _FP32 * parameters // load.world_size) + max(whole, in_evaluation)


def typical_pass(
    lengths: np.ndarray, supervised: np.ndarray, *, num_anchors: int, block_size: int, rows: int
) -> tuple[int, int]:
    """Return block rows and context tokens that a pass is likely to have at most.

    Args:
        lengths, supervised: [samples] tokens, and those of them that are supervised.
        num_anchors: most anchors of a sample.
        block_size: slots of a block.
        rows: most rows of a pass.
    """
    blocks = np.minimum(num_anchors, np.maximum(supervised - 1, 1)) * block_size
    tokens_per_row = float(lengths.sum() / blocks.sum())
    longest = int(lengths.max())
    context = min(CONTEXT_FACTOR * rows, round(rows * tokens_per_row) + longest)
    return min(rows, int(blocks.sum())), max(longest, min(context, int(lengths.sum())))


def check_memory(model: Callable[[int], dict[str, int]], *, rows: int, device: torch.device) -> str:
    """Return a line about what a run takes; refuse one that cannot fit.

    Args:
        model: the parts in bytes, by most rows of a pass.
        rows: as `--rows-per-pass` says.
        device: where to train; a machine without GPUs is not asked.

    Raises:
        BadInput: more than there is, with what to change: passes first, never what is learned.
    """
    parts = model(rows)
    if device.type != "cuda":
        return sentence(parts, None)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if _total(parts) > free:
        raise BadInput(
            f"--rows-per-pass {rows}: {sentence(parts, free)}; {remedy(model, rows, free)}"
        )
    return sentence(parts, free)


def sentence(parts: dict[str, int], free: int | None) -> str:
    """Return the parts as one line."""
    listed = ", ".join(f"{name} {size / _GB:.2f}" for name, size in parts.items())
    total = _total(parts) / _GB
    room = "" if free is None else f" of {free / _GB:.1f} GB that are free"
    return f"training takes about {total:.2f} GB{room} ({listed})"


def remedy(model: Callable[[int], dict[str, int]], rows: int, free: int) -> str:
    """Say what makes a run fit, the cheapest first; anchors and blocks stay what they are."""
    while rows > _MIN_ROWS:
        rows = max(_MIN_ROWS, rows // 2)
        if _total(model(rows)) <= free:
            return f"--rows-per-pass {rows} fits and learns the same"
    return (
        "no size of a pass fits; share the drafter out to more --gpus with --shard all, use "
        "--optimizer muon, or a drafter of fewer --draft-layers"
    )


def _total(parts: dict[str, int]) -> float:
    return sum(parts.values()) * (1 + _SPARE_FRAC)


def memory_line(
    config: TrainConfig,
    shape: DrafterConfig,
    caches: list[Cache],
    wanted: list[list[int]],
    *,
    objective: Objective,
    head: TargetHead,
    device: torch.device,
    world_size: int,
) -> str:
    """Return a line about what a run takes; see `check_memory`.

    Args:
        config: the run's options.
        shape: the drafter's.
        caches, wanted: the stores, and the samples of each to train on.
        objective: says whether the target's logits are made.
        head: in the compute dtype, on any device.
        device: where to train.
        world_size: processes of the job.
    """

    def model(rows: int) -> dict[str, int]:
        load = _load_of(
            config,
            caches,
            wanted,
            rows=rows,
            objective=objective,
            head=head,
            block_size=shape.block_size,
            world_size=world_size,
        )
        return memory_of(shape, load)

    return check_memory(model, rows=config.rows_per_pass, device=device)


def _load_of(
    config: TrainConfig,
    caches: list[Cache],
    wanted: list[list[int]],
    *,
    rows: int,
    objective: Objective,
    head: TargetHead,
    block_size: int,
    world_size: int,
) -> Load:
    """Return what a run puts on one GPU with passes of at most `rows` rows."""
    most_rows, context = typical_pass(
        planned(caches, wanted, "length"),
        planned(caches, wanted, "supervised"),
        num_anchors=config.num_anchors,
        block_size=block_size,
        rows=rows,
    )
    return Load(
        rows=most_rows,
        context=context,
        chunk_rows=head.chunk_rows,
        head_copies=1 if head.weight is head.embed else 2,
        num_chunks=2 * (1 + objective.makes_target_logits) + objective.finds_best_tokens,
        optimizer=config.optimizer,
        has_average=config.ema is not None,
        has_noise=config.noise > 0,
        world_size=world_size,
        shares_all=config.shard == "all" and world_size > 1,
        compute_bytes=head.weight.element_size(),
        stored_bytes=max(_stored_bytes(cache.schema) for cache in caches),
        fp8=config.fp8,
    )


def _stored_bytes(schema: Schema) -> int:
    """Return the bytes of one token of one layer, as they are copied to the device."""
    if not schema.is_coded:
        return 2 * schema.hidden
    scales = 4 * num_scales(schema.codec, schema.hidden)
    return code_bytes(schema.codec, schema.hidden) + scales
