"""Gather and dequantise against the device's copy bandwidth, and what the first product gains.

    python tests/benchmarks/bench_gather.py

Context features of T = 16384 tokens, five layers of 5120 (25,600 values a token). Checks every
codec against the reference first, bit by bit. Bytes are what must move: codes, scales and slots
read, bfloat16 written.
"""

import argparse
import sys

import torch
from gpu_timing import heading, median_ms, revision

from dflash_offline.kernels.coded_states import GROUP, CodedStates
from dflash_offline.kernels.gather_dequant import gather_dequant, gather_linear

TOKENS, LAYERS, HIDDEN = 16384, 5, 5120
CODECS = ("raw", "int8", "int4", "int3")
BAR = 0.75


def states_of(codec: str, tokens: int) -> CodedStates:
    """Random codes; the first token of every 2,048 is stored exactly."""
    shape = (LAYERS, tokens, HIDDEN)
    if codec == "raw":
        return CodedStates(codec=codec, values=torch.randn(shape, device="cuda").bfloat16())
    if codec == "int8":
        values = torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
    else:
        num_bytes = HIDDEN // 2 if codec == "int4" else HIDDEN // 8 * 3
        shape = (LAYERS, tokens, num_bytes)
        values = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    groups = HIDDEN // GROUP if codec == "int4" else 1
    slot = torch.full((LAYERS, tokens), -1, dtype=torch.int32, device="cuda")
    slot[:, ::2048] = 0
    levels = torch.tensor([63, 194, 344, 551], device="cuda") / 256
    return CodedStates(
        codec=codec,
        values=values,
        scales=torch.rand(LAYERS, tokens, groups, device="cuda").bfloat16(),
        mean=torch.randn(LAYERS, HIDDEN, device="cuda"),
        gain=torch.rand(LAYERS, HIDDEN, device="cuda"),
        codebook=torch.cat([-levels.flip(0), levels]) if codec == "int3" else None,
        exact_slot=slot,
        exact=torch.randn(1, HIDDEN, device="cuda").bfloat16(),
    )


def check(codec: str) -> None:
    states = states_of(codec, 300)
    rows = torch.randint(0, 300, (500,), device="cuda")
    for index in (None, rows):
        ours = gather_dequant(states, index)
        exact = gather_dequant(states, index, implementation="reference")
        if not torch.equal(ours, exact):
            error = (ours.double() - exact.double()).abs().max().item()
            sys.exit(f"{codec}: differs from the reference by up to {error}: nothing is timed")


def moved_bytes(states: CodedStates) -> int:
    read = [x for x in (states.values, states.scales, states.exact_slot) if x is not None]
    return sum(x.numel() * x.element_size() for x in read) + 2 * LAYERS * TOKENS * HIDDEN


def first_product(repeats: int) -> None:
    """Compare one product over gathered rows with one product a layer over rows as they are."""
    states = states_of("raw", TOKENS)
    weight = torch.randn(HIDDEN, LAYERS * HIDDEN, device="cuda").bfloat16() * 0.01
    parts = weight.unflatten(1, (LAYERS, HIDDEN)).unbind(1)
    out = torch.empty(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def by_layers():
        torch.mm(states.values[0], parts[0].t(), out=out)
        for values, part in zip(states.values[1:], parts[1:], strict=True):
            out.addmm_(values, part.t())

    gathered = median_ms(lambda: gather_linear(states, weight), repeats)
    layered = median_ms(by_layers, repeats)
    print(
        f"fc from raw layers: gather and one product {gathered:.2f} ms, five accumulated products "
        f"{layered:.2f} ms (sums rounded to bfloat16 in between)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default=revision(), help="What to print as the commit.")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(heading(options.commit))
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_ms(lambda: target.copy_(source), options.repeats) / 1e9
    print(f"device copy {copy:.2f} TB/s")
    for codec in CODECS:
        check(codec)
        states = states_of(codec, TOKENS)
        rows = torch.randperm(TOKENS, device="cuda")
        weight = torch.rand(HIDDEN, device="cuda")
        for label, index, norm in (
            ("all rows", None, None),
            ("by index", rows, None),
            ("normed", None, weight),
        ):
            ms = median_ms(
                lambda s=states, i=index, n=norm: gather_dequant(s, i, norm_weight=n),
                options.repeats,
            )
            rate = moved_bytes(states) / ms / 1e9
            verdict = "meets" if rate / copy >= BAR else "MISSES"
            verdict = f" {verdict} {BAR:.0%}" if codec in ("int8", "int4") and norm is None else ""
            print(f"{codec:5s} {label:9s} {ms:.3f} ms {rate:.2f} TB/s {rate / copy:.0%}{verdict}")
    first_product(options.repeats)


if __name__ == "__main__":
    main()
