"""What benchmarks of the training step share: shapes, random weights, and a clock."""

import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.target_head import TargetHead

SHAPES = {
    "8b": (4096, 12288, 151936),
    "27b": (5120, 17408, 248320),
    "tiny": (256, 512, 999),  # shows that the script runs, on any machine
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What the passes compute in.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LAYERS = (1, 9, 17, 25, 33)
HEADS, KV_HEADS, HEAD_DIM, DRAFT_LAYERS = 32, 8, 128, 5
# So small that nothing is learnt: gradients near zero need less power, and go faster.
LR = 1e-7


def pack_tokens(name: str) -> int:
    return 512 if name == "tiny" else 16384


def draft_shape(name: str, block_size: int) -> DrafterConfig:
    hidden, intermediate, vocab = SHAPES[name]
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=vocab,
        rope_theta=1e6,
        block_size=block_size,
        mask_token_id=vocab - 1,
        target_layer_ids=LAYERS,
        num_target_layers=36,
    )


def random_head(name: str) -> TargetHead:
    """Draw an embedding and a head of their own."""
    hidden, _, vocab = SHAPES[name]
    torch.manual_seed(0)
    embed, weight = (
        torch.randn(vocab, hidden, device=DEVICE, dtype=DTYPE) * hidden**-0.5 for _ in range(2)
    )
    return TargetHead(embed=embed, weight=weight)


def random_drafter(shape: DrafterConfig) -> Drafter:
    """Draw weights on the device, which takes seconds less than `Drafter.initialise`."""
    torch.manual_seed(1)
    with torch.device(DEVICE):
        drafter = Drafter(shape)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=shape.initializer_range)
    return drafter


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


def moment() -> torch.cuda.Event | float:
    """Return this moment of the device's stream, without waiting for it."""
    if DEVICE.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def step_seconds(moments: Sequence[torch.cuda.Event | float]) -> list[float]:
    """Return the time from each moment to the next; all must have passed."""
    return [seconds_between(a, b) for a, b in itertools.pairwise(moments)]


def median_seconds(moments: Sequence[torch.cuda.Event | float]) -> float:
    return statistics.median(step_seconds(moments))
