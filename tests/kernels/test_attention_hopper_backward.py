"""Backward kernels for Hopper, run as plain Python: values in float64, nothing read too early."""

import math
from dataclasses import dataclass

import pytest
import torch

from dflash_offline.kernels import (
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_context,
    attention_hopper_own,
    reference,
)
from dflash_offline.kernels.attention_launch import RowTile, power_of_two
from dflash_offline.kernels.attention_tables import BlockTables, build_tables
from dflash_offline.kernels.optional_triton import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton's lower language: triton 3.6")

# Name: (T, anchors as (lo, hi)). Documents are [lo, next lo).
LAYOUTS = {
    "one document": (300, [(0, 0), (0, 1), (0, 90), (0, 150), (0, 151), (0, 299)]),
    "documents": (200, [(0, 0), (1, 1), (2, 2), (2, 70), (120, 120), (120, 199), (200, 200)]),
}
HEADS, DIM = 2, 32
SCALE = DIM**-0.5


def log_sums(q, k_ctx, k_own, tables, window, causal):
    """Return log2 of the sums of exponentials, [HEADS, N, R], from a mask made key by key."""
    rows, ratio, block = q.shape[0], q.shape[1] // HEADS, tables.block_size
    keys = torch.cat([k_ctx, k_own])
    scores = torch.einsum("nhrd,mhd->hnrm", q.unflatten(1, (HEADS, ratio)), keys) * SCALE
    mask = torch.zeros(rows, len(keys), dtype=torch.bool)
    token, other = torch.arange(tables.num_ctx), torch.arange(block)
    for row in range(rows):
        anchor, slot = divmod(row, block)
        lo, hi = int(tables.lo[anchor]), int(tables.hi[anchor])
        seen = (lo <= token) & (token < hi)
        own = (other <= slot) if causal else other >= 0
        if window:
            seen &= hi + slot - token < window
            own = own & (slot - other < window)
        first = tables.num_ctx + anchor * block
        mask[row, : tables.num_ctx], mask[row, first : first + block] = seen, own
    scores = scores.masked_fill(~mask[None, :, None], float("-inf"))
    return scores.logsumexp(-1) * math.log2(math.e)


