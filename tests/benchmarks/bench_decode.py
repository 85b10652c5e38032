"""Acceptance length by real speculative decoding: ours, z-lab's package, and what a store says.

    python tests/benchmarks/bench_decode.py --target DIR --store URL --out decoded.jsonl
        --job run/draft:ours:bfloat16:300 --job run/draft:zlab:bfloat16:100 [--svg curve.svg]

A job is a drafter, an engine, a dtype and a number of prompts. Engines: ours, zlab (the package
`dflash`), alone (the target, token by token), store (the stored answer, judged without the target
at the blocks where decoding would stand). Prompts are those of the store's held-out samples, in one
mixed order, so that jobs share their first ones. Jobs are worked off in the order given, by several
processes; a second call goes on. `state.json` in a drafter's folder tells when it was reached.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import queue
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding_walk import every_block, walk
from record_workers import read_records, written_records

from dflash_offline.common.cache import open_cache
from dflash_offline.common.chat import stop_token_ids
from dflash_offline.common.store import supervised
from dflash_offline.common.target import Target, load_target, load_tokenizer
from dflash_offline.train.decode import SpeculativeDecoder, decode_greedy
from dflash_offline.train.evaluate import BlockJudge
from dflash_offline.train.export import load_drafter, load_drafter_config
from dflash_offline.train.plots import Curve, line_plot

ENGINES = ("ours", "zlab", "alone", "store")
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Prompts to decode in one way."""

    draft: str
    engine: str
    dtype: str
    prompts: int

    @classmethod
    def parse(cls, text: str) -> "Job":
        draft, engine, dtype, prompts = text.rsplit(":", 3)
        if engine not in ENGINES:
            raise argparse.ArgumentTypeError(f"{engine} is none of {', '.join(ENGINES)}")
        return cls(draft, engine, dtype, int(prompts))


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="the folder or file that the store was made with")
    parser.add_argument("--store", help="raw, with held-out samples that were written greedily")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, a line an answer")
    parser.add_argument(
        "--job", type=Job.parse, action="append", default=[], metavar="DRAFT:ENGINE:DTYPE:PROMPTS"
    )
    parser.add_argument("--held-out", default="", help="use ids that begin so")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=12, help="processes, shared out to the GPUs")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no answer later")
    parser.add_argument("--svg", type=Path, help="draw acceptance over minutes here")
    return parser.parse_args()


