"""Time of a whole training step, data path and optimiser included, from a store.

    python tests/benchmarks/bench_step.py --shape 8b --codec raw --steps 50

Random states and tokens in store format, every token supervised, decay cross-entropy; 5 layers with
32 query and 8 KV heads of 128, K = 5 captured layers, T = 16,384 tokens a pack in documents of
2,048 with 128 anchors each, B = 16. Model FLOPs: products and attention, each once forward and
twice backward, the frozen head once and once, nothing recomputed. Before anything is timed, the
gradient of one small pass is compared with that of float64 on the CPU.

A step's time is that between the ends of two steps on the GPU: nothing waits in between, as in
training. The store is in a new folder on a RAM disk, or in --folder, or at an S3 --url. With 9
packs or more, every pack is read anew when its turn comes; --cold has a disk deliver it.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gpu_timing import revision
from gradient_gate import check_gradient
from random_store import RandomPacks, drop_from_page_cache, write_store
from step_shapes import (
    DEVICE,
    DRAFT_LAYERS,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    LR,
    SHAPES,
    device_name,
    draft_shape,
    median_seconds,
    moment,
    pack_tokens,
    peak_bytes,
    random_drafter,
    random_head,
    reset_peak,
    synchronize,
)

from dflash_offline.common.cache import open_cache
from dflash_offline.train.checkpoint import RunState
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.distributed import World
from dflash_offline.train.loop import train_step
from dflash_offline.train.mask_token import MaskToken
from dflash_offline.train.objective import Objective, decay_gamma
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.order import SampleOrder, StoreSamples, StreamState
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.setup import Setup
from dflash_offline.train.stream import StepBuilder, StepInput, Stream

DATASHEET_TFLOPS = 989e12


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b"])
    parser.add_argument("--fp8", nargs="+", choices=["none", "head", "all"], default=["none"])
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps before those measured")
    parser.add_argument("--packs", type=int, default=3)
    parser.add_argument("--packs-per-step", type=int, default=1)
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a document")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--profile", type=Path, help="write a Chrome trace of three steps")
    parser.add_argument("--rows-per-pass", type=int, default=16384)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="of the store")
    parser.add_argument("--cold", action="store_true", help="leave nothing in the page cache")
    parser.add_argument("--url", help="of a new store on S3, in place of a folder")
    parser.add_argument("--storage-option", action="append", default=[], help="KEY=VALUE, for S3")
    parser.add_argument("--commit", default=revision(), help="what to print as the commit")
    return parser.parse_args()


def with_choice(options: Namespace, **chosen: str) -> Namespace:
    """Return options with one of the choices in place of their list."""
    return Namespace(**vars(options) | chosen)


def packs_of(options: Namespace) -> RandomPacks:
    hidden, _, vocab = SHAPES[options.shape]
    return RandomPacks(
        codec=options.codec,
        packs=options.packs,
        tokens=pack_tokens(options.shape),
        document=options.document,
        hidden=hidden,
        vocab=vocab,
    )


def make_setup(options: Namespace, url: str) -> Setup:
    cache = open_cache(url, storage_options=options.storage_option)
    shape = draft_shape(options.shape, options.block_size)
    shape = replace(shape, target_layer_ids=cache.schema.layers)
    config = TrainConfig(
        cache=(url,),
        out=Path("unused"),
        num_anchors=options.anchors,
        rows_per_pass=options.rows_per_pass,
        samples_per_step=packs_of(options).documents_of_a_pack * options.packs_per_step,
        num_steps=options.steps + options.warmup,
    )
    wanted = cache.training_samples
    samples = StoreSamples(indices=wanted, packs=cache.plan.column("pack")[wanted])
    head, drafter = random_head(options.shape), random_drafter(shape)
    if options.fp8 != "none":
        head = head.with_fp8()
    if options.fp8 == "all":
        drafter.use_fp8()
    return Setup(
        config=config,
        world=World(),
        device=DEVICE,
        dtype=DTYPE,
        caches=[cache],
        wanted=[wanted],
        head=head,
        drafter=drafter,
        mask_token=MaskToken(id=shape.mask_token_id, reason="last row"),
        objective=Objective(loss="decay", gamma=decay_gamma(options.block_size)),
        order=SampleOrder([samples], 0),
        num_steps=config.num_steps,
        total_samples=None,
        state=RunState(),
        checkpoint=None,
    )


def step_flops(options: Namespace) -> float:
    """Return the model FLOPs of one step."""
    hidden, intermediate, vocab = SHAPES[options.shape]
    documents = packs_of(options).documents_of_a_pack * options.packs_per_step
    tokens, anchors = documents * options.document, documents * options.anchors
    rows = anchors * options.block_size
    labelled = anchors * (options.block_size - 1)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    trunk = (
        3 * 2 * rows * DRAFT_LAYERS * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * intermediate)
    )
    head = 2 * 2 * labelled * hidden * vocab
    context = 2 * 2 * tokens * len(LAYERS) * hidden * hidden
    context += 3 * 2 * tokens * DRAFT_LAYERS * 2 * hidden * kv
    prefix = options.document / 2 + options.block_size
    attention = 3.5 * 4 * rows * q * prefix * DRAFT_LAYERS
    return trunk + head + context + attention


def measure(setup: Setup, options: Namespace, before: Callable[[], object] | None = None) -> float:
    """Print, and return, the median seconds of a step; `before` runs ahead of each."""
    optimizer = Optimizer(setup.drafter, weight_decay=0.0, betas=(0.9, 0.95))
    setup.warm_up()
    builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
    stream = Stream(
        setup.order, builder, state=StreamState(), samples_per_step=setup.samples_of_steps()
    )
    clock, ends, read = PhaseClock(setup.device), [], 0.0
    with stream:
        for step in range(options.steps + options.warmup):
            if step == options.warmup:
                synchronize()
                reset_peak()
                clock.take()
                ends.append(moment())
                began, waited = time.perf_counter(), stream.wait_s
            if before is not None:
                before()
            given = stream.next()
            totals, _norm, _skipped = train_step(setup, optimizer, given, lr=LR, clock=clock)
            if step >= options.warmup:
                ends.append(moment())
                read += given.num_bytes
        synchronize()
        total, wait = time.perf_counter() - began, stream.wait_s - waited
    median = median_seconds(ends)
    show(options, given, median, loss=(totals[0] / totals[1]).item())
    print(
        f"data wait {wait / total:.1%}, {read / total / 1e9:.2f} GB/s read, "
        f"mean {1e3 * total / options.steps:.1f} ms, of which",
        {name: f"{1e3 * value / options.steps:.1f} ms" for name, value in clock.take().items()},
        flush=True,
    )
    if options.profile:
        profile(setup, optimizer, options.profile)
    return median


def show(options: Namespace, given: StepInput, median: float, *, loss: float) -> None:
    flops = step_flops(options)
    print(
        f"{options.shape} {options.codec} fp8 {options.fp8}: {1e3 * median:.1f} ms a step "
        f"(median of {options.steps}), "
        f"{flops / 1e12:.0f} TFLOP, {flops / median / 1e12:.0f} TFLOP/s "
        f"({flops / median / DATASHEET_TFLOPS:.1%} of the datasheet), "
        f"{given.num_tokens / median:,.0f} context tokens/s, "
        f"{given.num_rows / median:,.0f} supervised rows/s, "
        f"peak {peak_bytes() / 1e9:.1f} GB, loss {loss:.3f}"
    )


def profile(setup: Setup, optimizer: Optimizer, path: Path) -> None:
    """Print the kernels that take the most time in three steps."""
    builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
    clock = PhaseClock(setup.device)
    draws, state = setup.order.take(StreamState(), setup.config.samples_per_step)
    given = builder.build(draws, state)
    with torch.profiler.profile() as trace:
        for _ in range(3):
            train_step(setup, optimizer, given, lr=LR, clock=clock)
        synchronize()
    print(
        trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=60
        )
    )
    trace.export_chrome_trace(str(path))


def run(options: Namespace, folder: Path) -> None:
    """Time the shape with each of the FP8 choices, from one store."""
    url = options.url or str(folder / f"store-{options.shape}")
    began = time.perf_counter()
    write_store(url, packs_of(options), options.storage_option)
    print(f"store written in {time.perf_counter() - began:.1f} s", flush=True)
    for fp8 in options.fp8:
        if options.cold:
            drop_from_page_cache(folder)
        case = with_choice(options, fp8=fp8)
        measure(make_setup(case, url), case)
        gc.collect()
    shutil.rmtree(folder / f"store-{options.shape}", ignore_errors=True)


def main() -> None:
    options = parse()
    print(
        f"{device_name()}, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, commit {options.commit}"
    )
    check_gradient(DEVICE)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for shape in options.shape:
            run(with_choice(options, shape=shape), Path(folder))


if __name__ == "__main__":
    main()
