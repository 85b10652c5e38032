"""What an extraction takes of each GPU's memory and of the host's, before anything is loaded.

Pure, apart from the two functions that ask how much is free. What the forward itself takes is
extract/meta_forward.py. Letters: S slots (captured layers, and the final state if it is kept),
T padded tokens of a batch, H hidden, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_offline.common.codecs import code_bytes, num_scales
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import EXACT, EXACT_ROWS, Schema
from dflash_offline.common.topk import HEAD_ROWS
from dflash_offline.extract.meta_forward import ForwardCost
from dflash_offline.extract.state_ring import NUM_BUFFERS

# cuBLAS keeps one for each of its two libraries on Hopper.
_WORKSPACE_BYTES = 2 * (32 << 20)
# The codec works in fp32 on blocks of 2^24 values, of which four exist at a time.
_CODEC_BYTES = 4 * 4 * (1 << 24)
# Memory that stays free, because the allocator cannot use every gap.
_SPARE_FRAC = 0.03
_GB = 1e9


@dataclass(frozen=True)
class FreeMemory:
    """What is free on a GPU.

    Attributes:
        num_bytes: None without a GPU.
        where: the GPU, for people.
    """

    num_bytes: int | None
    where: str = "the GPU"


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes by what they are for.

    Attributes:
        device: of one GPU, at the peak; empty without one.
        host: of this machine, for all its workers.
        per_token: what a token more of a batch adds to `device`, or to `host` without a GPU.
    """

    device: dict[str, int]
    host: dict[str, int]
    per_token: int

    def sentence(self, device_free: FreeMemory) -> str:
        """Return a line for each kind of memory, with what is free."""
        kinds = [("each GPU", self.device, device_free.num_bytes)] if self.device else []
        kinds.append(("this machine", self.host, free_host_bytes()))
        return "\n".join(
            f"memory of {where}: {sum(parts.values()) / _GB:.2f} GB"
            + ("" if free is None else f" of {free / _GB:.1f} GB free")
            + f" ({_listed(parts)})"
            for where, parts, free in kinds
        )


def memory_model(
    schema: Schema,
    cost: ForwardCost,
    *,
    dtype: torch.dtype,
    batch_tokens: int,
    pool_packs: int,
    num_workers: int,
    on_gpu: bool,
    shared_by: int = 1,
) -> MemoryModel:
    """Return the peak of an extraction.

    A GPU's is `device_bytes`. The host's is, for each worker, the packs that are filled and
    written, the host's part of the ring, and the head; or the weights while they are loaded, where
    that is more. Without a GPU everything is in the host's memory. The processes that share a
    target put their parts of it on their devices while they load, and all of them gather the whole
    embedding and head.

    Args:
        schema: of the store.
        cost: of the target, for a batch of `batch_tokens` tokens.
        dtype: of the forward.
        batch_tokens: T, padded tokens of the largest batch.
        pool_packs: packs in memory at once, `POOL_UNITS` units of them or all that there are.
        num_workers: of this machine.
        on_gpu: whether workers have a GPU each.
        shared_by: workers that hold one target together.
    """
    device = device_bytes(schema, cost, dtype=dtype, batch_tokens=batch_tokens, shared_by=shared_by)
    head = _head_bytes(schema, cost, dtype)
    if shared_by > 1:
        head += _table_bytes(schema, dtype)
    sent = _code_bytes(schema) if schema.is_coded else schema.bytes_per_token()
    buffers = {
        "packs": pool_packs * pack_bytes(schema),
        "ring": NUM_BUFFERS * sent * batch_tokens,
    }
    if not schema.num_topk:
        buffers["head"] = head
    fixed = device["weights"] + device.get("head", 0) + schema.is_coded * _CODEC_BYTES
    per_token = math.ceil((sum(device.values()) - fixed) / batch_tokens)
    if not on_gpu:
        both = {**device, **buffers}
        host = {name: num_workers * value for name, value in both.items()}
        return MemoryModel(device={}, host=host, per_token=num_workers * per_token)
    device["workspaces"] = _WORKSPACE_BYTES
    loading = {"weights while loading": device["weights"] + head}
    largest = max(buffers, loading, key=lambda parts: sum(parts.values()))
    host = {name: num_workers * value for name, value in largest.items()}
    return MemoryModel(device=device, host=host, per_token=per_token)


