"""Attention for shapes that do not come again, as in decoding: a few keys more a step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def unplanned_attention() -> Iterator[None]:
    """Keep PyTorch from cuDNN's attention, which plans anew for every shape.

    On Hopper PyTorch prefers it. A plan is some 60 ms of the host (H200, torch 2.11, cuDNN 9.19),
    twice what the rest of a small target's decoding step takes.
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others):
        yield