class Desk:
    """Target, drafters and prompts in one process."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._cache = open_cache(options.store)
        self._tokenizer = load_tokenizer(options.target)

    @cached_property
    def samples(self) -> list[int]:
        """Held-out samples of the store, mixed."""
        ids = self._cache.plan.column("id")
        found = [
            i for i in self._cache.held_out_samples if ids[i].startswith(self._options.held_out)
        ]
        return sorted(found, key=lambda i: hashlib.sha256(ids[i].encode()).digest())

    def answer(self, job: Job, number: int) -> Record:
        """Do one prompt of a job."""
        index = self.samples[number]
        sample = self._cache.plan.samples[index]
        began = time.perf_counter()
        engine: Callable[[Job, int], Record] = {
            "ours": self._ours,
            "zlab": self._zlab,
            "alone": self._alone,
            "store": self._store,
        }[job.engine]
        result = engine(job, index)
        state = Path(job.draft) / "state.json"
        return {
            "draft": job.draft,
            "engine": job.engine,
            "dtype": job.dtype,
            "number": number,
            "id": sample.id,
            "source": sample.source,
            "limit": self._options.max_new_tokens,
            "block_size": load_drafter_config(Path(job.draft)).block_size,
            "trained_s": json.loads(state.read_text())["elapsed_s"] if state.exists() else None,
            **result,
            "seconds": time.perf_counter() - began,
        }

    def _prompt(self, index: int) -> list[int]:
        """Return the tokens before the first one that the target wrote."""
        document = self._cache.read(index, layers=self._cache.schema.layers[:1])
        return document.tokens[: int(np.argmax(supervised(document.loss_mask, "all")))].tolist()

    def _ours(self, job: Job, index: int) -> Record:
        target, stop = self._target(job.dtype)
        with SpeculativeDecoder(target, self._drafter(job.draft, job.dtype)) as decoder:
            decoded = decoder.decode(
                self._prompt(index), max_new_tokens=self._options.max_new_tokens, stop_ids=stop
            )
        return _record(decoded.tokens, [cycle.produced for cycle in decoded.cycles])

    def _alone(self, job: Job, index: int) -> Record:
        target, stop = self._target(job.dtype)
        limit = self._options.max_new_tokens
        decoded = decode_greedy(target, self._prompt(index), max_new_tokens=limit, stop_ids=stop)
        return _record(decoded.tokens, [1] * (len(decoded.tokens) - 1))

    def _zlab(self, job: Job, index: int) -> Record:
        import dflash.model as zlab

        if self._device == "cpu":
            # Its statistics wait for a GPU even where there is none.
            zlab._cuda_time = time.perf_counter
        target, stop = self._target(job.dtype)
        prompt = self._prompt(index)
        stats = zlab.dflash_generate(
            self._zlab_drafter(job.draft, job.dtype),
            target=target.causal,
            input_ids=torch.tensor([prompt], device=self._device),
            max_new_tokens=self._options.max_new_tokens,
            stop_token_ids=list(stop),
            return_stats=True,
        )
        return _record(stats.output_ids[0, len(prompt) :].tolist(), stats.acceptance_lengths)

    def _store(self, job: Job, index: int) -> Record:
        drafter = self._drafter(job.draft, job.dtype)
        target, _ = self._target(job.dtype)
        judge = BlockJudge(drafter, target.embed_weight(), target.head_weight())
        sample = every_block(self._cache.read(index, drafter.config.target_layer_ids))
        (gains,) = judge.run([sample])
        limit = self._options.max_new_tokens
        answer = sample.anchored.tokens[sample.anchored.supervised][:limit].tolist()
        return _record(answer, list(walk(sample, gains.produced, limit)))

    @lru_cache(maxsize=2)  # noqa: B019 (one desk a process)
    def _target(self, dtype: str) -> tuple[Target, Sequence[int]]:
        target = load_target(
            self._options.target, dtype=torch_dtype(dtype), device=self._device, head=True
        )
        return target, stop_token_ids(self._tokenizer, target.generation_config)

    @lru_cache(maxsize=4)  # noqa: B019
    def _drafter(self, draft: str, dtype: str) -> Any:
        return load_drafter(Path(draft), torch_dtype(dtype), self._device)

    @lru_cache(maxsize=2)  # noqa: B019
    def _zlab_drafter(self, draft: str, dtype: str) -> Any:
        from dflash.model import DFlashDraftModel

        model = DFlashDraftModel.from_pretrained(draft, dtype=torch_dtype(dtype))
        return model.to(self._device).eval()


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _record(tokens: Sequence[int], produced: Sequence[int]) -> Record:
    produced = [int(each) for each in produced]
    return {
        "tokens": list(tokens),
        "produced": produced,
        "gained": sum(produced),
        "cycles": len(produced),
    }


def work(options: Namespace, until: float, tasks, results) -> None:
    try:
        torch.set_num_threads(1)
        desk = Desk(options)
        while time.time() < until:
            job, number = tasks.get(timeout=1)
            if number < len(desk.samples):
                results.put(desk.answer(job, number))
    except queue.Empty:
        pass
    except BaseException:
        results.put(traceback.format_exc())
        raise


def run_all(options: Namespace, done: set[tuple]) -> None:
    """Work off what is missing, each answer written as it ends."""
    until = time.time() + options.seconds
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for job in options.job:
        for number in range(job.prompts):
            if (job.draft, job.engine, job.dtype, number) not in done:
                tasks.put((job, number))
    workers = [
        context.Process(target=work, args=(options, until, tasks, results), daemon=True)
        for _ in range(options.workers)
    ]
    for _ in written_records(workers, results, out=options.out, until=until):
        pass


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and sentences that compare engines."""
    by_job: dict[tuple[str, str, str], dict[int, Record]] = {}
    for each in records:
        key = each["draft"], each["engine"], each["dtype"]
        by_job.setdefault(key, {})[each["number"]] = each
    yield "| drafter | minutes | engine | dtype | prompts | target steps | acceptance length |"
    yield "|---|---|---|---|---|---|---|"
    for (draft, engine, dtype), found in by_job.items():
        some = list(found.values())
        minutes = "" if some[0]["trained_s"] is None else f"{some[0]['trained_s'] / 60:.2f}"
        cycles = f"{sum(each['cycles'] for each in some):,}"
        mean, error = acceptance(some)
        yield (
            f"| {draft} | {minutes} | {engine} | {dtype} | {len(some)} | {cycles} | "
            f"{mean:.3f} ± {1.96 * error:.3f} |"
        )
    for (draft, engine, dtype), found in by_job.items():
        other = by_job.get((draft, {"ours": "alone"}.get(engine, "ours"), dtype))
        if other and engine == "zlab":
            yield f"{draft}, {dtype}: {same_gains(other, found, engine)}"
        elif other and engine == "store":
            # Text that was read back as other tokens, or parted at equal logits, says nothing.
            same = {
                n: r for n, r in found.items() if n in other and r["tokens"] == other[n]["tokens"]
            }
            if same:
                yield f"{draft}, {dtype}, where the text is the same: " + same_gains(
                    other, same, engine
                )
        elif other and engine == "ours":
            yield f"{draft}, {dtype}: {same_tokens(other, found)}"
    yield from by_source(by_job)


