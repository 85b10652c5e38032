"""Kernels of Triton's lower language, by its compiler: loops keep what they carry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_offline.kernels.optional_triton import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton's lower language: triton 3.6")

RATIO, DIM, OWN = 4, 128, 32


def boxes(*shape: int) -> str:
    layout = (
        "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, "
        f"rank={len(shape)}, transposed=False, fp4_padded=False, cga_layout=[])"
    )
    return f"tensordesc<bf16[{','.join(map(str, shape))}],{layout}>"


ROWS = boxes(64 // RATIO, RATIO, DIM)
NUMBERS = dict.fromkeys(("num_rows", "num_groups", "num_items"), "i32")
LISTS = dict.fromkeys(("lo_ptr", "hi_ptr", "group_ptr"), "*i32")
GROUPS = {
    "HQ": 8 * RATIO, "R": RATIO, "B": 16, "D": DIM, "SLOTS": 128 // RATIO, "CAUSAL": True,
    "BLOCK_C": OWN,
}  # fmt: skip
# Module, kernel, what its arguments are compiled for.
KERNELS = {
    "forward": (
        "attention_hopper",
        "block_attention_fwd_kernel",
        {"q_desc": ROWS, "scale_log2": "fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
        | dict.fromkeys(("k_desc", "v_desc"), boxes(128, DIM))
        | dict.fromkeys(("k_own_desc", "v_own_desc"), boxes(OWN, DIM))
        | NUMBERS | LISTS | GROUPS
        | {"CHUNKS": 1, "BLOCK_N": 128, "STAGES": 2},
    ),
    "dq": (
        "attention_hopper_backward",
        "block_attention_bwd_q_kernel",
        dict.fromkeys(("q_desc", "do_desc", "out_desc"), ROWS)
        | dict.fromkeys(("k_desc", "v_desc"), boxes(64, DIM))
        | dict.fromkeys(("k_own_desc", "v_own_desc"), boxes(OWN, DIM))
        | dict.fromkeys(("dq_ptr", "dk_own_ptr", "dv_own_ptr"), "*bf16")
        | dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
        | dict.fromkeys(("scale", "scale_log2"), "fp32")
        | NUMBERS | LISTS | GROUPS
        | {"BLOCK_N": 64, "STAGES": 4},
    ),
    "context": (
        "attention_hopper_context",
        "block_attention_bwd_kv_kernel",
        dict.fromkeys(("q_desc", "do_desc"), ROWS)
        | dict.fromkeys(("k_desc", "v_desc"), boxes(64, DIM))
        | dict.fromkeys(("dk_ptr", "dv_ptr"), "*bf16")
        | dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
        | dict.fromkeys(("scale", "scale_log2"), "fp32")
        | {"hi_ptr": "*i32", "tile_ptr": "*i32", "num_rows": "i32"}
        | {"HKV": 8, "R": RATIO, "B": 16, "D": DIM, "STAGES": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_loops_keep_what_they_carry(name, window):
    module, kernel, arguments = KERNELS[name]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("gluon_carried.py")),
            "dflash_offline.kernels." + module,
            kernel,
            json.dumps(arguments | {"WINDOW": window}),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []
