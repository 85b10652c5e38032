"""One run by one GPU and by several: how far apart gradients and losses are.

    python tests/benchmarks/bench_ranks.py --cache STORE --steps 200 --num-anchors 32 --lr 1e-3

Runs of `dflash-train` with the same samples and anchors in every step, shared out to one GPU or
more; other options are handed on to it. A gradient is AdamW's first moment after a run of a single
step, not clipped, over 1 - beta. Losses are compared as means over --window steps.

No gradient of a pass is rounded: products sum into fp32, and so do the processes. What remains is
the order of sums: kernels cut another number of rows in another way, a bf16 value near a boundary
then falls on its other side, and every later step starts from there. A run of one GPU in passes
of half the size has the same and no more, so it is in the table beside them.
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from gpu_timing import revision
from safetensors.torch import load_file
from step_shapes import device_name

from dflash_offline.train.checkpoint import checkpoints

MAIN = "from dflash_offline.train.cli import main; main()"
BETA = 0.9
BAR = 1e-3


def parse() -> tuple[Namespace, list[str]]:
    parser = ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--cache", required=True, help="store to train on")
    parser.add_argument("--gpus", nargs="*", type=int, default=[2], help="beside one")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=20, help="steps of a mean")
    parser.add_argument("--rows-per-pass", type=int, default=4096)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="of the runs")
    parser.add_argument("--commit", default=revision())
    return parser.parse_known_args()


def runs_of(options: Namespace) -> dict[int, dict[str, list[str]]]:
    """Return the options of every run, by name, by its number of GPUs; the first is the rule."""
    rows = options.rows_per_pass
    one = {
        "1 GPU": ["--rows-per-pass", str(rows)],
        "1 GPU, passes of half the rows": ["--rows-per-pass", str(rows // 2)],
    }
    several = {
        size: {
            f"{size} GPUs, --shard {shard}": ["--rows-per-pass", str(rows), "--shard", shard]
            for shard in ("optimizer", "all")
        }
        for size in options.gpus
    }
    return {1: one} | several


class Runs:
    """Runs of the command, two of each name: a single step, and all."""

    def __init__(self, options: Namespace, rest: Sequence[str], folder: Path) -> None:
        self._common = ["--cache", options.cache, "--log-every", "1", *rest]
        self._steps = options.steps
        self._folder = folder

    def make(self, size: int, named: Mapping[str, Sequence[str]]) -> None:
        """Run everything of one number of GPUs, side by side."""
        started = []
        for name, own in named.items():
            for kind, end in (
                ("step", ["--num-steps", "1", "--clip", "1e9"]),
                ("run", ["--num-steps", str(self._steps)]),
            ):
                out = self._folder / kind / name
                out.parent.mkdir(parents=True, exist_ok=True)
                log = out.with_name(f"{name}.log").open("w")
                command = [sys.executable, "-c", MAIN, *self._common, *own, *end]
                command += ["--gpus", str(size), "--out", str(out)]
                started.append((log, subprocess.Popen(command, stderr=log, stdout=log)))
        for log, process in started:
            if process.wait():
                sys.exit(Path(log.name).read_text()[-3000:])

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of the first step, flat, in float64."""
        (checkpoint,) = checkpoints(self._folder / "step" / name)
        tensors = load_file(checkpoint / "optimizer.safetensors")
        moments = {key: each for key, each in tensors.items() if key.startswith("exp_avg.")}
        return torch.cat([moments[key].flatten() for key in sorted(moments)]).double() / (1 - BETA)

    def losses(self, name: str) -> torch.Tensor:
        """Return the loss of every step."""
        log = (self._folder / "run" / name / "log.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in log]
        return torch.tensor([each["loss"] for each in records if each["kind"] == "train"]).double()


def table(runs: Runs, names: Sequence[str], window: int) -> None:
    """Print how far apart every run is from the first."""
    gradient, losses = runs.gradient(names[0]), runs.losses(names[0])
    means = losses.unfold(0, window, window).mean(1)
    print(f"norm of the gradient {gradient.norm():.4f}, {len(losses)} steps, means over {window}:")
    print("  ".join(f"{mean:.4f}" for mean in means.tolist()))
    print("run | gradient apart | losses' means apart, at most | on average | a step's, at most")
    for name in names[1:]:
        error = (runs.gradient(name) - gradient).norm() / gradient.norm()
        theirs = runs.losses(name)
        assert theirs.shape == losses.shape
        apart = (theirs.unfold(0, window, window).mean(1) / means - 1).abs()
        steps = (theirs / losses - 1).abs()
        is_near = max(error, apart.max()) < BAR
        print(
            f"{name} | {error:.2e} | {apart.max():.2e} | {apart.mean():.2e} | {steps.max():.2e} | "
            f"{'below' if is_near else 'NOT below'} {BAR:.0e}",
            flush=True,
        )


def main() -> None:
    options, rest = parse()
    print(f"{device_name()}, torch {torch.__version__}, commit {options.commit}", *rest, flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = Runs(options, rest, Path(folder))
        named = runs_of(options)
        for size, some in named.items():
            runs.make(size, some)
        table(runs, [name for some in named.values() for name in some], options.window)


if __name__ == "__main__":
    main()