def acceptance(records: Sequence[Record]) -> tuple[float, float]:
    """Return tokens gained per target step, and its standard error over prompts."""
    cycles = sum(each["cycles"] for each in records)
    mean = sum(each["gained"] for each in records) / cycles
    squares = sum((each["gained"] - mean * each["cycles"]) ** 2 for each in records)
    return mean, math.sqrt(squares) / cycles


def by_source(by_job: dict[tuple[str, str, str], dict[int, Record]]) -> Iterator[str]:
    for name, found in by_job.items():
        sources: dict[str, list[Record]] = {}
        for each in found.values():
            sources.setdefault(each["source"], []).append(each)
        means = (f"{source} {acceptance(some)[0]:.2f}" for source, some in sorted(sources.items()))
        yield f"{':'.join(name)}: {', '.join(means)}"


def whole_blocks(record: Record) -> list[int]:
    """Return the gains of blocks that end before the limit; engines shorten the others apart."""
    starts = np.cumsum([0, *record["produced"]])[:-1]
    fits = starts + record["block_size"] <= record["limit"]
    return [gain for gain, fit in zip(record["produced"], fits, strict=True) if fit]


def same_gains(ours: dict[int, Record], others: dict[int, Record], name: str) -> str:
    common = sorted(ours.keys() & others.keys())
    pairs = [(whole_blocks(ours[n]), whole_blocks(others[n])) for n in common]
    equal = sum(a == b for a, b in pairs)
    means = [sum(map(sum, side)) / max(1, sum(map(len, side))) for side in zip(*pairs, strict=True)]
    return (
        f"gains of {name} are those of ours, block by block, in {equal} of {len(common)} answers, "
        f"their mean {means[1]:.4f} against {means[0]:.4f} ({means[1] / means[0] - 1:+.2%})"
    )


def same_tokens(alone: dict[int, Record], ours: dict[int, Record]) -> str:
    common = sorted(ours.keys() & alone.keys())
    equal = sum(alone[n]["tokens"] == ours[n]["tokens"] for n in common)
    return f"{equal} of {len(common)} answers are the target's own, token by token"


def draw(records: Sequence[Record], path: Path) -> None:
    """Write acceptance over minutes of training, by engine, as SVG."""
    points: dict[str, dict[float, list[Record]]] = {}
    for each in records:
        if each["trained_s"] is not None and each["engine"] in ("ours", "store"):
            engine = points.setdefault(each["engine"], {})
            engine.setdefault(each["trained_s"] / 60, []).append(each)
    labels = {"ours": "decoded", "store": "from the store"}
    curves = [
        Curve(
            label=labels[engine],
            steps=sorted(found),
            values=[acceptance(found[minutes])[0] for minutes in sorted(found)],
        )
        for engine, found in points.items()
    ]
    svg = line_plot(
        "acceptance over training",
        curves,
        xlabel="minutes of training",
        ylabel="acceptance length",
        has_markers=True,
    )
    path.write_text(svg)


def main() -> None:
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["draft"], r["engine"], r["dtype"], r["number"]) for r in read_records(options.out)}
    if options.job:
        run_all(options, done)
    records = read_records(options.out)
    print("\n".join(table(records)) if records else "no answer has ended")
    if options.svg is not None and records:
        draw(records, options.svg)


if __name__ == "__main__":
    main()
