"""Attention for decoding, where every forward has a few keys more than the one before."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def growing_keys() -> Iterator[None]:
    """Keep PyTorch from cuDNN's attention, which plans anew for every number of keys.

    On Hopper PyTorch prefers it. A plan is some 60 ms of the host (H200, torch 2.11, cuDNN 9.19),
    twice what the rest of a small target's step takes.
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others):
        yield
