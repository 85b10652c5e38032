"""Steps of one GPU and of several, so many packs for each: time, data wait, memory as predicted.

    python tests/benchmarks/bench_shard.py --shape 27b
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/bench_shard.py --shape 27b --shard all

The step is the one of bench_step.py. The store is --cache, or stays in --folder, where the next run
of the same shape finds it. Losses and norms of the first two steps and the last are those of any
--shard, and of any number of GPUs at the same packs of all of them. --packs-per-step takes several
numbers, one after another: `3 24` on one GPU shows the step of eight with 3 each, too.
"""

import dataclasses
import gc
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Before anything allocates on the device that is current.
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

from bench_step import make_setup, packs_of
from gpu_timing import revision
from gradient_gate import check_gradient
from random_store import write_store
from step_shapes import (
    DEVICE,
    LR,
    SHAPES,
    allocated_bytes,
    device_name,
    median_seconds,
    moment,
    pack_tokens,
    peak_bytes,
    reset_peak,
    synchronize,
)

from dflash_offline.common.codecs import code_bytes, num_scales
from dflash_offline.train.distributed import World, gather_objects, join_world, leave_world
from dflash_offline.train.loop import train_step
from dflash_offline.train.memory_model import Load, memory_of
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.order import StreamState
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.setup import Setup
from dflash_offline.train.sharding import Sharding
from dflash_offline.train.stream import StepBuilder, Stream

_STEP = {"codec": "int8", "storage_option": []}


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--shard", choices=["optimizer", "all"], default="optimizer")
    parser.add_argument("--fp8", choices=["none", "head", "all"], default="none")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those measured")
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a document")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rows-per-pass", type=int, default=16384)
    parser.add_argument("--packs-per-step", nargs="+", type=int, default=[1], help="for each GPU")
    parser.add_argument("--cache", help="store to train on; one of random states by default")
    parser.add_argument("--packs", type=int, default=4, help="in the store of random states")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="of the store")
    parser.add_argument("--commit", default=revision())
    options = parser.parse_args()
    given = vars(options) | {"packs_a_gpu": options.packs_per_step}
    return Namespace(**_STEP | given)


def in_packs(options: Namespace, packs: int, world: World) -> Namespace:
    """Return the options for steps of so many packs a GPU, of which no more are made than fit."""
    fewer = packs / options.packs_a_gpu[0]
    changed = {"packs_per_step": packs * world.size}
    if fewer > 1:
        changed |= {"steps": max(3, int(options.steps / fewer)), "warmup": min(2, options.warmup)}
    return Namespace(**vars(options) | changed)


def shared_setup(options: Namespace, world: World, url: str) -> Setup:
    """Return what one process of the job trains."""
    # Products in FP8 come after the weights have been shared out.
    setup = make_setup(Namespace(**vars(options) | {"fp8": "none"}), url)
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
    drafter, head, sharding = setup.drafter, setup.head, None
    if options.shard == "all" and world.size > 1:
        sharding = Sharding(drafter, world=world, device=device, dtype=setup.dtype)
    if options.fp8 != "none":
        head = head.with_fp8()
    if options.fp8 == "all":
        drafter.use_fp8()
    return dataclasses.replace(setup, world=world, device=device, sharding=sharding, head=head)


def measure(setup: Setup, options: Namespace) -> None:
    world = setup.world
    optimizer = Optimizer(
        setup.drafter, weight_decay=0.0, betas=(0.9, 0.95), kind=options.optimizer, world=world
    )
    setup.warm_up()
    stream = Stream(
        setup.order,
        StepBuilder(setup.caches, setup.stream_options, setup.wanted),
        state=StreamState(),
        samples_per_step=setup.samples_of_steps(),
        rank=world.rank,
        world_size=world.size,
    )
    clock, ends, found, counts = PhaseClock(setup.device), [], [], np.zeros(3)
    with stream:
        for step in range(options.steps + options.warmup):
            if step == options.warmup:
                synchronize()
                reset_peak()
                clock.take()
                ends.append(moment())
                began, waited = time.perf_counter(), stream.wait_s
            given = stream.next()
            totals, norm, _skipped = train_step(setup, optimizer, given, lr=LR, clock=clock)
            found.append((totals[0] / totals[1], norm))
            if step >= options.warmup:
                ends.append(moment())
                counts += given.num_tokens, given.num_rows, given.num_bytes
        synchronize()
        seconds = time.perf_counter() - began
        wait = (stream.wait_s - waited) / seconds
    peak, resting = peak_bytes(), allocated_bytes()
    everybody = gather_objects((counts, wait, peak), world)
    began = time.perf_counter()
    whole = setup.whole_drafter()
    synchronize()
    gathered = time.perf_counter() - began
    del whole
    if not world.is_first:
        return
    predicted = sum(predicted_bytes(setup, options).values())
    median = median_seconds(ends)
    of_all, waits, peaks = zip(*everybody, strict=True)
    tokens, rows, read = sum(of_all) / options.steps
    print(
        f"{options.shape} {options.codec}, {world.size} processes, shard {options.shard}, "
        f"{options.optimizer}, fp8 {options.fp8}: {1e3 * median:.1f} ms a step "
        f"(median of {options.steps}), peak {peak / 1e9:.1f} GB, predicted {predicted / 1e9:.1f}, "
        f"between steps {resting / 1e9:.1f}, whole copy in {gathered:.2f} s"
    )
    print(
        f"{options.packs_per_step} packs a step: {tokens / median:,.0f} context tokens/s, "
        f"{rows / median:,.0f} supervised rows/s, data wait {max(waits):.1%} at most, mean "
        f"{1e3 * seconds / options.steps:.1f} ms, {read / median / 1e9:.2f} GB/s read, peak of all "
        f"{max(peaks) / 1e9:.1f} GB"
    )
    print(
        {name: f"{1e3 * each / options.steps:.1f} ms" for name, each in clock.take().items()},
        "losses and norms",
        [tuple(round(float(value), 5) for value in found[i]) for i in (0, 1, -1)],
        flush=True,
    )


def predicted_bytes(setup: Setup, options: Namespace) -> dict[str, int]:
    hidden, codec = SHAPES[options.shape][0], options.codec
    rows = options.anchors * options.block_size  # of a document
    of_step = pack_tokens(options.shape) // options.document * options.packs_per_step
    # Of one pass.
    documents = min(of_step // setup.world.size, max(1, options.rows_per_pass // rows))
    load = Load(
        rows=documents * rows,
        context=documents * options.document,
        chunk_rows=setup.head.chunk_rows,
        head_copies=2,
        stored_bytes=code_bytes(codec, hidden) + 4 * num_scales(codec, hidden),
        fp8=options.fp8,
        world_size=setup.world.size,
        shares_all=setup.sharding is not None,
        optimizer=options.optimizer,
    )
    return memory_of(setup.drafter.config, load)


def main() -> None:
    world = join_world(DEVICE.type)
    options = parse()
    if world.is_first:
        print(
            f"{device_name()} x {world.size}, torch {torch.__version__}, Python "
            f"{sys.version.split()[0]}, commit {options.commit}",
            flush=True,
        )
    if world.size == 1:
        check_gradient(DEVICE)
    url = options.cache or str(options.folder / f"bench-shard-{options.shape}")
    if world.is_first and not Path(url).exists():
        write_store(url, packs_of(options))
    if world.size > 1:
        dist.barrier()
    for packs in options.packs_a_gpu:
        case = in_packs(options, packs, world)
        measure(shared_setup(case, world, url), case)
        gc.collect()
    leave_world()


if __name__ == "__main__":
    main()
