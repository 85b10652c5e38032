"""Time of a whole training step, data path and optimiser included, from a store on a RAM disk.

    python tests/benchmarks/bench_step.py --shape 8b --codec raw --steps 50

Random states and tokens in store format, every token supervised, decay cross-entropy; 5 layers with
32 query and 8 KV heads of 128, K = 5 captured layers, T = 16,384 tokens a pack in documents of
2,048 with 128 anchors each, B = 16. Model FLOPs: products and attention, each once forward and
twice backward, the frozen head once and once, nothing recomputed. Before anything is timed, the
gradient of one small pass is compared with that of float64 on the CPU.

A step's time is that between the ends of two steps on the GPU: nothing waits in between, as in
training.
"""

import argparse
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gradient_gate import check_gradient
from safetensors.numpy import save

from dflash_offline.common.cache import open_cache
from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.identity import Identity
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.quantize import EncodedStates, encode_states
from dflash_offline.common.store import LossMask, Plan, Sample, Schema
from dflash_offline.common.store_writer import Store
from dflash_offline.train.checkpoint import RunState
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.distributed import World
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.loop import train_step
from dflash_offline.train.mask_token import MaskToken
from dflash_offline.train.objective import Objective, decay_gamma
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.order import SampleOrder, StoreSamples, StreamState
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.setup import Setup
from dflash_offline.train.stream import StepBuilder, Stream
from dflash_offline.train.target_head import TargetHead

SHAPES = {
    "8b": (4096, 12288, 151936),
    "27b": (5120, 17408, 248320),
    "tiny": (256, 512, 999),  # shows that the script runs, on any machine
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = (1, 9, 17, 25, 33)
HEADS, KV_HEADS, HEAD_DIM, DRAFT_LAYERS = 32, 8, 128, 5
PACK_TOKENS, DATASHEET_TFLOPS = 16384, 989e12


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


def moment() -> torch.cuda.Event | float:
    """Return this moment of the device's stream, without waiting for it."""
    if DEVICE.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps before those measured")
    parser.add_argument("--packs", type=int, default=3)
    parser.add_argument("--packs-per-step", type=int, default=1)
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a document")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--profile", type=Path, help="write a Chrome trace of three steps")
    parser.add_argument("--fp8", choices=["none", "head", "all"], default="none")
    parser.add_argument("--rows-per-pass", type=int, default=16384)
    parser.add_argument("--commit", help="what to print where there is no git")
    return parser.parse_args()


def write_store(url: Path, options: argparse.Namespace, hidden: int, vocab: int) -> None:
    """Write packs of whole documents with normal states."""
    rng = np.random.default_rng(0)
    per_pack = PACK_TOKENS // options.document
    samples = [
        Sample(
            id=f"random:{i}",
            source="random",
            licence="",
            content_hash=str(i),
            length=options.document,
            supervised=options.document,
            pack=i // per_pack,
            start=i % per_pack * options.document,
            held_out=False,
        )
        for i in range(per_pack * options.packs)
    ]
    plan = Plan(
        samples=samples,
        batches=[[list(range(p * per_pack, (p + 1) * per_pack))] for p in range(options.packs)],
        num_packs=options.packs,
        num_held_out_packs=0,
        unit_packs=1,
    )
    schema = Schema(
        layers=LAYERS, hidden=hidden, vocab_size=vocab, pack_tokens=PACK_TOKENS, codec=options.codec
    )
    mask = np.full(options.document, LossMask.ASSISTANT, np.uint8)
    with Store.create_or_resume(
        str(url),
        schema=schema,
        identity=Identity(target={}, store={}, plan={}),
        plan=plan,
        tokens=[rng.integers(0, vocab - 1, s.length).astype(np.int32) for s in samples],
        masks=[mask] * len(samples),
        target_files={"config.json": b"{}", "tensors.safetensors": save({"norm.weight": mask})},
        options={},
    ) as store:
        shape = (len(LAYERS), PACK_TOKENS, hidden)
        if schema.codec.startswith("int"):
            calibrate(store, shape)
        for pack in range(options.packs):
            store.commit_pack(pack, coded(store, random_states(shape, pack), options.document))


