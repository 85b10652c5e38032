"""Block attention against compiled FlexAttention, as a training step has it.

    python tests/benchmarks/bench_attention.py

Checks values and gradients first. A step is one build of the tables (or of the peer's mask) and
five layers forward and backward, bfloat16, 32 query and 8 key-value heads of 128, sorted anchors.
The peer gets keys and values of context and blocks in one tensor, made beforehand. Times are
medians of single steps in CUDA events, both in one process. TFLOP/s count products over visible
keys only: two forward, three for dQ, four for dK and dV (a fused backward would need five in all).
"""

import argparse
import sys
import time

import numpy as np
import torch
from gpu_timing import heading, median_ms, revision
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_offline.kernels import block_attention as ops
from dflash_offline.kernels.block_attention import block_attention, build_tables, table_sizes

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 5
# Context tokens, anchors, block size, document length, and the least ratio to the peer.
SHAPES = [(16384, 1024, 16, 2048, 2.0), (16384, 1024, 16, 16384, 1.1), (32768, 1024, 32, 4096, 1.8)]


def anchors_of(num_ctx: int, num_anchors: int, length: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    documents = num_ctx // length
    lo, hi = [], []
    for document in range(documents):
        picked = torch.randperm(length - 1, generator=generator)[: num_anchors // documents]
        lo += [document * length] * len(picked)
        hi += (picked.sort().values + document * length).tolist()
    return lo, hi


def layers_of(num_ctx: int, rows: int, count: int) -> list[list[torch.Tensor]]:
    shapes = [(rows, HEADS), (num_ctx, KV_HEADS), (num_ctx, KV_HEADS)]
    shapes += [(rows, KV_HEADS), (rows, KV_HEADS)]
    return [
        [
            torch.randn(*s, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for s in shapes
        ]
        for _ in range(count)
    ]


class Flex:
    """The peer: one key and value tensor, context first, and a compiled mask and attention."""

    def __init__(self, num_ctx, block, lo, hi):
        self.num_ctx, self.block = num_ctx, block
        self.lo, self.hi = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in (lo, hi))
        self.attention = torch.compile(flex_attention, dynamic=False)
        self.build = torch.compile(create_block_mask, dynamic=False)

    def mask(self):
        lo, hi, num_ctx, block = self.lo, self.hi, self.num_ctx, self.block

        def visible(_batch, _head, row, key):
            anchor = row // block
            context = (key < num_ctx) & (key >= lo[anchor]) & (key < hi[anchor])
            return context | ((key >= num_ctx) & ((key - num_ctx) // block == anchor))

        rows = len(lo) * block
        return self.build(visible, None, None, rows, num_ctx + rows, device="cuda")

    def inputs(self, q, k_ctx, v_ctx, k_own, v_own):
        joined = [q, torch.cat([k_ctx, k_own]), torch.cat([v_ctx, v_own])]
        return [x.detach().requires_grad_() for x in joined]

    def __call__(self, q, k, v, mask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self.attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check() -> None:
    """Compare with the float64 reference on one small shape, or exit."""
    lo, hi = anchors_of(2048, 64, 1024)
    inputs = layers_of(2048, 64 * 16, 1)[0]
    tables = build_tables(lo, hi, block_size=16, num_ctx=2048).to("cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    upstream = torch.randn(64 * 16, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    results = []
    for given, implementation in ((inputs, "triton"), (exact, "reference")):
        out = block_attention(*given, tables, implementation=implementation)
        results.append([out, *torch.autograd.grad(out, given, upstream.to(out.dtype))])
    errors = [relative(a, b) for a, b in zip(*results, strict=True)]
    print("relative errors of value and gradients:", *(f"{e:.1e}" for e in errors))
    if not all(e < 1e-2 for e in errors):
        sys.exit("block_attention is wrong: nothing is timed")


def kernel_times(inputs, tables, keys: int, repeats: int) -> str:
    call = ops.Call(tables=tables, window=0, causal=False, scale=DIM**-0.5)
    inputs = [x.detach() for x in inputs]
    out, lse = ops._forward(call, *inputs)
    upstream = torch.randn_like(out)
    delta = ops._backward_q(call, *inputs, out, lse, upstream)[0]
    runs = {
        "fwd": (2, lambda: ops._forward(call, *inputs)),
        "dq": (3, lambda: ops._backward_q(call, *inputs, out, lse, upstream)),
        "dkv": (4, lambda: ops._backward_kv(call, *inputs[:3], lse, delta, upstream)),
    }
    parts = []
    for name, (products, run) in runs.items():
        ms = median_ms(run, repeats)
        parts.append(
            f"{name} {ms:.3f} ms {products * 2 * DIM * HEADS * keys / ms / 1e9:.0f} TFLOP/s"
        )
    return ", ".join(parts)


def step(attend, layers, tables, upstream) -> None:
    for inputs in layers:
        torch.autograd.grad(attend(*inputs, tables), inputs, upstream)


def measure(shape, repeats: int, flex_too: bool) -> None:
    num_ctx, num_anchors, block, length, bar = shape
    lo, hi = anchors_of(num_ctx, num_anchors, length)
    rows = num_anchors * block
    layers = layers_of(num_ctx, rows, LAYERS)
    upstream = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    sizes = table_sizes(layers[0][0], num_kv_heads=KV_HEADS, block_size=block)
    keys = (sum(hi) - sum(lo)) * block + num_anchors * block**2

    arrays = np.array(lo), np.array(hi)

    def build():
        return build_tables(*arrays, block_size=block, num_ctx=num_ctx, **sizes).to("cuda")

    print(f"\nT {num_ctx}, A {num_anchors}, B {block}, documents of {length}")
    if flex_too:
        torch._dynamo.reset()
        flex = Flex(num_ctx, block, lo, hi)
        joined = [flex.inputs(*layer) for layer in layers]
        start = time.perf_counter()
        mask = flex.mask()
        step(flex, joined, mask, upstream)
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - start
        error = relative(block_attention(*layers[0], build()), flex(*joined[0], mask))
        if not error < 1e-2:
            sys.exit(f"block_attention and flex_attention differ by {error:.1e}")

    tables = build()
    print("  " + kernel_times(layers[0], tables, keys, repeats))
    start = time.perf_counter()
    for _ in range(10):
        build()
    build_ms = (time.perf_counter() - start) * 100
    ours = median_ms(lambda: step(block_attention, layers, tables, upstream), repeats)
    print(f"  ours: tables {build_ms:.2f} ms on the host, five layers {ours:.2f} ms")
    if not flex_too:
        return
    mask_ms = median_ms(flex.mask, repeats)
    theirs = median_ms(lambda: step(flex, joined, mask, upstream), repeats)
    whole = (theirs + mask_ms) / (ours + build_ms)
    print(
        f"  flex: compile {compile_s:.1f} s, mask {mask_ms:.2f} ms, five layers {theirs:.2f} ms; "
        f"ratio {whole:.2f} with tables and mask, {theirs / ours:.2f} without "
        f"({'meets' if theirs / ours >= bar else 'MISSES'} {bar})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-flex", action="store_true", help="leave the peer out")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--commit", default=revision(), help="What to print as the commit.")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(heading(options.commit))
    check()
    for index in options.shapes:
        measure(SHAPES[index], options.repeats, not options.no_flex)


if __name__ == "__main__":
    main()