def device_bytes(
    schema: Schema,
    cost: ForwardCost,
    *,
    dtype: torch.dtype,
    batch_tokens: int,
    shared_by: int = 1,
) -> dict[str, int]:
    """Return the peak of one worker's device, by what it is for; e bytes an element of `dtype`.

    weights      e * parameters of decoder and embedding
    activations  what `forward_cost` gives for T tokens, e * T * (4 * H + 3 * I) if dense; or,
                 with a top-k teacher, 12 * 2048 * V for the logits after it, if that is more
    rows         2 * 2 * S * T * H, the states of the batch and of the one before it; S counts
                 the final state that best tokens are made of
    head         e * V * H, only with a top-k teacher, nothing where it is the embedding
    codes        only with an int codec, which works beside the next forward: twice T * S rows
                 of codes and scales (slot by slot, then all), and 256 MiB of fp32
    workspaces   64 MiB of cuBLAS, only on a GPU; added by `memory_model`

    With n processes that share a target, weights and activations are those of one of them, by the
    plan of transformers (see `forward_cost`). An untied head is on the devices too, e * V * H / n,
    and a top-k teacher adds the whole embedding and head, gathered. Rows and codes are not
    divided: one process of n has them, and every GPU is held to what that one takes. What NCCL
    takes for itself is not counted.
    """
    # Logits in the head's precision and in fp32, and what log-probabilities need of them.
    logits = HEAD_ROWS * schema.vocab_size * 3 * 4 if schema.num_topk else 0
    num_slots = schema.num_slots + (schema.num_topk > 0)
    activations = "activations" if cost.activation_bytes is not None else "activations not known"
    parts = {
        "weights": dtype.itemsize * cost.num_parameters,
        activations: max(cost.activation_bytes or 0, logits),
        "rows": NUM_BUFFERS * 2 * num_slots * schema.hidden * batch_tokens,
    }
    head = _head_bytes(schema, cost, dtype)
    if schema.num_topk:
        parts["head"] = head
    if shared_by > 1:
        gathered = head + _table_bytes(schema, dtype) if schema.num_topk else 0
        parts["head"] = gathered + math.ceil(head / shared_by)
    if schema.is_coded:
        parts["codes"] = 2 * _code_bytes(schema) * batch_tokens + _CODEC_BYTES
    return parts


def _head_bytes(schema: Schema, cost: ForwardCost, dtype: torch.dtype) -> int:
    return 0 if cost.is_tied else _table_bytes(schema, dtype)


def _table_bytes(schema: Schema, dtype: torch.dtype) -> int:
    """Return the bytes of an embedding or a head."""
    return dtype.itemsize * schema.vocab_size * schema.hidden


def check_memory(
    model: MemoryModel, *, batch_tokens: int, device_free: FreeMemory, host_free: int | None
) -> None:
    """Refuse an extraction that does not fit.

    Raises:
        BadInput: says what is needed, what is free, and what to change.
    """
    on_gpu = bool(model.device)
    parts, free, where = model.host, host_free, "this machine"
    if on_gpu:
        parts, free, where = model.device, device_free.num_bytes, device_free.where
    needed = _with_spare(parts)
    if free is not None and needed > free:
        most = batch_tokens - math.ceil((needed - free) / (1 + _SPARE_FRAC) / model.per_token)
        most = most // 1024 * 1024
        if most > 0:
            remedy = f"lower --batch-tokens to {most}"
        elif needed - _with_spare({"packs": parts.get("packs", 0)}) <= free:
            remedy = "lower --pack-tokens, because most of it is for packs"
        else:
            remedy = (
                "the weights and one sample do not fit, so use a GPU with more memory or a "
                "smaller target"
            )
        raise BadInput(
            f"--batch-tokens {batch_tokens} needs {needed / _GB:.1f} GB of the memory of "
            f"{where}, of which {free / _GB:.1f} GB are free ({_listed(parts)}); {remedy}"
        )
    needed = _with_spare(model.host)
    if on_gpu and host_free is not None and needed > host_free:
        raise BadInput(
            f"the workers of this machine need {needed / _GB:.1f} GB of its memory, of which "
            f"{host_free / _GB:.1f} GB are free ({_listed(model.host)}); lower --pack-tokens, "
            "capture fewer --layers, or start fewer workers with --gpus"
        )


def pack_bytes(schema: Schema) -> int:
    """Return the memory of one pack while it is filled, rows stored exactly apart."""
    return sum(
        math.prod(spec.shard) * np.dtype(spec.dtype).itemsize
        for name, spec in schema.arrays.items()
        if name in schema.state_arrays and name not in (EXACT, EXACT_ROWS)
    )


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU, None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def free_host_bytes() -> int | None:
    """Return the memory that this process may still take; None where the system does not say."""
    available = None
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        left = max(0, int(most) - int(used.read_text()))
        # Cached files count as used, and go when memory is asked for.
        left += _cached_bytes(group / "memory.stat")
        available = left if available is None else min(available, left)
    return available


def _cached_bytes(stat: Path) -> int:
    values: Mapping[str, str] = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))


def _code_bytes(schema: Schema) -> int:
    """Return the bytes of one token's codes and scales."""
    width = code_bytes(schema.codec, schema.hidden) + 2 * num_scales(schema.codec, schema.hidden)
    has_final = schema.num_slots - len(schema.layers)
    return len(schema.layers) * width + has_final * (schema.hidden + 2)


def _with_spare(parts: Mapping[str, int]) -> int:
    return int(sum(parts.values()) * (1 + _SPARE_FRAC))


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / _GB:.2f}" for name, size in parts.items())
