"""What may be left out of the loss head's products on the logits of a drafter that has learned.

    python tests/benchmarks/bench_loss_drafter.py --draft RUN/draft --cache STORE [--rows 4096]

Rows are the states of the drafter at the supervised slots of the store's held-out samples, labels
its tokens, the head the target's. Half of the rows say how the head is ordered; loss, entropies,
kept tiles and errors of dX against the exact loss are those of the other half. On a GPU whole steps
are timed as well, in turns: of these rows, and of rows of a vocabulary of 248,320 with the same
mean entropy, made as in bench_loss.
"""

import argparse

import torch
from bench_loss import SHAPES, Problem, alternate
from torch import Tensor

from dflash_offline.common.cache import open_cache
from dflash_offline.kernels.linear_ce import linear_ce
from dflash_offline.kernels.linear_ce_fp8 import linear_ce_fp8, quantize_head
from dflash_offline.kernels.linear_ce_skip import linear_ce_skip, order_head
from dflash_offline.train.evaluate import evaluate_cache
from dflash_offline.train.export import load_drafter
from dflash_offline.train.target_head import load_target_head

MASSES = (1e-2, 3e-3, 1e-3, 3e-4)


def rows_of(options, device, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [N, H] and labels [N] of held-out slots, mixed, and the head [V, H]."""
    cache = open_cache(options.cache)
    drafter = load_drafter(options.draft, dtype, device)
    head = load_target_head(cache).to(device, dtype)
    states, labels = [], []

    def keep(_module, inputs, output):
        tables = inputs[2]
        output_ABH = output.view(tables.num_anchors, tables.layout.block_size, -1)
        rows = output_ABH[:, tables.layout.first_slot :].flatten(0, 1)
        known = tables.label_grid(tables.labels).flatten()
        states.append(rows[known >= 0])
        labels.append(known[known >= 0])

    drafter.register_forward_hook(keep)
    result = evaluate_cache(
        drafter, cache, embed=head.embed, head=head.weight, max_anchors=options.max_anchors
    )
    print(f"acceptance length {result.acceptance_length:.2f} over {result.num_anchors} blocks")
    states, labels = torch.cat(states), torch.cat(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[: options.rows].to(device)
    scale = head.logit_scale
    if head.softcap is not None or scale != 1:
        raise SystemExit("targets with a soft-cap or a scale of logits are not measured here")
    return states[order], labels[order], head.weight


def mean_probabilities(states: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(weight), device=weight.device)
    for part in states.split(512):
        total += torch.softmax((part @ weight.T).float(), dim=1).sum(dim=0)
    return total / len(states)


def losses_of(weight: Tensor, mass: Tensor) -> dict:
    """Return functions of (rows, labels) to (losses, share of tiles kept or None)."""
    ordered, fp8 = order_head(weight, mass), quantize_head(weight)
    logits_only = fp8._replace(by_channel=None, channel_scale=None)

    def skipping(bound):
        def run(x, labels):
            result, report = linear_ce_skip(x, ordered, labels, max_tile_mass=bound)
            return result.nll, report.kept_frac

        return run

    return {
        "linear_ce": lambda x, y: (linear_ce(x, weight, y).nll, None),
        "FP8, both products": lambda x, y: (linear_ce_fp8(x, fp8, y).nll, None),
        "FP8, logits only": lambda x, y: (linear_ce_fp8(x, logits_only, y).nll, None),
    } | {f"skip {bound:.0e}": skipping(bound) for bound in MASSES}


def report_errors(states: Tensor, labels: Tensor, losses: dict) -> None:
    exact = None
    for name, loss in losses.items():
        x = states.clone().requires_grad_()
        values, kept = loss(x, labels)
        grad = torch.autograd.grad(values.sum(), x)[0].float()
        exact = grad if exact is None else exact
        error = float((grad - exact).norm() / exact.norm())
        rows = (grad - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-12)
        kept = "" if kept is None else f", keeps {float(kept):.3f} of the tiles"
        print(f"{name:20s} gradient error {error:.4f}, median row {float(rows.median()):.4f}{kept}")


def report_times(states: Tensor, labels: Tensor, losses: dict, load_s: float) -> None:
    def step(loss):
        def run():
            x = states.detach().requires_grad_()
            loss(x, labels)[0].sum().backward()

        return run

    times = alternate({n: step(f) for n, f in losses.items()}, repeats=6, load_s=load_s)
    for name, ms in times.items():
        print(f"{name:20s} {ms:8.2f} ms  x {ms / times['linear_ce']:.3f}")


def matched(shape, entropy: float) -> Problem:
    """Return a problem of `shape` whose labels are raised until rows have the mean entropy."""
    low, high = 0.0, 40.0
    for _ in range(6):
        middle = (low + high) / 2
        problem = Problem((512, *shape[1:]), learned=True, label_raise=middle)
        result = linear_ce(problem.x.detach(), problem.weight, problem.labels)
        low, high = (middle, high) if float(result.entropy.mean()) > entropy else (low, middle)
    return Problem(shape, learned=True, label_raise=(low + high) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", required=True, help="Folder of an exported drafter.")
    parser.add_argument("--cache", required=True, help="Store with held-out samples.")
    parser.add_argument("--rows", type=int, default=8192, help="Most rows, half of them measured.")
    parser.add_argument("--max-anchors", type=int, default=64, help="Most blocks of one sample.")
    parser.add_argument("--load-s", type=float, default=3, help="Seconds of load before timing.")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    states, labels, weight = rows_of(options, device, dtype)
    fitted, states = states.tensor_split([len(states) // 2])
    labels = labels[len(fitted) :]
    with torch.no_grad():
        result = linear_ce(states, weight, labels)
    entropy = result.entropy
    quantiles = torch.quantile(entropy.float(), torch.tensor([0.1, 0.5, 0.9], device=device))
    print(
        f"{len(states)} rows, head {tuple(weight.shape)}, {dtype}: loss "
        f"{float(result.nll.mean()):.2f}, entropy {float(entropy.mean()):.2f} on average, "
        f"{', '.join(f'{q:.2f}' for q in quantiles.tolist())} at 10, 50 and 90 %"
    )
    losses = losses_of(weight, mean_probabilities(fitted, weight))
    report_errors(states, labels, losses)
    if device.type == "cuda":
        report_times(states, labels, losses, options.load_s)
        problem = matched(SHAPES[1], float(entropy.mean()))
        print(f"rows of the same mean entropy, (N, H, V) = {problem.shape}")
        losses = losses_of(problem.weight, problem.mass)
        rows = problem.x.detach()
        report_errors(rows[:2048], problem.labels[:2048], losses)
        report_times(rows, problem.labels, losses, options.load_s)


if __name__ == "__main__":
    main()
