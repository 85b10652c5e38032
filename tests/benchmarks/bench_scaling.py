"""Extraction by more and more of the workers of one job: how throughput grows, where the rest goes.

    torchrun --standalone --nproc-per-node 8 tests/benchmarks/bench_scaling.py --shape 27b --strong

Weak scaling: every number of workers makes a store with --units for each of them, from the first
batch to the last commit, while the others wait. With --strong, each also shares the units of one.
Model, batches and checks are those of bench_extract.py. A loop's rate counts from the second unit
until the last batch begins; after that come commits, and waiting for other workers. *Bare* is the
base model alone, by as many workers at once: what GPUs and host give without us.
"""

import math
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from bench_extract import GB, SHAPES, bare_rate, device_of, extract, random_target
from gpu_timing import revision
from random_plans import PACK_TOKENS, make_plan

from dflash_offline.common.target import Target
from dflash_offline.extract.fast_path import use_fast_convolution
from dflash_offline.extract.place import Place, place_in


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--workers", nargs="+", type=int, help="1, 2, 4 ... all by default")
    parser.add_argument("--strong", action="store_true", help="share the units of one, too")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch")
    parser.add_argument("--unit-packs", type=int, default=2)
    parser.add_argument("--units", type=int, default=8, help="for each worker")
    parser.add_argument("--keep", type=Path, help="where the store of all workers stays")
    parser.add_argument("--ram-disk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--commit", default=revision())
    return parser.parse_args()


def powers_up_to(count: int) -> list[int]:
    """Return 1, 2, 4 ... and the number itself."""
    return sorted({2**i for i in range(count.bit_length())} | {count})


class Job:
    """Runs by some of the workers; each is a store of its own."""

    def __init__(self, options: Namespace, place: Place, target: Target) -> None:
        self._options = options
        self._place = place
        self._target = target
        rng = np.random.default_rng(1)
        self._ids = rng.integers(0, target.vocab_size, (options.batch, options.length))
        self._batches_a_unit = (
            options.unit_packs * PACK_TOKENS // (options.batch * options.length) or 1
        )
        # What one worker alone does, in tokens a second.
        self._one: dict[str, float] = {}

    def run(self, workers: int, *, strong: bool = False) -> None:
        """Extract by the first so many workers, and print what it was in parts of one's."""
        mine = self._together(workers, strong) if self._place.rank < workers else None
        everybody: list[dict[str, float] | None] = [None] * self._place.size
        if self._place.size > 1:
            # The others wait here without taking a core.
            dist.all_gather_object(everybody, mine)
        else:
            everybody = [mine]
        if self._place.is_first:
            self._show(workers, strong, [each for each in everybody if each is not None])

    def _together(self, workers: int, strong: bool) -> dict[str, float]:
        options, target = self._options, self._target
        bare = 0.0 if strong else bare_rate(target, self._ids, 2)
        packs = options.units * options.unit_packs * (1 if strong else workers)
        plan, tokens = make_plan(
            [options.length] * (packs * PACK_TOKENS // options.length),
            unit_packs=options.unit_packs,
            batch_tokens=options.batch * options.length,
            vocab=target.vocab_size,
        )
        # Workers meet anew for each store, as after a restart.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{workers}-{strong}"
        here = min(workers, self._place.local_size)
        got = extract(
            options,
            target,
            replace(self._place, size=workers, local_size=here),
            codec=options.codec,
            plan=plan,
            tokens=tokens,
            first=self._batches_a_unit,
            keep=options.keep if workers == self._place.size and not strong else None,
        )
        return got | {"bare": bare}

    def _show(self, workers: int, strong: bool, found: list[dict[str, float]]) -> None:
        whole = found[0]["whole"]
        steady, bare = (sum(each[name] for each in found) for name in ("rate", "bare"))
        if workers == 1 and not strong:
            self._one = {"whole": whole, "steady": steady, "bare": bare}

        def parts(name: str, value: float) -> str:
            share = value / (workers * self._one[name]) if self._one else math.nan
            return f"{value:,.0f} tokens/s ({share:.3f} of {workers} x one)"

        start, end = (max(each[name] for each in found) for name in ("start_s", "end_s"))
        cores = sum(each["cpu_s"] / each["seconds"] for each in found)
        peak = max(each["peak"] for each in found)
        loop = "" if strong else f"loop {parts('steady', steady)}, bare {parts('bare', bare)}, "
        print(
            f"{'strong' if strong else 'weak'} {workers}: {parts('whole', whole)}, {loop}"
            f"{found[0]['seconds']:.1f} s, of which at most {start:.1f} before a worker's first "
            f"batch and {end:.1f} since its last began, CPU {cores:.1f} cores, "
            f"{found[0]['gb_per_s']:.2f} GB/s, peak {peak / GB:.2f} GB",
            flush=True,
        )


def main() -> None:
    options = parse()
    place = place_in(os.environ) or Place()
    device = device_of(place)
    if place.size > 1:
        dist.init_process_group("gloo")
    if place.is_first:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        print(
            f"{name} x {place.size}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, Python {sys.version.split()[0]}, commit "
            f"{options.commit}, shape {options.shape}, {options.codec}, {options.batch} x "
            f"{options.length}, {options.units} units of {options.unit_packs} packs each",
            flush=True,
        )
    target = random_target(options.shape, device)
    use_fast_convolution(target)
    job = Job(options, place, target)
    # Kernels meet the shape before anything is timed.
    bare_rate(target, np.zeros((options.batch, options.length), np.int64), 1)
    counts = options.workers or powers_up_to(place.size)
    for workers in counts:
        job.run(workers)
    for workers in [each for each in counts if each > 1 and options.strong]:
        job.run(workers, strong=True)
    if place.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
