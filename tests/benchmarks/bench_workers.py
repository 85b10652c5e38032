"""A worker killed in each stage, other numbers of workers, two nodes: same content, same losses.

    python tests/benchmarks/bench_workers.py --gpus 8 --again 8 5

`dflash-extract` and `dflash-train` as users run them, on a random dense target. Each runs whole,
and once more with a worker killed on the way: that command has to end soon and name the worker.
What it left is copied and finished by other numbers of workers, and two torchruns with half of the
GPUs each do all of it, as two nodes would. Stores must equal the whole run's byte by byte, and the
loss of every step must be within BAR of it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gpu_timing import revision
from step_shapes import DEVICE, device_name
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

BAR = 1e-3
# What a killed worker's command may take to end.
END_S = 20
# Ids of words; behind them the end of a turn, padding, and the drafter's mask token.
WORDS, VOCAB = 996, 1000
SIZES = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8},
}
# What says when and where a store was made, not what is in it.
OWN = ("logs/", "commit/", "index-", ".owner", "zarr.json", "manifest.json")


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--again", nargs="+", type=int, default=[8, 5], help="of the reruns")
    parser.add_argument("--rows", type=int, default=4000, help="of 500 tokens")
    parser.add_argument("--tokens", type=int, default=500, help="of a row")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples-per-step", type=int, default=40)
    parser.add_argument("--within-s", type=float, default=200, help="for any of the commands")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--commit", default=revision())
    return parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the two commands."""

    name: str
    module: str
    options: list[str]
    progress: Callable[[Path], int]  # what has been reached, by its output
    kill_at: int


class Run:
    """A command that is running, or several that are one job."""

    def __init__(self, stage: Stage, out: Path, *, gpus: int, nodes: int = 1) -> None:
        self.stage, self.out, self.gpus, self.nodes = stage, out, gpus, nodes
        code = f"from dflash_offline.{stage.module}.cli import main; main()"
        if nodes == 1:
            self._processes = [self._start([sys.executable, "-c", code, "--gpus", str(gpus)])]
            return
        script = out.with_name(f"{out.name}.py")
        script.write_text(code)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        torchrun += [f"--nproc-per-node={gpus // nodes}", "--rdzv-backend=c10d"]
        torchrun += [f"--rdzv-endpoint={address}", str(script)]
        self._processes = [self._start(torchrun, node=node) for node in range(nodes)]

    def _start(self, command: list[str], node: int = 0) -> subprocess.Popen:
        environment = dict(os.environ)
        if self.nodes > 1:
            here = self.gpus // self.nodes
            ids = range(node * here, (node + 1) * here)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))
        log = self.out.with_name(f"{self.out.name}-{node}.log").open("w")
        return subprocess.Popen(
            [*command, *self.stage.options, "--out", str(self.out)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    @property
    def said(self) -> str:
        logs = sorted(self.out.parent.glob(f"{self.out.name}-*.log"))
        return "\n".join(log.read_text() for log in logs)

    @property
    def name(self) -> str:
        return f"{self.nodes} x {self.gpus // self.nodes}" if self.nodes > 1 else str(self.gpus)

    def workers(self) -> list[int]:
        pid = self._processes[0].pid
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self, within_s: float) -> int:
        """Wait for it; returns the exit code, the worst of several."""
        give_up = time.monotonic() + within_s
        try:
            codes = [each.wait(max(0.1, give_up - time.monotonic())) for each in self._processes]
        except subprocess.TimeoutExpired:
            self.stop()
            raise Failed(f"has not ended in {within_s:.0f} s", self) from None
        return max(codes, key=abs)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.5)
                process.kill()

    def kill_worker(self, rank: int, within_s: float) -> None:
        """Kill one on the way, and check how the command ends."""
        give_up = time.monotonic() + within_s
        while self.stage.progress(self.out) < self.stage.kill_at:
            if self._processes[0].poll() is not None or time.monotonic() > give_up:
                self.stop()
                raise Failed("was too short to be killed, or made no progress", self)
            time.sleep(0.005)
        os.kill(self.workers()[rank], signal.SIGKILL)
        killed = time.monotonic()
        code = self.end(END_S)
        took = time.monotonic() - killed
        errors = [line for line in self.said.splitlines() if line.startswith("error:")]
        named = f"worker {rank} (rank {rank} of {self.gpus} on "
        # Of training, the first worker may have said before that somebody is gone.
        good = code == 3 and errors and named in errors[-1] and "SIGKILL" in errors[-1]
        if not good:
            raise Failed(f"ended with exit code {code}, {errors}", self)
        more = "; there is a traceback, too" if "Traceback" in self.said else ""
        print(
            f"{self.stage.name}: worker {rank} of {self.gpus} killed at {self.stage.kill_at}, exit "
            f"code 3 after {took:.1f} s, {self.stage.progress(self.out)} reached: {errors[-1]}"
            f"{more}",
            flush=True,
        )


class Failed(Exception):
    """A run is not what it should be."""

    def __init__(self, problem: str, run: Run) -> None:
        super().__init__(f"FAILED {run.stage.name} by {run.name} {problem}")
        self.said = run.said[-4000:]


