"""Loss heads against their matrix products alone, and against peers, on one GPU.

    python tests/benchmarks/bench_loss.py [--only ce,kl,topk,fp8,skip] [--load-s 10]

Checks values and gradients first. Times are medians of whole steps (forward and backward) in CUDA
events behind a queue, as in training; what is compared runs alternately in one loop after
`--load-s` seconds of load, because the card slows down under load. "Products" are torch.mm calls of
the same chunks and nothing else. Peak memory is what a step takes beyond its inputs, kept buffers
included.

`fp8` and `skip` use logits like those of a drafter that has learned: token frequencies fall as
rank^-1.2, logits spread by 1.5 around them, and each row's label is raised by 0 to 16. At a
vocabulary of 49,152 that gives a loss of 3.3 and keeps 19 % of the tiles at a mass of 1e-3, where a
DFlash drafter of SmolLM2-135M keeps 14 % at a loss of 3.6.
"""

import argparse
import statistics
import sys
import time

import torch
from gpu_timing import heading, revision, timed_ms
from torch.utils.checkpoint import checkpoint

from dflash_offline.kernels.linear_ce import linear_ce
from dflash_offline.kernels.linear_ce_fp8 import linear_ce_fp8, quantize_head
from dflash_offline.kernels.linear_ce_skip import linear_ce_skip, order_head
from dflash_offline.kernels.linear_kl import linear_kl
from dflash_offline.kernels.linear_kl_topk import linear_kl_topk
from dflash_offline.kernels.logit_chunks import chunk_bounds, release_buffers
from dflash_offline.kernels.reference_loss import linear_ce as reference_ce

SHAPES = [(8192, 4096, 151_936), (16_384, 5120, 248_320)]
LABEL_RAISE, SPREAD, FREQUENCY_POWER = 16.0, 1.5, 1.2


def alternate(runs: dict, *, repeats: int, load_s: float) -> dict[str, float]:
    """Return median ms of each run, taken in turns after load_s seconds of all of them."""
    end = time.monotonic() + load_s
    while True:
        for run in runs.values():
            run()
        torch.cuda.synchronize()
        if time.monotonic() > end:
            break
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(timed_ms(run))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(run) -> float:
    release_buffers()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


class Problem:
    """Random bf16 rows, head, labels and row weights of one shape."""

    def __init__(self, shape, *, learned=False, label_raise=LABEL_RAISE):
        rows, hidden, columns = self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size):
            return torch.randn(*size, device="cuda", generator=generator, dtype=torch.bfloat16)

        self.weight = normal(columns, hidden).mul_(hidden**-0.5)
        self.x = normal(rows, hidden)
        self.labels = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
        self.mass = torch.ones(columns, device="cuda")
        if learned:
            self._learn(generator, label_raise)
        self.x.requires_grad_()
        self.weights = torch.exp(-(torch.arange(rows, device="cuda") % 16).float() / 7)

    def _learn(self, generator, label_raise):
        """Give tokens frequencies in a random order, and every row a label that it knows."""
        rows, _, columns = self.shape
        bias = -FREQUENCY_POWER * torch.log(torch.arange(columns, device="cuda") + 10.0)
        bias = bias[torch.randperm(columns, device="cuda", generator=generator)]
        self.mass = torch.softmax(bias, dim=0)
        self.labels = torch.multinomial(self.mass, rows, replacement=True, generator=generator)
        # Channel 0 carries the frequency, channel 1 what all rows of the head share.
        self.weight[:, 0] = bias - bias.mean()
        self.weight[:, 1] = 0.5
        self.x.mul_(SPREAD)
        self.x[:, 0] = 1.0
        known = self.weight[self.labels].float()
        known[:, 0] = 0
        raised = torch.rand(rows, 1, device="cuda", generator=generator) * label_raise
        self.x += (raised * known / known.square().sum(dim=1, keepdim=True)).bfloat16()

    def step(self, loss):
        """Return a whole step of `loss(x)`, a function to per-row losses."""

        def run():
            self.x.grad = None
            ((loss(self.x) * self.weights).sum() / self.weights.sum()).backward()

        return run

    def products(self, chunk_rows, *, student=1):
        """Return a run of `student` products to logits and one back, of chunk_rows at a time."""
        rows, _, columns = self.shape
        x = self.x.detach()
        buffers = [
            torch.empty(chunk_rows, columns, device="cuda", dtype=torch.bfloat16)
            for _ in range(student)
        ]
        dx = torch.empty_like(x)

        def run():
            for start, end in chunk_bounds(rows, chunk_rows):
                for buffer in buffers:
                    torch.mm(x[start:end], self.weight.T, out=buffer[: end - start])
                torch.mm(buffers[-1][: end - start], self.weight, out=dx[start:end])

        return run


