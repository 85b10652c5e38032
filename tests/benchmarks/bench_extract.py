"""Extraction against the bare forward of the same batches, to a store on a RAM disk.

    python tests/benchmarks/bench_extract.py --shape 8b --codec int8 raw lossless
    torchrun --standalone --nproc-per-node 2 tests/benchmarks/bench_extract.py --codec int8

Random weights, random tokens; 5 captured layers and the final state. Equal lengths are 8 x 2,048
tokens a batch; real ones are log-normal with mean 800, cut at 4,096, at --batch-tokens 32768. A
rate counts from the second unit on, until the last batch: by then kernels have met every shape, and
the disk has to keep up, or the bounded queues hold the forward up. The time with the last unit's
commits is given beside it. States read back from each store are compared with a forward of their
batch.
"""

import argparse
import gc
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from random_plans import PACK_TOKENS, make_plan, real_lengths
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from dflash_offline.common import target as target_module
from dflash_offline.common.cache import open_cache
from dflash_offline.common.checkpoint_files import Checkpoint
from dflash_offline.common.identity import Identity
from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.progress import JsonLog
from dflash_offline.common.store import Plan, Schema
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target
from dflash_offline.extract.calibrate import calibrate
from dflash_offline.extract.crew import Crew
from dflash_offline.extract.fast_path import use_fast_convolution
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.memory_model import memory_model
from dflash_offline.extract.meta_forward import forward_cost
from dflash_offline.extract.pipeline import num_writers
from dflash_offline.extract.place import Place, place_in
from dflash_offline.extract.plan import frequent_shapes
from dflash_offline.extract.self_check import report, self_check
from dflash_offline.extract.stop_request import StopRequest
from dflash_offline.extract.worker import Worker, unfinished_units

SHAPES = {
    "8b": Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "27b": Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    # Shows that the script runs, on any machine.
    "tiny": Qwen3Config(
        vocab_size=999,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
}
GB = 1e9
CONVOLUTION = "causal_conv1d_fn"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--codec", nargs="*", default=["int8", "raw", "lossless"])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch")
    parser.add_argument("--unit-packs", type=int, default=8)
    parser.add_argument("--units", type=int, default=4, help="for each worker")
    parser.add_argument("--real", help="codec of a run with real lengths, units of 16 packs")
    parser.add_argument("--cap-gb", type=float, help="memory that PyTorch may take of the GPU")
    parser.add_argument("--budget", type=int, help="tokens of two large batches at the end")
    parser.add_argument("--ram-disk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--grow-gb", type=int, default=0, help="touch this much memory first")
    parser.add_argument("--commit", default="unknown")
    return parser.parse_args()


class Timed(StateForward):
    """Notes when every batch begins."""

    calls: list[tuple[float, int]]

    def states(self, samples: Sequence[np.ndarray], out: torch.Tensor) -> torch.Tensor:
        self.calls.append((time.perf_counter(), sum(map(len, samples))))
        return super().states(samples, out)

    def rate(self, first: int) -> float:
        """Return tokens a second from one batch to the last."""
        # Of several workers a slow one may get little, or nothing.
        if len(self.calls) < 2:
            return float("nan")
        first = min(first, len(self.calls) - 2)
        began, ended = self.calls[first][0], self.calls[-1][0]
        return sum(tokens for _, tokens in self.calls[first:-1]) / (ended - began)


