"""Time and memory of a training step against other DFlash trainers, in one run.

    python tests/benchmarks/bench_peers.py --shape 8b

Two comparisons: forward and backward with bf16 weights and no optimiser, and the whole step with
fp32 masters and AdamW. All train on the same weights, random states and tokens, and anchors; every
token is supervised, and blocks end inside their document. Shapes are those of bench_step.py. The
weighted sum of cross-entropies of each first step must agree with ours before the step is timed. A
step's time is between the ends of two steps on the GPU. Ours copies the states of every step from
page-locked memory, beside the step; the peers' are on the GPU. See peers.py for their settings.

In FP8, ours has fp32 masters in both comparisons: it makes its copies from them. The whole step is
left out for settings of a peer that another beats in time and memory.

Runs that share a file of --turns compile, in the first comparison, at the same time, and are timed
one by one.
"""

import argparse
import fcntl
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import transformers
import triton
from gpu_timing import revision
from gradient_gate import check_gradient
from peers import PEERS, Case, Contender
from step_shapes import (
    DEVICE,
    DTYPE,
    LAYERS,
    LR,
    SHAPES,
    allocated_bytes,
    device_name,
    draft_shape,
    median_seconds,
    moment,
    pack_tokens,
    peak_bytes,
    random_head,
    reset_peak,
    synchronize,
)
from torch import Tensor

from dflash_offline.kernels.block_attention import table_sizes
from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.train.anchors import AnchoredDocument
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.objective import Objective, decay_gamma
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.step import accumulate
from dflash_offline.train.stream import LoadedDocument, PassInput, StreamOptions, assemble

# How far a first loss may be from ours, relative: by a unit of bfloat16, in which one loss of the
# peers is summed; FP8 is another arithmetic.
_AGREES, _FP8_AGREES = (2**-8, 2e-2) if DEVICE.type == "cuda" else (1e-4, 1e-4)
_PACKAGES = ("specforge", "speculators", "liger-kernel")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a document")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--turns", type=Path, help="a file that runs on one GPU share")
    parser.add_argument("--commit", default=revision(), help="what to print as the commit")
    return parser.parse_args()


def make_case(options: argparse.Namespace) -> Case:
    shape, length = draft_shape(options.shape, options.block_size), options.document
    documents, rng = pack_tokens(options.shape) // length, np.random.default_rng(0)
    generator = torch.Generator(DEVICE).manual_seed(2)
    states = torch.randn(
        (len(LAYERS), documents * length, shape.hidden_size),
        generator=generator,
        device=DEVICE,
        dtype=torch.bfloat16,
    )
    # The last token a block may start at is such that all its slots have a label.
    possible = length - options.block_size + 1
    return Case(
        shape=shape,
        head=random_head(options.shape),
        tokens=rng.integers(0, shape.vocab_size - 1, (documents, length)).astype(np.int32),
        states=states.cpu(),
        anchors=np.stack(
            [
                np.sort(rng.choice(possible, options.anchors, replace=False))
                for _ in range(documents)
            ]
        ),
        gamma=decay_gamma(options.block_size),
    )


def ours(case: Case, *, whole: bool, fp8: bool) -> Contender:
    with torch.device(DEVICE):
        drafter = Drafter(case.shape)
    drafter.load_state_dict(case.weights())
    head, given = case.head, our_pass(case)
    objective = Objective(loss="decay", gamma=case.gamma)
    if fp8:
        drafter.use_fp8()
        head = head.with_fp8()
    elif not whole:
        drafter.to(DTYPE)
    optimizer = Optimizer(drafter, weight_decay=0.0, betas=(0.9, 0.95)) if whole else None
    sums = [torch.zeros_like(each) for each in drafter.parameters()] if fp8 else []

    def step() -> Tensor:
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            for total in sums:
                total.zero_()
            for parameter, total in itertools.zip_longest(drafter.parameters(), sums):
                parameter.grad = total
        totals = accumulate(drafter, head, objective, [given])
        if optimizer is not None:
            optimizer.step(lr=LR, weight_sum=totals[1], clip=1.0)
        return totals[0]

    return Contender("ours, FP8" if fp8 else "ours", step)


def our_pass(case: Case) -> PassInput:
    length = case.tokens.shape[1]
    queries = torch.empty(
        1, case.shape.num_attention_heads, case.shape.head_dim, dtype=DTYPE, device=DEVICE
    )
    is_cuda = DEVICE.type == "cuda"
    options = StreamOptions(
        layout=case.shape.layout,
        layers=LAYERS,
        num_anchors=case.anchors.shape[1],
        rows_per_pass=case.anchors.size * case.shape.block_size,
        seed=0,
        dtype=DTYPE,
        pinned=is_cuda,
        table_sizes=table_sizes(
            queries,
            num_kv_heads=case.shape.num_key_value_heads,
            block_size=case.shape.block_size,
        )
        if is_cuda
        else {},
    )
    documents = [
        LoadedDocument(
            anchored=AnchoredDocument(
                tokens=tokens, supervised=np.ones(length, bool), anchors=anchors
            ),
            features=CodedStates(codec="raw", values=states),
        )
        for tokens, anchors, states in zip(
            case.tokens, case.anchors, case.states.split(length, dim=1), strict=True
        )
    ]
    return assemble(documents, options)


