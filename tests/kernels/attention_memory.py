"""Prints the shared memory that block attention's Triton kernels take on a GPU that is not there.

`python attention_memory.py MAJOR MINOR CASES`: CASES is a JSON list of [kernel, dtype, head
dimension, query heads of a key-value head, block size], with kernel one of fwd, dq, dkv.
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_offline.kernels import attention_kernels, block_attention
from dflash_offline.kernels.attention_tables import build_tables

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {
    "fwd": attention_kernels._block_attention_fwd_kernel,
    "dq": attention_kernels._block_attention_bwd_q_kernel,
    "dkv": attention_kernels._block_attention_bwd_kv_kernel,
}
NUMBERS = {"scale_log2": "fp32", "scale": "fp32", "num_rows": "i32"}
POINTERS = dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("lo_ptr", "hi_ptr", "group_ptr", "tile_ptr"), "*i32")


def shared_memory(
    capability: tuple[int, int], name: str, dtype: str, dim: int, ratio: int, block: int
) -> int:
    """Compile one kernel as `block_attention` launches it and return its bytes."""
    q = torch.empty(2 * block, 2 * ratio, dim, dtype=DTYPES[dtype])
    ctx, own = (torch.empty(rows, 2, dim, dtype=q.dtype) for rows in (8, 2 * block))
    tables = build_tables([0, 0], [4, 8], block_size=block, num_ctx=8)
    call = block_attention.Call(tables=tables, window=5, causal=True, scale=1.0)
    launch = vars(block_attention.launches_of(q, block))[name]
    assert not launch.tma, "descriptors have types of their own"
    constants = block_attention._group_constants(call, q, ctx, ctx, own, own, launch)
    if name == "dkv":
        constants |= {"SLOTS": launch.rows // ratio}
    kernel = KERNELS[name]
    types = POINTERS | NUMBERS
    signature, given = {}, {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument], given[argument] = "constexpr", constants[argument]
        else:
            signature[argument] = types.get(argument, f"*{dtype}")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*")
    }
    major, minor = capability
    compiled = triton.compile(
        ASTSource(kernel, signature, given, aligned),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    return compiled.metadata.shared


if __name__ == "__main__":
    given = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.get_device_capability = lambda _device: given
    sys.stdout.write(json.dumps([shared_memory(given, *case) for case in json.loads(sys.argv[3])]))