def gradient(problem, loss, rows=None):
    """Return the gradient of the sum of losses, as float32."""
    x = problem.x.detach()[:rows].clone().requires_grad_()
    return torch.autograd.grad(loss(x).sum(), x)[0].float()


def relative(value, exact) -> float:
    return float((value - exact).norm() / exact.norm())


def gate(problem, rows=192) -> None:
    """Stop unless nll and gradient of some rows agree with fp32 logits."""
    labels = problem.labels[:rows]
    x = problem.x.detach()[:rows].clone().requires_grad_()
    result = linear_ce(x, problem.weight, labels)
    exact = x.detach().clone().requires_grad_()
    expected = reference_ce(exact, problem.weight, labels)
    for run, rows_x in ((result, x), (expected, exact)):
        run.nll.sum().backward()
        assert rows_x.grad is not None
    error = relative(x.grad.float(), exact.grad.float())
    nll_error = float((result.nll - expected.nll).detach().abs().max())
    same = float((result.argmax == expected.argmax).float().mean())
    # Random logits lie so close that rounding them to bf16 changes a few of the first places.
    print(f"gate: gradient {error:.1e}, nll {nll_error:.1e}, same argmax {same:.3f}")
    if not (error < 6e-3 and nll_error < 0.03 and same > 0.9):
        sys.exit("linear_ce differs from its definition: no times are worth reading")


def report(shape, title, times, base, *, bars=(), memory=None) -> None:
    print(f"\n{title}, (N, H, V) = {shape}")
    bars = dict(bars)
    for name, ms in times.items():
        note = f"  bar {bars[name]:.2f}" if name in bars else ""
        extra = f"  {memory[name]:6.2f} GiB" if memory and name in memory else ""
        print(f"  {name:44s} {ms:8.2f} ms  x {ms / times[base]:5.3f}{extra}{note}", flush=True)


def checkpointed(problem):
    """The peer: chunks of 2048 rows whose logits are made again in backward."""

    def part(x, labels):
        logits = torch.nn.functional.linear(x, problem.weight)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    def loss(x):
        parts = zip(x.split(2048), problem.labels.split(2048), strict=True)
        return torch.cat([checkpoint(part, *p, use_reentrant=False) for p in parts])

    return loss


