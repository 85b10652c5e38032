"""What codecs, tile skipping and FP8 do to acceptance: one recipe, many seeds, paired.

    python tests/benchmarks/bench_quality.py --store raw=URL --store int8=URL --store int4=URL
        --store int3=URL --out runs.jsonl [--seeds 10 --workers 12 --seconds 240]
    python tests/benchmarks/bench_quality.py --out runs.jsonl --seeds 0     (the table alone)

The stores hold the same samples. Drafters of one seed differ in what they read or compute with, not
in initial weights, sample order or anchors. All are judged on the same blocks of the `raw` store's
held-out samples, in bf16, as exported: serving has exact states, whatever a drafter was trained on.
Two measures: the mean over all blocks, and that over the blocks at which decoding would stand.
A second call goes on with the runs that are missing from --out, which gets a line for each.
"""

import argparse
import multiprocessing
import queue
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding_walk import every_block, walk
from quality_table import LEAST_SEEDS, RAW, table
from record_workers import read_records, written_records

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.kernels.linear_ce import LinearCE
from dflash_offline.kernels.linear_ce_skip import OrderedHead, linear_ce_skip, order_head
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.distributed import World
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate import AnchoredSample, BlockJudge
from dflash_offline.train.export import save_drafter
from dflash_offline.train.loop import train_step
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.order import StreamState
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.schedule import lr_factor
from dflash_offline.train.setup import Setup, prepare
from dflash_offline.train.stream import StepBuilder, Stream
from dflash_offline.train.target_head import TargetHead
from dflash_offline.train.token_shards import corpus_tokens

SKIP, FP8 = "skip", "fp8"
_JUDGED_ROWS = 32768
_LAST_STEPS = 50
# Longer than all kernels take to compile; then every process compiles its own.
_COMPILE_S = 120.0
# Samples read at a time; more of them would hold more packs in memory.
_READ_SAMPLES = 32


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", action="append", default=[], metavar="CODEC=URL")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, a line a run")
    parser.add_argument("--variants", nargs="+", help="of the stores' names, skip and fp8")
    parser.add_argument("--seeds", type=int, default=LEAST_SEEDS)
    parser.add_argument("--workers", type=int, default=12, help="processes, shared out to the GPUs")
    parser.add_argument("--seconds", type=float, default=3600, help="start no run that ends later")
    parser.add_argument("--held-out", default="", help="judge ids that begin so")
    parser.add_argument("--drafts", type=Path, help="keep the drafters of the first seed here")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--samples-per-step", type=int, default=8)
    parser.add_argument("--num-anchors", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    options.stores = dict(each.split("=", 1) for each in options.store)
    options.variants = options.variants or [*options.stores, SKIP, FP8]
    return options


@dataclass(frozen=True, kw_only=True)
class SkippingHead(TargetHead):
    """A head whose cross-entropy leaves out tiles of the vocabulary without mass."""

    ordered: OrderedHead

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor) -> LinearCE:
        result, _ = linear_ce_skip(
            states,
            self.ordered,
            labels,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            chunk_rows=self.chunk_rows,
        )
        return result


