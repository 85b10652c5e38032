"""Useful arithmetic of training: products and attention, once forward and once or twice backward.

Nothing that is recomputed counts. The frozen head counts twice, forward and for its input, and once
more for a teacher. Letters: T context tokens, A anchors, B block size, N = A*B rows, M labelled
rows, H hidden, K captured layers.
"""

import re

import torch

from dflash_offline.kernels.reference import own_mask
from dflash_offline.train.anchors import PassTables
from dflash_offline.train.drafter_config import DrafterConfig

# Dense bfloat16 rates of datasheets, FLOP/s, by a part of the device's name.
_DATASHEET = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "B200": 2250e12,
    "A100": 312e12,
}  # fmt: skip


def datasheet_rate(device: torch.device) -> float | None:
    """Return what a device can do at most, None where this module does not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # An A1000 is no A100.
    rates = _DATASHEET.items()
    return next((rate for part, rate in rates if re.search(f"{part}(?![0-9])", name)), None)


def pass_flops(config: DrafterConfig, tables: PassTables, *, with_teacher: bool) -> float:
    """Return the FLOPs of one pass, forward and backward."""
    hidden, vocab = config.hidden_size, config.vocab_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    rows, context = tables.block_tokens.shape[0], tables.positions_ctx.shape[0]
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * config.intermediate_size
    trunk = 3 * 2 * rows * config.num_hidden_layers * layer
    head = (3 if with_teacher else 2) * 2 * tables.label_rows.shape[0] * hidden * vocab
    # The stored states get no gradient, so `fc` has one product backward.
    fc = 2 * 2 * context * config.num_features * hidden * hidden
    keys = 3 * 2 * context * config.num_hidden_layers * 2 * hidden * kv
    # Two products forward, four backward, of 2 D FLOPs for a visible pair and head.
    attention = 3 * 4 * q * sum(visible_pairs(config, tables))
    return float(trunk + head + fc + keys + attention)


def visible_pairs(config: DrafterConfig, tables: PassTables) -> list[int]:
    """Return for each layer how many pairs of a row and a key that it sees a pass has."""
    size = config.block_size
    slots_B = torch.arange(size)
    found: dict[tuple[int | None, bool], int] = {}
    kinds = [
        (config.window(layer), config.layer_causal[layer])
        for layer in range(config.num_hidden_layers)
    ]
    for window, causal in set(kinds):
        context_AB = tables.anchors[:, None].expand(-1, size)
        if window is not None:
            # Slot k sits k tokens behind the context and sees itself too.
            context_AB = context_AB.minimum((window - 1 - slots_B).clamp(min=0))
        own = int(own_mask(size, window=window, causal=causal).sum())
        found[window, causal] = int(context_AB.sum()) + tables.num_anchors * own
    return [found[kind] for kind in kinds]