def liger(problem):
    """Liger's fused linear cross-entropy, which has a mean and no row weights; None if absent."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        return None

    def loss(x):
        out = LigerFusedLinearCrossEntropyFunction.apply(x, problem.weight, problem.labels)
        return out[0] if isinstance(out, tuple) else out

    return loss


def bench_ce(shape, load_s) -> None:
    problem = Problem(shape)
    gate(problem)
    for chunk_rows, bar in ((4096, 1.07), (1024, 1.12)):
        ours = problem.step(
            lambda x, c=chunk_rows: linear_ce(x, problem.weight, problem.labels, chunk_rows=c).nll
        )
        memory = {"linear_ce": peak_gib(ours)}
        runs = {"products": problem.products(chunk_rows), "linear_ce": ours}
        times = alternate(runs, repeats=12, load_s=load_s)
        title = f"Cross-entropy, exact, chunks of {chunk_rows}"
        report(shape, title, times, "products", bars={"linear_ce": bar}, memory=memory)
    runs = {
        "linear_ce": problem.step(lambda x: linear_ce(x, problem.weight, problem.labels).nll),
        "checkpointed chunks of 2048": problem.step(checkpointed(problem)),
    }
    if liger(problem):
        runs["Liger fused linear cross-entropy, mean"] = problem.step(liger(problem))
    memory = {name: peak_gib(run) for name, run in runs.items()}
    times = alternate(runs, repeats=6, load_s=1)
    bars = {"checkpointed chunks of 2048": 1.5}
    report(shape, "Cross-entropy, peers", times, "linear_ce", bars=bars, memory=memory)


def bench_kl(shape, load_s) -> None:
    problem = Problem(shape)
    teacher = torch.randn_like(problem.x)
    runs = {"products": problem.products(4096, student=2)}
    for name, mix in (
        ("linear_kl", {}),
        ("linear_kl, KL + CE", {"labels": problem.labels, "ce_weight": 0.5}),
        ("linear_kl, TV", {"kl_weight": 0.0, "tv_weight": 1.0}),
    ):
        runs[name] = problem.step(
            lambda x, mix=mix: linear_kl(x, problem.weight, teacher, **mix).loss
        )
    memory = {"linear_kl": peak_gib(runs["linear_kl"])}
    times = alternate(runs, repeats=6, load_s=load_s)
    report(shape, "KL", times, "products", bars={"linear_kl": 1.15}, memory=memory)


def bench_topk(shape, load_s) -> None:
    problem = Problem(shape)
    rows, _, columns = shape
    ids = torch.rand(rows, columns // 64, device="cuda").argsort(dim=1)[:, :64].int() * 64
    ids += torch.arange(64, device="cuda", dtype=torch.int32)
    logprobs = torch.log_softmax(torch.randn(rows, 64, device="cuda") * 2, dim=1) - 0.1
    ours = problem.step(lambda x: linear_kl_topk(x, problem.weight, ids, logprobs).loss)
    runs = {"products": problem.products(4096), "linear_kl_topk, k = 64": ours}
    times = alternate(runs, repeats=6, load_s=load_s)
    report(shape, "Stored teacher", times, "products", bars={"linear_kl_topk, k = 64": 1.15})


def bench_fp8(shape, load_s) -> None:
    problem = Problem(shape, learned=True)
    weight, labels = problem.weight, problem.labels
    head = quantize_head(weight)
    logits_only = head._replace(by_channel=None, channel_scale=None)
    losses = {
        "linear_ce": lambda x: linear_ce(x, weight, labels[: x.shape[0]]).nll,
        "FP8, both products": lambda x: linear_ce_fp8(x, head, labels[: x.shape[0]]).nll,
        "FP8, logits only": lambda x: linear_ce_fp8(x, logits_only, labels[: x.shape[0]]).nll,
    }
    runs = {name: problem.step(loss) for name, loss in losses.items()}
    times = alternate(runs, repeats=6, load_s=load_s)
    exact = gradient(problem, losses["linear_ce"], 2048)
    for name, loss in list(losses.items())[1:]:
        error = relative(gradient(problem, loss, 2048), exact)
        print(f"  {name}: gradient error {error:.4f}")
    report(shape, "FP8", times, "linear_ce", bars={"FP8, both products": 0.65})


def bench_skip(shape, load_s) -> None:
    problem = Problem(shape, learned=True)
    labels = problem.labels
    head = order_head(problem.weight, problem.mass)
    result = linear_ce(problem.x.detach(), problem.weight, labels)
    print(
        f"rows: loss {float(result.nll.mean()):.2f}, entropy {float(result.entropy.mean()):.2f} "
        f"(median {float(result.entropy.median()):.2f})"
    )
    exact = gradient(problem, lambda x: linear_ce(x, problem.weight, labels).nll)
    runs = {"linear_ce": problem.step(lambda x: linear_ce(x, problem.weight, labels).nll)}
    for mass in (1e-3, 3e-3, 1e-2):
        name = f"linear_ce_skip, mass {mass:.0e}"
        runs[name] = problem.step(
            lambda x, mass=mass: linear_ce_skip(x, head, labels, max_tile_mass=mass)[0].nll
        )
        x = problem.x.detach().clone().requires_grad_()
        skipped, left_out = linear_ce_skip(x, head, labels, max_tile_mass=mass)
        grad = torch.autograd.grad(skipped.nll.sum(), x)[0].float()
        bound = float((left_out.error_bound / exact.norm(dim=1)).mean())
        print(
            f"  {name}: keeps {float(left_out.kept_frac):.3f} of the tiles, gradient error "
            f"{relative(grad, exact):.4f}, bound of a row's error {bound:.3f} on average"
        )
    times = alternate(runs, repeats=6, load_s=load_s)
    bars = {"linear_ce_skip, mass 1e-03": 0.75}
    report(shape, "Tile skipping", times, "linear_ce", bars=bars)


BENCHES = {
    "ce": bench_ce,
    "kl": bench_kl,
    "topk": bench_topk,
    "fp8": bench_fp8,
    "skip": bench_skip,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(BENCHES), help="Which, separated by commas.")
    parser.add_argument("--load-s", type=float, default=10, help="Seconds of load before timing.")
    parser.add_argument("--shapes", default="0,1", help="Which of the two shapes.")
    parser.add_argument("--commit", default=revision(), help="What to print as the commit.")
    options = parser.parse_args()
    print(heading(options.commit))
    for index in map(int, options.shapes.split(",")):
        for name in options.only.split(","):
            BENCHES[name](SHAPES[index], options.load_s if name == "ce" else options.load_s / 3)
            release_buffers()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