class Lab:
    """Trains and judges drafters in one process."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._raw = open_cache(options.stores[RAW])
        self._mask_token: int | None = None

    def setup(self, variant: str, seed: int) -> Setup:
        """Return a run that is ready for its first step."""
        options = self._options
        setup = prepare(
            TrainConfig(
                cache=(options.stores.get(variant, options.stores[RAW]),),
                out=options.out.parent / "unused",
                seed=seed,
                draft_layers=options.draft_layers,
                block_size=options.block_size,
                num_anchors=options.num_anchors,
                samples_per_step=options.samples_per_step,
                num_steps=options.steps,
                lr=options.lr,
                mask_token_id=self._mask_token,
                fp8="all" if variant == FP8 else "none",
            ),
            World(),
        )
        # Choosing it again for every run would read all tokens again.
        self._mask_token = setup.mask_token.id
        if variant != SKIP:
            return setup
        head = {field.name: vars(setup.head)[field.name] for field in fields(TargetHead)}
        ordered = order_head(setup.head.weight, self._counts.to(setup.device))
        return replace(setup, head=SkippingHead(**head, ordered=ordered))

    @cached_property
    def _counts(self) -> torch.Tensor:
        return count_tokens(self._raw)

    def warm_up(self, variant: str) -> None:
        """Compile every kernel, into Triton's cache on disk too."""
        setup = self.setup(variant, 0)
        setup.warm_up()
        self._judge(setup, self._held_out[:1])

    def run(self, variant: str, seed: int) -> dict[str, Any]:
        """Train and judge one drafter."""
        began = time.perf_counter()
        setup = self.setup(variant, seed)
        loss, wait_s = train(setup)
        trained = time.perf_counter()
        gains, drafter = self._judge(setup, self._held_out)
        if self._options.drafts is not None and seed == 0:
            save_drafter(drafter, self._options.drafts / variant)
        return {
            "variant": variant,
            "seed": seed,
            **self._measures(gains),
            "loss": loss,
            "train_s": trained - began,
            "data_wait_s": wait_s,
            "judge_s": time.perf_counter() - trained,
            "recipe": recipe(self._options),
        }

    def _measures(self, gains: Sequence[np.ndarray]) -> dict[str, Any]:
        sources: dict[str, list[np.ndarray]] = {}
        steps: list[int] = []
        for part, each in zip(self._held_out, gains, strict=True):
            sources.setdefault(part.document.source, []).append(each)
            steps += walk(part, each)
        return {
            "acceptance": float(np.concatenate(gains).mean()),
            "walked": float(np.mean(steps)),
            "by_source": {name: float(np.concatenate(g).mean()) for name, g in sources.items()},
            "prompts": len(gains),
            "blocks": sum(map(len, gains)),
            "steps_walked": len(steps),
        }

    def _judge(
        self, setup: Setup, parts: Sequence[AnchoredSample]
    ) -> tuple[list[np.ndarray], Drafter]:
        """Return tokens gained at every block of samples, and the drafter as it is exported."""
        drafter = Drafter(setup.drafter.config).to(setup.device, setup.dtype)
        drafter.load_state_dict(setup.drafter.state_dict())
        judge = BlockJudge(drafter, setup.head.embed, setup.head.weight)
        gains = []
        for group in _groups(parts, _JUDGED_ROWS // self._options.block_size):
            gains += [each.produced for each in judge.run(group)]
        return gains, drafter

    @cached_property
    def _held_out(self) -> list[AnchoredSample]:
        ids = self._raw.plan.column("id")
        wanted = [
            i for i in self._raw.held_out_samples if ids[i].startswith(self._options.held_out)
        ]
        parts = []
        for first in range(0, len(wanted), _READ_SAMPLES):
            documents = self._raw.read_many(wanted[first : first + _READ_SAMPLES])
            parts += [every_block(document) for document in documents]
        return parts


def count_tokens(cache: Cache) -> torch.Tensor:
    """Return how often every token occurs in the packs to train on, float32 [V]."""
    counts = torch.zeros(cache.schema.vocab_size)
    packs = set(cache.plan.column("pack")[cache.training_samples].tolist())
    for pack, tokens in zip(cache.packs, corpus_tokens(cache), strict=True):
        if pack in packs:
            counts += torch.bincount(torch.from_numpy(tokens).long(), minlength=len(counts))
    return counts


def _groups(parts: Sequence[AnchoredSample], most: int) -> Iterator[list[AnchoredSample]]:
    group: list[AnchoredSample] = []
    for part in parts:
        if group and sum(len(p.anchored.anchors) for p in [*group, part]) > most:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def train(setup: Setup) -> tuple[float, float]:
    """Train to the end; return the mean loss of the last steps and the seconds of data-wait."""
    config = setup.config
    optimizer = Optimizer(setup.drafter, weight_decay=config.weight_decay, betas=(0.9, 0.95))
    builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
    sizes = setup.samples_of_steps()
    stream = Stream(setup.order, builder, state=StreamState(), samples_per_step=sizes)
    clock, losses = PhaseClock(setup.device), []
    with stream:
        for step in range(1, config.num_steps + 1):
            given = stream.next()
            progress = (step - 1) / config.num_steps, step / config.num_steps
            factor = lr_factor(*progress, warmup_frac=config.warmup, kind=config.lr_schedule)
            totals, _, _ = train_step(setup, optimizer, given, lr=config.lr * factor, clock=clock)
            losses = [*losses[1 - _LAST_STEPS :], totals[0] / totals[1]]
    return float(torch.stack(losses).mean()), stream.wait_s


def recipe(options: Namespace) -> dict[str, Any]:
    """Return what decides a run's result beside its variant and seed."""
    names = (
        "steps", "samples_per_step", "num_anchors", "block_size", "draft_layers", "lr",
        "held_out",
    )  # fmt: skip
    return {name: vars(options)[name] for name in names}


def work(options: Namespace, until: float, tasks, results, warm) -> None:
    """Do tasks until none is left or the next would end too late; the first worker compiles."""
    torch.set_num_threads(1)
    lab = Lab(options)
    broken: set[str] = set()

    def attempt(variant: str, action: Callable[..., Any], *args: Any) -> Any:
        """Return what the action does; a variant that fails here is not tried here again."""
        try:
            return None if variant in broken else action(variant, *args)
        except BaseException:
            broken.add(variant)
            results.put(f"{variant}: {traceback.format_exc()}")

    # Many at a time would each compile the same kernels.
    if warm.is_first.acquire(block=False):
        for variant in options.variants:
            attempt(variant, lab.warm_up)
        warm.is_done.set()
    warm.is_done.wait(_COMPILE_S)
    took = 0.0
    while time.time() + took < until:
        began = time.time()
        try:
            variant, seed = tasks.get(timeout=1)
        except queue.Empty:
            return
        if record := attempt(variant, lab.run, seed):
            results.put(record)
            took = time.time() - began


@dataclass(frozen=True)
class Warm:
    """Who compiles, and whether that is over."""

    is_first: Any
    is_done: Any


def check_stores(options: Namespace) -> None:
    plans = {name: open_cache(url).plan for name, url in options.stores.items()}
    for name, plan in plans.items():
        for column in ("id", "content_hash", "pack", "start", "held_out"):
            if (plan.column(column) != plans[RAW].column(column)).any():
                raise SystemExit(f"store {name}: {column} of its samples is not that of raw's")


def run_all(options: Namespace) -> None:
    """Work off the missing runs, seed by seed, in several processes."""
    until = time.time() + options.seconds
    check_stores(options)
    done = {(each["variant"], each["seed"]) for each in read_runs(options)}
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for seed in range(options.seeds):
        for variant in options.variants:
            if (variant, seed) not in done:
                tasks.put((variant, seed))
    warm = Warm(context.Semaphore(1), context.Event())
    workers = [
        context.Process(target=work, args=(options, until, tasks, results, warm), daemon=True)
        for _ in range(options.workers)
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for record in written_records(workers, results, out=options.out, until=until):
        took = f"{record['train_s']:.1f} + {record['judge_s']:.1f} s"
        name = f"{record['variant']} {record['seed']}"
        print(f"{name}: {record['acceptance']:.4f}, loss {record['loss']:.3f}, {took}, data "
              f"wait {record['data_wait_s']:.1f} s", flush=True)  # fmt: skip


def read_runs(options: Namespace) -> list[dict[str, Any]]:
    """Return the runs of --out; all must be of one recipe."""
    records = read_records(options.out)
    for record in records:
        wanted = recipe(options) if options.seeds else records[0]["recipe"]
        if record["recipe"] != wanted:
            raise SystemExit(f"{options.out} has runs of {record['recipe']}, not {wanted}")
    return records


def main() -> None:
    options = parse()
    if options.seeds:
        run_all(options)
    records = read_runs(options)
    print("\n".join(table(records)) if records else "no run has ended")


if __name__ == "__main__":
    main()