def random_states(shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    states = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return states.view(torch.int16).cpu().numpy().view(np.uint16)


def coded(store: Store, states: np.ndarray, document: int) -> np.ndarray | EncodedStates:
    """Encode states where the store holds codes; on the device, as an extraction does."""
    if store.calibration is None:
        return states
    is_first = torch.arange(states.shape[1], device=DEVICE) % document == 0
    calibration = store.calibration.to(DEVICE)
    return encode_states(as_bfloat16(states).to(DEVICE), None, is_first, calibration).to("cpu")


def calibrate(store: Store, shape: tuple[int, ...]) -> None:
    rows = CalibrationRows()
    for seed in range(64):
        rows.add(as_bfloat16(random_states((shape[0], 128, shape[2]), 100 + seed)))
    store.write_calibration(rows.fit(store.schema.codec), {})


def make_setup(options: argparse.Namespace, url: Path) -> Setup:
    hidden, intermediate, vocab = SHAPES[options.shape]
    torch.manual_seed(0)
    embed, weight = (
        torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16) * hidden**-0.5
        for _ in range(2)
    )
    shape = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=vocab,
        rope_theta=1e6,
        block_size=options.block_size,
        mask_token_id=vocab - 1,
        target_layer_ids=LAYERS,
        num_target_layers=36,
    )
    cache = open_cache(str(url))
    per_pack = PACK_TOKENS // options.document
    config = TrainConfig(
        cache=(str(url),),
        out=url / "out",
        num_anchors=options.anchors,
        rows_per_pass=options.rows_per_pass,
        samples_per_step=per_pack * options.packs_per_step,
        num_steps=options.steps + options.warmup,
    )
    wanted = cache.training_samples
    samples = StoreSamples(indices=wanted, packs=cache.plan.column("pack")[wanted])
    head, drafter = TargetHead(embed=embed, weight=weight), new_drafter(shape)
    if options.fp8 != "none":
        head = head.with_fp8()
    if options.fp8 == "all":
        drafter.use_fp8()
    return Setup(
        config=config,
        world=World(),
        device=DEVICE,
        dtype=torch.bfloat16,
        caches=[cache],
        wanted=[wanted],
        head=head,
        drafter=drafter,
        mask_token=MaskToken(id=vocab - 1, reason="last row"),
        objective=Objective(loss="decay", gamma=decay_gamma(options.block_size)),
        order=SampleOrder([samples], 0),
        num_steps=config.num_steps,
        total_samples=None,
        state=RunState(),
        checkpoint=None,
    )


def new_drafter(shape: DrafterConfig) -> Drafter:
    """Draw weights on the device, which takes seconds less than `Drafter.initialise`."""
    with torch.device(DEVICE):
        drafter = Drafter(shape)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=shape.initializer_range)
    return drafter


def step_flops(options: argparse.Namespace) -> float:
    """Return the model FLOPs of one step."""
    hidden, intermediate, vocab = SHAPES[options.shape]
    documents = PACK_TOKENS // options.document * options.packs_per_step
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


def measure(setup: Setup, options: argparse.Namespace) -> None:
    optimizer = Optimizer(setup.drafter, weight_decay=0.0, betas=(0.9, 0.95))
    setup.warm_up()
    builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
    stream = Stream(
        setup.order, builder, state=StreamState(), samples_per_step=setup.samples_of_steps()
    )
    clock, ends, given = PhaseClock(setup.device), [], None
    with stream:
        for step in range(options.steps + options.warmup):
            if step == options.warmup:
                synchronize()
                reset_peak()
                clock.take()
                ends.append(moment())
                began, waited = time.perf_counter(), stream.wait_s
            given = stream.next()
            totals, _norm, _skipped = train_step(setup, optimizer, given, lr=1e-4, clock=clock)
            if step >= options.warmup:
                ends.append(moment())
        synchronize()
        total, wait = time.perf_counter() - began, stream.wait_s - waited
    assert given is not None
    times = [seconds_between(a, b) for a, b in itertools.pairwise(ends)]
    median = statistics.median(times)
    flops = step_flops(options)
    tokens = PACK_TOKENS * options.packs_per_step
    loss = (totals[0] / totals[1]).item()
    print(
        f"{options.shape} {options.codec} fp8 {options.fp8}: {1e3 * median:.1f} ms a step "
        f"(median of {len(times)}), "
        f"{flops / 1e12:.0f} TFLOP, {flops / median / 1e12:.0f} TFLOP/s "
        f"({flops / median / DATASHEET_TFLOPS:.1%} of the datasheet), "
        f"{tokens / median:,.0f} context tokens/s, "
        f"{given.num_rows / median:,.0f} supervised rows/s, "
        f"peak {peak_bytes() / 1e9:.1f} GB, "
        f"data wait {wait / total:.1%}, mean {1e3 * total / len(times):.1f} ms, loss {loss:.3f}"
    )
    seconds = clock.take()
    print({name: f"{1e3 * value / len(times):.1f} ms" for name, value in seconds.items() if value})
    if options.profile:
        profile(setup, optimizer, options.profile)


def profile(setup: Setup, optimizer: Optimizer, path: Path) -> None:
    """Print the kernels that take the most time in three steps."""
    builder = StepBuilder(setup.caches, setup.stream_options, setup.wanted)
    clock = PhaseClock(setup.device)
    draws, state = setup.order.take(StreamState(), setup.config.samples_per_step)
    given = builder.build(draws, state)
    with torch.profiler.profile() as trace:
        for _ in range(3):
            train_step(setup, optimizer, given, lr=1e-4, clock=clock)
        synchronize()
    print(
        trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=60
        )
    )
    trace.export_chrome_trace(str(path))


def main() -> None:
    options = parse()
    hidden, _, vocab = SHAPES[options.shape]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(command, capture_output=True, text=True).stdout
    print(
        f"{device_name()}, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, commit {commit.strip() or 'unknown'}"
    )
    check_gradient(DEVICE)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        began = time.perf_counter()
        write_store(folder / "store", options, hidden, vocab)
        print(f"store written in {time.perf_counter() - began:.1f} s")
        measure(make_setup(options, folder / "store"), options)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
