"""Launch tables of block attention: what they ask for is there, on GPUs other than Hopper too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_offline.kernels import attention_launch
from dflash_offline.kernels.optional_triton import HAS_TRITON

# Kernel, dtype, head dimension, query heads of a key-value head, block size. Own blocks take most
# where a tile holds many of them, or where a block takes several tiles.
CASES = [
    ("dq", "bf16", 96, 8, 64),
    ("dq", "bf16", 128, 4, 64),
    ("dq", "bf16", 256, 4, 32),
    ("fwd", "bf16", 256, 4, 32),
]
MORE_CASES = [
    ("dq", "fp32", 128, 4, 32),
    ("dq", "fp32", 128, 4, 64),
    ("fwd", "fp32", 128, 1, 16),
    ("dq", "bf16", 64, 4, 64),
    ("dq", "bf16", 128, 1, 16),
    ("fwd", "bf16", 64, 1, 2),
    ("fwd", "bf16", 128, 4, 64),
    ("dkv", "bf16", 256, 4, 16),
]


def assert_fit(cases):
    """Compile for 99 kB of shared memory, what a GeForce or a small data-centre GPU has."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("attention_memory.py"))
    result = subprocess.run(
        [sys.executable, script, "8", "9", json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    too_large = [
        (case, size)
        for case, size in zip(cases, json.loads(result.stdout), strict=True)
        if size > 99 * 1024
    ]
    assert not too_large


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it")
def test_launches_fit_the_smallest_gpus():
    assert_fit(CASES)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it")
def test_more_launches_fit_the_smallest_gpus():
    assert_fit(MORE_CASES)


def test_what_fits_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr(attention_launch, "is_interpreted", lambda: False)
    q = torch.empty(64, 2, 256, dtype=torch.bfloat16)
    for capability, is_taken in (((8, 9), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, given=capability: given)
        attention_launch.launches_of(q, 32)
        if is_taken:
            attention_launch.launches_of(q, 33)
            continue
        with pytest.raises(ValueError, match="block_size is 33 and the head dimension 256"):
            attention_launch.launches_of(q, 33)
