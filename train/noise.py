"""Keys of the feature noise: which noise a token's states get, whatever pass they are in.

Letters: T context tokens.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_key(*, seed: int, epoch: int, occurrence: int, sample_id: str) -> int:
    """Return the 64-bit key of a sample each time that it comes up."""
    name = f"noise/{seed}/{epoch}/{occurrence}/{sample_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def row_keys(key: int, num_tokens: int) -> np.ndarray:
    """Return the keys of a sample's first tokens, int32 [T] (splitmix64 of key and position)."""
    steps_T = np.arange(1, num_tokens + 1, dtype=np.uint64)
    x = np.uint64(key) + steps_T * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(32)).astype(np.uint32).view(np.int32)