def measure(
    make: Callable[..., Contender],
    case: Case,
    options: argparse.Namespace,
    *,
    whole: bool,
    expected: float | None,
) -> tuple[float, float, int]:
    """Check a contender's first loss, time its steps, print a line.

    Args:
        expected: our loss; None for ours.

    Returns:
        Its loss, the seconds of a step, and the most bytes held in one.
    """
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    held = allocated_bytes()
    contender = make(case, whole=whole)
    # In a whole step memory is too short for two runs at once.
    with turn(options.turns, alone=whole):
        began = time.perf_counter()
        loss = contender.step().item()
        first = time.perf_counter() - began
        apart = 0.0 if expected is None else abs(loss / expected - 1)
        line = f"{contender.name}: loss {loss:.4f}, {apart:.1e} from ours"
        bound = _FP8_AGREES if "FP8" in contender.name else _AGREES
        assert apart <= bound, f"{line}; not timed"
        ends = timed(contender, options) if whole else []
    if not whole:
        with turn(options.turns, alone=True):
            ends = timed(contender, options)
    seconds, peak = median_seconds(ends), peak_bytes()
    print(
        f"{line}; {1e3 * seconds:.1f} ms (median of {options.steps}), "
        f"{case.num_rows / seconds:,.0f} supervised rows/s, peak {peak / 1e9:.1f} GB "
        f"({held / 1e9:.1f} before); first step {first:.0f} s",
        flush=True,
    )
    return loss, seconds, peak


def timed(contender: Contender, options: argparse.Namespace) -> list[torch.cuda.Event | float]:
    """Run the steps; return the moments between which those that count lie."""
    reset_peak()
    ends = []
    for step in range(options.warmup + options.steps + 1):
        if step >= options.warmup:
            ends.append(moment())
        contender.step()
    synchronize()
    return ends


@contextmanager
def turn(file: Path | None, *, alone: bool) -> Iterator[None]:
    """Wait until no other run is being timed, or, to be timed, until none does anything."""
    if file is None:
        yield
        return
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def compare(
    case: Case, options: argparse.Namespace, peers: list[str], *, whole: bool
) -> dict[str, tuple[float, int]]:
    """Time ours and peers; returns seconds and memory of the peers that run."""
    what = "whole step, fp32 masters and AdamW" if whole else "forward and backward, bf16 weights"
    print(f"{options.shape}, {what}", flush=True)

    def run(make: Callable[..., Contender], expected: float | None) -> tuple[float, float, int]:
        return measure(make, case, options, whole=whole, expected=expected)

    mine = {"exact": run(partial(ours, fp8=False), None)}
    if DEVICE.type == "cuda":
        mine["FP8"] = run(partial(ours, fp8=True), mine["exact"][0])
    theirs = {}
    for name in peers:
        try:
            theirs[name] = run(PEERS[name], mine["exact"][0])
        except (RuntimeError, ImportError) as problem:
            print(f"{name} does not run: {type(problem).__name__}: {str(problem)[:600]}")
    for name, (_, their_seconds, their_peak) in theirs.items():
        ratios = (
            f"{kind} {their_seconds / seconds:.2f} x the rows/s in {peak / max(1, their_peak):.2f}"
            for kind, (_, seconds, peak) in mine.items()
        )
        print(f"against {name}: {', '.join(ratios)} x the memory", flush=True)
    return {name: (seconds, peak) for name, (_, seconds, peak) in theirs.items()}


def worth_more(measured: dict[str, tuple[float, int]]) -> list[str]:
    """Return settings that no other of the same trainer beats in time without more memory."""

    def is_beaten(name: str) -> bool:
        seconds, peak = measured[name]
        trainer = name.partition("-")[0]
        return any(
            other.startswith(trainer) and their_seconds < seconds and their_peak <= peak
            for other, (their_seconds, their_peak) in measured.items()
        )

    return [name for name in measured if not is_beaten(name)]


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def main() -> None:
    options = parse()
    print(
        f"{device_name()}, torch {torch.__version__}, triton {triton.__version__}, transformers "
        f"{transformers.__version__}, Python {sys.version.split()[0]}, "
        f"{', '.join(map(installed, _PACKAGES))}, commit {options.commit}"
    )
    check_gradient(DEVICE)
    case = make_case(options)
    measured = compare(case, options, options.peers, whole=False)
    compare(case, options, worth_more(measured), whole=True)


if __name__ == "__main__":
    main()