def device_of(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_target(shape: str, device: torch.device) -> Target:
    """Make a target on its device, as loading a checkpoint without its head does."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        causal = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    causal.eval().requires_grad_(False)
    causal.get_output_embeddings().to("cpu")
    nowhere = Checkpoint(given="random", where="random", revision=None)
    return target_module._describe(
        nowhere, causal, device=device, dtype=dtype, head=False, shared_by=1
    )


def compare_convolutions(target: Target, ids: np.ndarray) -> None:
    """Show the bare forward with transformers' short convolutions and with ours, in turns."""
    modeling = vars(sys.modules[type(target.base).__module__])
    own = modeling.get(CONVOLUTION)
    if not use_fast_convolution(target):
        return
    versions = {"transformers'": own, "fla's": modeling[CONVOLUTION]}
    rates: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(3):
        for name, version in versions.items():
            modeling[CONVOLUTION] = version
            rates[name].append(bare_rate(target, ids, 1))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, version in versions.items():
        modeling[CONVOLUTION] = version
        print(
            f"convolutions {name}: {medians[name]:,.0f} tokens/s, "
            f"{convolution_share(target, ids):.1%} of the time on the GPU",
            flush=True,
        )
    gain = medians["fla's"] / medians["transformers'"]
    print(f"fla's convolutions: {gain:.3f} x the forward with transformers'", flush=True)


@torch.inference_mode()
def convolution_share(target: Target, ids: np.ndarray) -> float:
    """Return the share of a forward's time on the GPU that passes inside the function."""
    modeling = vars(sys.modules[type(target.base).__module__])
    inner, spans = modeling[CONVOLUTION], []

    def timed(*args, **more):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = inner(*args, **more)
        end.record()
        spans.append((begin, end))
        return result

    modeling[CONVOLUTION] = timed
    whole = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    whole[0].record()
    target.base(input_ids=torch.from_numpy(ids).to(target.device), use_cache=False)
    whole[1].record()
    synchronize()
    modeling[CONVOLUTION] = inner
    return sum(a.elapsed_time(b) for a, b in spans) / whole[0].elapsed_time(whole[1])


@torch.inference_mode()
def bare_rate(target: Target, ids: np.ndarray, count: int) -> float:
    """Return tokens a second of the base model alone."""
    batch = torch.from_numpy(ids).to(target.device)
    for _ in range(2):
        target.base(input_ids=batch, use_cache=False)
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        target.base(input_ids=batch, use_cache=False)
    synchronize()
    return count * ids.size / (time.perf_counter() - began)


def extract(
    options: argparse.Namespace,
    target: Target,
    place: Place,
    *,
    codec: str,
    plan: Plan,
    tokens: list[np.ndarray],
    first: int,
    keep: Path | None = None,
) -> dict[str, float]:
    """Extract a plan into a new store; returns rates, peak memory and CPU seconds.

    Args:
        first: batch from which on a rate counts.
        keep: where the store stays.
    """
    layers = resolve_layers("auto:5", target.num_layers)
    schema = Schema(
        layers=layers,
        hidden=target.hidden_size,
        vocab_size=target.vocab_size,
        pack_tokens=PACK_TOKENS,
        codec=codec,
        teacher="final",
    )
    folder = (
        options.ram_disk / f"bench-extract-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    )
    reset_peak()
    with (
        StopRequest() as stop,
        Crew(place, stop, device=str(target.device)) as crew,
        tempfile.TemporaryDirectory() as logs,
        Timed(target, layers, keep_final=True, frequent_shapes=frequent_shapes(plan)) as forward,
    ):
        forward.calls = []
        if place.is_first:
            shutil.rmtree(folder, ignore_errors=True)
            store = Store.create_or_resume(
                str(folder),
                schema=schema,
                identity=Identity(target={}, store={}, plan={}),
                plan=plan,
                tokens=tokens,
                masks=[np.ones(len(each), np.uint8) for each in tokens],
                target_files={"config.json": b"{}"},
                options={},
            )
            calibrate(store, forward, target, seed=0, batch_tokens=PACK_TOKENS)
            units = unfinished_units(store)
            crew.publish("units", [units, store.claim])
        else:
            units, claim = crew.expect("units")
            store = Store.join(str(folder), claim=claim)
        forward.calls = []
        log = JsonLog(Path(logs) / "log.jsonl")
        worker = Worker(
            store,
            forward,
            crew,
            stop,
            log=log,
            run_info={},
            writers=num_writers(place.local_size),
        )
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        if place.is_first:
            total = worker.lead(crew.shares(units, "taken"))
        else:
            worker.follow(crew.shares(units, "taken"))
            total = None
        seconds = time.perf_counter() - began
        peak = peak_bytes()
        used = resource.getrusage(resource.RUSAGE_SELF)
        store.close()
        log.close()
    if place.is_first:
        check_content(folder, target, plan, tokens)
    cpu_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    if place.is_first and keep:
        folder.rename(keep)
    elif place.is_first:
        shutil.rmtree(folder)
    result = {
        "rate": forward.rate(first),
        "start_s": forward.calls[0][0] - began if forward.calls else 0.0,
        "end_s": began + seconds - forward.calls[-1][0] if forward.calls else seconds,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak": peak,
        "predicted": predicted_bytes(schema, target, plan),
        "tokens": sum(n for _, n in forward.calls),
    }
    if total is not None:
        result |= {
            "whole": total.tokens / total.seconds,
            "padded": total.padded_frac,
            "splits": total.splits,
            "gb_per_s": total.written_bytes / total.seconds / GB,
        }
    return result


def predicted_bytes(schema: Schema, target: Target, plan: Plan) -> int:
    """Return what the command would have said that it takes of the GPU."""
    lengths = plan.column("length")
    batches = [lengths[batch] for unit in plan.batches for batch in unit]
    padded = max(len(each) * int(each.max()) for each in batches)
    cost = forward_cost(
        target.config,
        target=target.checkpoint.given,
        dtype=target.dtype,
        num_tokens=padded,
        max_length=int(lengths.max()),
    )
    model = memory_model(
        schema,
        cost,
        dtype=target.dtype,
        batch_tokens=padded,
        pool_packs=plan.unit_packs,
        num_workers=1,
        on_gpu=True,
    )
    return sum(model.device.values())


def check_content(folder: Path, target: Target, plan: Plan, tokens: list[np.ndarray]) -> None:
    """Compare the states of one batch with those of its forward, in the same shape."""
    cache = open_cache(str(folder))
    batch = plan.batches[-1][0]
    shapes, layers = frequent_shapes(plan), cache.schema.layers
    with StateForward(target, layers, keep_final=True, frequent_shapes=shapes) as forward:
        wanted = forward([tokens[i] for i in batch])
    bound = 0.02 if cache.schema.is_coded else 0.0
    first = 0
    for index, document in zip(batch, cache.read_many(batch), strict=True):
        rows = slice(first, first + len(tokens[index]))
        first = rows.stop
        for ours, theirs in (
            (document.features, wanted.features[:, rows]),
            (document.final[None], wanted.final[None, rows]),
        ):
            a, b = as_bfloat16(np.ascontiguousarray(ours)).float(), as_bfloat16(theirs).float()
            error = float((a - b).norm() / b.norm())
            assert error <= bound, f"sample {index} differs by {error}"


def grow_memory(gigabytes: int) -> None:
    """Touch memory from many threads; a virtual machine may get it only then, and slowly."""
    began = time.perf_counter()

    def touch() -> None:
        np.ones(1 << 27, np.float64)

    threads = [threading.Thread(target=touch) for _ in range(gigabytes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"touched {gigabytes} GiB in {time.perf_counter() - began:.1f} s", flush=True)


def main() -> None:
    options = parse()
    place = place_in(os.environ) or Place()
    device = device_of(place)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{name} x {place.size}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, commit {options.commit}, shape {options.shape}, "
        f"{options.batch} x {options.length}, units of {options.unit_packs} packs",
        flush=True,
    )
    if options.cap_gb and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gb * GB / whole, device)
    if options.grow_gb and place.local_rank == 0:
        grow_memory(options.grow_gb)
    target = random_target(options.shape, device)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, target.vocab_size, (options.batch, options.length))
    checked = [ids[0, :n].astype(np.int32) for n in (3, 17, 40, 200)]
    layers = resolve_layers("auto:5", target.num_layers)
    report(self_check(target, layers, checked))
    if device.type == "cuda" and options.codec:
        compare_convolutions(target, ids[:4])
    reset_peak()
    per_unit = options.unit_packs * PACK_TOKENS // (options.batch * options.length)
    bare_rate(target, ids, 2)
    bare_peak = peak_bytes()
    num_packs = options.units * options.unit_packs * place.size
    lengths = [options.length] * (num_packs * PACK_TOKENS // options.length)
    plan, tokens = make_plan(
        lengths,
        unit_packs=options.unit_packs,
        batch_tokens=options.batch * options.length,
        vocab=target.vocab_size,
    )
    bare = bare_rate(target, ids, 2 * per_unit)
    print(f"bare        {bare:9,.0f} tokens/s, peak {bare_peak / GB:.2f} GB", flush=True)
    for number, codec in enumerate(options.codec):
        # Workers meet anew for each store, as after a restart.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        got = extract(options, target, place, codec=codec, plan=plan, tokens=tokens, first=per_unit)
        again = bare_rate(target, ids, per_unit)
        show(codec, got, (bare + again) / 2, bare_peak)
        bare = again
    if options.real:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(options.codec))
        plan, tokens = make_plan(
            real_lengths(32), unit_packs=16, batch_tokens=32768, vocab=target.vocab_size
        )
        got = extract(
            options,
            target,
            place,
            codec=options.real,
            plan=plan,
            tokens=tokens,
            first=len(plan.batches[0]),
        )
        show(f"real {options.real}", got, bare, bare_peak)
    if options.budget:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(options.codec) + 1)
        count = options.budget // options.length
        plan, tokens = make_plan(
            2 * count * [options.length],
            unit_packs=2 * options.budget // PACK_TOKENS,
            batch_tokens=options.budget,
            vocab=target.vocab_size,
        )
        got = extract(options, target, place, codec="int8", plan=plan, tokens=tokens, first=0)
        print(f"2 batches of {count} x {options.length}: {got['splits']} split", flush=True)
        show("int8", got, bare, bare_peak)


def show(codec: str, got: dict[str, float], bare: float, bare_peak: int) -> None:
    line = (
        f"{codec:11s} {got['rate']:9,.0f} tokens/s, {got['rate'] / bare:.3f} x bare {bare:,.0f}; "
        f"{got['seconds']:.1f} s in all, CPU {got['cpu_s'] / got['seconds']:.1f} cores, "
        f"peak {got['peak'] / GB:.2f} GB, {got['peak'] / got['predicted']:.3f} of the predicted "
        f"{got['predicted'] / GB:.2f} (bare {bare_peak / GB:.2f})"
    )
    if "whole" in got:
        line += (
            f"; all workers {got['whole']:,.0f} tokens/s with the last commits, "
            f"{got['gb_per_s']:.2f} GB/s, padded {got['padded']:.1%}"
        )
    print(line, flush=True)


if __name__ == "__main__":
    main()