def make_target(folder: Path, size: str) -> None:
    """Save a random model with a tokenizer that nothing needs: rows are token ids."""
    words = {f"w{i}": i for i in range(WORDS)} | {"<|end|>": WORDS, "<|pad|>": WORDS + 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=SIZES[size]["hidden_size"] // 8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=WORDS,
        pad_token_id=WORDS + 1,
        bos_token_id=None,
        **SIZES[size],
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_rows(path: Path, options: Namespace) -> None:
    """Write rows in which the next token follows from the last, four times of five."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, WORDS, (options.rows, options.tokens))
    for i in range(1, options.tokens):
        follows = rng.random(options.rows) < 0.8
        ids[follows, i] = (5 * ids[follows, i - 1] + 7) % WORDS
    mask = [1] * options.tokens
    lines = (
        json.dumps({"id": f"row-{i}", "input_ids": row.tolist(), "loss_mask": mask}) + "\n"
        for i, row in enumerate(ids)
    )
    path.write_text("".join(lines))


def stages(options: Namespace, folder: Path) -> tuple[Stage, Stage]:
    target, rows = folder / "target", folder / "rows.jsonl"
    make_target(target, options.size)
    write_rows(rows, options)
    pack = options.tokens * 8
    extract = Stage(
        name="extraction",
        module="extract",
        options=[
            *("--target", str(target), "--data", str(rows), "--codec", "int8"),
            *("--teacher", "final", "--pack-tokens", str(pack), "--batch-tokens", str(2 * pack)),
        ],
        progress=lambda out: len(list((out / "commit").glob("*.json"))),
        kill_at=options.rows // 8 // 6,
    )
    train = Stage(
        name="training",
        module="train",
        options=[
            *("--cache", str(folder / "extraction-whole"), "--num-steps", str(options.steps)),
            *("--samples-per-step", str(options.samples_per_step), "--log-every", "1"),
            *("--checkpoint-every", str(max(2, options.steps // 12)), "--draft-layers", "2"),
            *("--block-size", "16", "--num-anchors", "8", "--rows-per-pass", "1024"),
            *("--mask-token-id", str(VOCAB - 1), "--device", DEVICE.type),
        ],
        progress=lambda out: len(losses(out)),
        kill_at=options.steps // 3,
    )
    return extract, train


def losses(out: Path) -> dict[int, float]:
    """Return the loss of every step that the log of a run has; of a step made twice, the later."""
    log = out / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    # The last line may be in the making.
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {each["step"]: each["loss"] for each in records if each["kind"] == "train"}


def differences(store: Path, whole: Path) -> tuple[list[str], int]:
    """Return which files are not those of the whole store, and how many bytes were compared."""

    def files(root: Path) -> set[str]:
        found = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return {name for name in found if not name.startswith(OWN)}

    def is_same(name: str) -> bool:
        return (store / name).read_bytes() == (whole / name).read_bytes()

    ours, theirs = files(store), files(whole)
    both = sorted(ours & theirs)
    with ThreadPoolExecutor(8) as pool:
        other = [name for name, same in zip(both, pool.map(is_same, both), strict=True) if not same]
    return sorted(ours ^ theirs) + other, sum((whole / name).stat().st_size for name in both)


def compare_stores(run: Run, whole: Path) -> str:
    different, size = differences(run.out, whole)
    if different or not size:
        raise Failed(f"has other content in {len(different)} files: {different[:3]}", run)
    return f"{size / 1e9:.2f} GB in {len(list((whole / 'commit').glob('*.json')))} packs are equal"


def compare_losses(run: Run, whole: Path) -> str:
    ours, theirs = losses(run.out), losses(whole)
    if ours.keys() != theirs.keys():
        raise Failed(f"made {len(ours)} steps of {len(theirs)}", run)
    a, b = (np.array([found[step] for step in sorted(theirs)]) for found in (ours, theirs))
    apart = np.abs(a / b - 1)
    if apart.max() > BAR:
        raise Failed(f"has losses {apart.max():.1e} apart at most", run)
    return (
        f"losses of {len(b)} steps ({b[0]:.4f} to {b[-1]:.4f}) are {apart.max():.1e} apart at "
        f"most, {apart.mean():.1e} on average"
    )


def campaign(stage: Stage, options: Namespace, folder: Path, compare: Callable) -> bool:
    """Run one stage whole, killed and finished, and as two nodes; returns whether all is equal."""
    within_s, rank, began = options.within_s, options.gpus // 2, time.monotonic()
    whole = Run(stage, folder / f"{stage.name}-whole", gpus=options.gpus)
    killed = Run(stage, folder / f"{stage.name}-killed", gpus=options.gpus)
    runs = [whole, killed]
    try:
        killed.kill_worker(rank, within_s)
        for count in options.again:
            out = folder / f"{stage.name}-again-{count}"
            shutil.copytree(killed.out, out)
            runs.append(Run(stage, out, gpus=count))
        runs.append(Run(stage, folder / f"{stage.name}-nodes", gpus=options.gpus, nodes=2))
        for run in [whole, *runs[2:]]:
            if code := run.end(within_s):
                raise Failed(f"ended with exit code {code}", run)
    finally:
        for run in runs:
            run.stop()
    print(f"{stage.name}: all runs in {time.monotonic() - began:.0f} s", flush=True)
    is_good = True
    for run in runs[2:]:
        how = "two nodes" if run.nodes > 1 else "finished"
        try:
            print(f"{stage.name} {how} by {run.name}: {compare(run, whole.out)}", flush=True)
        except Failed as problem:
            is_good = False
            print(problem, flush=True)
    return is_good


def main() -> None:
    options = parse()
    print(
        f"{device_name()} x {options.gpus}, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, commit {options.commit}, {DEVICE.type}, size {options.size}, "
        f"{options.rows} rows of {options.tokens} tokens",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        extract, train = stages(options, folder)
        are_good = []
        for stage, compare in ((extract, compare_stores), (train, compare_losses)):
            try:
                are_good.append(campaign(stage, options, folder, compare))
            except Failed as problem:
                are_good.append(False)
                print(problem.said, problem, sep="\n", flush=True)
    sys.exit(0 if all(are_good) else 1)


if __name__ == "__main__":
    main()
