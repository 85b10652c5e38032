"""Kernels are launched on the device of their tensors, whichever is the current one."""

from contextlib import contextmanager

import pytest
import torch

from dflash_offline.kernels import norm_rope as ops
from dflash_offline.kernels.block_attention import block_attention, build_tables
from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.kernels.feature_noise import feature_noise
from dflash_offline.kernels.gather_dequant import gather_dequant
from dflash_offline.kernels.linear_ce import linear_ce
from dflash_offline.kernels.linear_ce_skip import linear_ce_skip, order_head
from dflash_offline.kernels.linear_fp8 import Fp8Weight, quantize_rows
from dflash_offline.kernels.linear_kl import linear_kl
from dflash_offline.kernels.linear_kl_topk import linear_kl_topk
from dflash_offline.kernels.optional_triton import HAS_TRITON

X, WEIGHT, ROWS = torch.ones(4, 16), torch.ones(16), torch.arange(4)
HEADS = X.view(4, 2, 8)
HEAD = torch.ones(64, 16)
OPS = {
    "rms_norm": lambda **k: ops.rms_norm(X, WEIGHT, **k),
    "add_rms_norm": lambda **k: ops.add_rms_norm(X, X, WEIGHT, **k),
    "norm_rope": lambda **k: ops.norm_rope(HEADS, WEIGHT[:8], X[:, :8], **k),
    "rope": lambda **k: ops.rope(HEADS, X[:, :8], **k),
    "swiglu": lambda **k: ops.swiglu(X, X, **k),
    "swiglu_linear": lambda **k: ops.swiglu_linear(X, X, HEAD, **k),
    "feature_noise": lambda **k: feature_noise(X, ROWS.int(), width=1.0, **k),
    "gather_dequant": lambda **k: gather_dequant(
        CodedStates(codec="raw", values=torch.ones(1, 4, 16).bfloat16()), **k
    ),
    "block_attention": lambda **k: block_attention(
        HEADS, HEADS, HEADS, HEADS, HEADS, build_tables([0], [3], block_size=4, num_ctx=4), **k
    ),
    "linear_fp8 rows": lambda **k: quantize_rows(X, **k),
    "linear_fp8 weight": lambda **k: Fp8Weight.empty_like(HEAD).fill(HEAD, **k),
    "linear_ce": lambda **k: linear_ce(X, HEAD, ROWS, **k),
    "linear_ce_skip": lambda **k: linear_ce_skip(X, order_head(HEAD, HEAD[:, 0]), ROWS, **k),
    "linear_kl": lambda **k: linear_kl(X, HEAD, X, **k),
    "linear_kl_topk": lambda **k: linear_kl_topk(X, HEAD, ROWS[:, None], -X[:, :1], **k),
}


@pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(), reason="watches Triton's interpreter"
)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_launches_are_on_the_tensors_device(op, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    given, launches = [], []

    @contextmanager
    def device_of(tensor):
        given.append(tensor)
        yield
        given.pop()

    run = GridExecutor.__call__

    def watched(executor, *args, **kwargs):
        launches.append(bool(given))
        return run(executor, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    op(implementation="triton")
    assert launches
    assert all(launches)