@dataclass
class Case:
    """Inputs, tables and gradients of one call, in float64."""

    inputs: list[torch.Tensor]  # q, k_ctx, v_ctx, k_own, v_own, without gradients
    tables: BlockTables
    d_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    grads: tuple[torch.Tensor, ...]  # of the inputs

    @classmethod
    def of(cls, layout, *, ratio, block, window=None, causal=False):
        num_ctx, anchors = layout
        lo, hi = zip(*anchors, strict=True)
        rows = block * len(lo)
        generator = torch.Generator().manual_seed(0)
        shapes = [(rows, ratio * HEADS), *2 * [(num_ctx, HEADS)], *2 * [(rows, HEADS)]]
        *inputs, d_out = (
            torch.randn(*shape, DIM, dtype=torch.float64, generator=generator)
            for shape in [*shapes, shapes[0]]
        )
        tables = build_tables(lo, hi, block_size=block, num_ctx=num_ctx)
        exact = [x.clone().requires_grad_() for x in inputs]
        out = reference.block_attention(*exact, tables, window=window, causal=causal, scale=SCALE)
        lse = log_sums(inputs[0], inputs[1], inputs[3], tables, window, causal)
        delta = (out.detach() * d_out).sum(-1).unflatten(1, (HEADS, ratio)).transpose(0, 1)
        grads = torch.autograd.grad(out, exact, d_out)
        return cls(inputs, tables, d_out, out.detach(), lse, delta.contiguous(), grads)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("ratio", "block", "window", "causal"),
    [
        (4, 16, None, False),
        (4, 10, 50, True),
        (8, 7, 5, False),
        (4, 32, None, True),
        (4, 32, 100, True),
        (2, 16, 99, False),
        (16, 8, None, False),
    ],
)
def test_dq_and_own_blocks(gluon, monkeypatch, layout, ratio, block, window, causal):
    case = Case.of(layout, ratio=ratio, block=block, window=window, causal=causal)
    q, k_ctx, v_ctx, k_own, v_own = case.inputs
    tile = RowTile.of(128, ratio, block)
    assert tile.chunks == 1
    own_tokens = max(16, power_of_two(tile.anchors * block))
    groups = case.tables.groups(tile.anchors)
    items = groups.shape[0] * HEADS
    boxes = [*3 * [[64 // ratio, ratio, DIM]], *2 * [[64, DIM]], *2 * [[own_tokens, DIM]]]
    tensors = [q, case.d_out, case.out, k_ctx, v_ctx, k_own, v_own]
    sources = [gluon.Descriptor(x, box) for x, box in zip(tensors, boxes, strict=True)]
    for seed in range(2):
        machine = gluon.Machine(seed=seed)
        modules = (attention_hopper, attention_hopper_own, attention_hopper_backward)
        gluon.patch(monkeypatch, machine, *modules)
        got = [torch.full_like(x, float("nan")) for x in (q, k_own, v_own, case.lse)]
        *grads, delta = (gluon.Pointer(x) for x in got)
        lists = (gluon.Pointer(x) for x in (case.tables.lo, case.tables.hi, groups))
        gluon.launch(
            machine, attention_hopper_backward.block_attention_bwd_q_kernel, (3,), *sources,
            *grads, gluon.Pointer(case.lse), delta, *lists, SCALE * math.log2(math.e), SCALE,
            q.shape[0], groups.shape[0], items,
            HQ=ratio * HEADS, R=ratio, B=block, D=DIM, SLOTS=tile.slots, WINDOW=window or 0,
            CAUSAL=causal, BLOCK_N=64, BLOCK_C=own_tokens, STAGES=3,
        )  # fmt: skip
        wanted = [case.grads[0], *case.grads[3:], case.delta]
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("ratio", "block", "window"),
    # In the window of 160 tokens are all of a tile for some slots of a block.
    [(4, 16, None), (4, 10, 50), (8, 7, None), (1, 32, 5), (16, 3, 150), (4, 32, 1), (4, 16, 160)],
)
def test_context(gluon, monkeypatch, layout, ratio, block, window):
    case = Case.of(layout, ratio=ratio, block=block, window=window)
    q, k_ctx, v_ctx = case.inputs[:3]
    tiles = case.tables.tiles(128)
    boxes = [*2 * [[64 // ratio, ratio, DIM]], *2 * [[64, DIM]]]
    tensors = [q, case.d_out, k_ctx, v_ctx]
    sources = [gluon.Descriptor(x, box) for x, box in zip(tensors, boxes, strict=True)]
    # Rows behind the last are read too, and may be anything.
    padded = [
        torch.cat([x.flatten(), x.new_full((128,), float("nan"))]) for x in (case.lse, case.delta)
    ]
    for seed in range(2):
        machine = gluon.Machine(seed=seed)
        gluon.patch(monkeypatch, machine, attention_hopper, attention_hopper_context)
        got = [torch.full_like(x, float("nan")) for x in (k_ctx, v_ctx)]
        pointers = [gluon.Pointer(x) for x in (*got, *padded, case.tables.hi, tiles)]
        gluon.launch(
            machine, attention_hopper_context.block_attention_bwd_kv_kernel,
            (tiles.shape[0], HEADS), *sources, *pointers, SCALE * math.log2(math.e), SCALE,
            q.shape[0], HKV=HEADS, R=ratio, B=block, D=DIM, WINDOW=window or 0, STAGES=2,
        )  # fmt: skip
        for a, b in zip(got, case.grads[1:3], strict=True):
            assert (a - b).abs().max() < 1e-12


def test_what_is_supported(monkeypatch):
    """The rest goes to the Triton kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))

    class OnDevice(torch.Tensor):
        is_cuda = True

    def supports(ratio, block, dim=128, dtype=torch.bfloat16, num_ctx=1):
        tile = RowTile.of(128, ratio, block)
        q = torch.empty(block, 2 * ratio, dim, dtype=dtype).as_subclass(OnDevice)
        own_tokens = max(16, power_of_two(tile.anchors * block))
        return attention_hopper_backward.is_supported(
            q, torch.empty(num_ctx, 2, dim, dtype=dtype), own_tokens=own_tokens, chunks=tile.chunks
        )

    assert all(supports(*shape) for shape in [(4, 16), (4, 32), (8, 16), (16, 8), (2, 16), (4, 7)])
    assert not any(supports(*shape) for shape in [(3, 16), (1, 16), (8, 32), (4, 64), (16, 16)])
    assert not supports(4, 16, dim=64)
    assert not supports(4, 16, dtype=torch.float32)
    assert not supports(4, 16, num_ctx=0)
