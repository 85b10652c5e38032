"""Training from the store against online training on one GPU, where the target runs before a step.

    python tests/benchmarks/bench_online.py --shape 27b

The step is the one of bench_step.py, from a store on a RAM disk; online, a forward of the bare
target (random weights, its documents in one batch, no head) over as many tokens comes first, whose
states are then thrown away: an online trainer would have to hand them over as well. The target lies
on the GPU in both, and its memory is in the peaks.
"""

import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
import transformers
from bench_extract import random_target
from bench_step import make_setup, measure, packs_of
from gpu_timing import revision
from gradient_gate import check_gradient
from random_store import write_store
from step_shapes import DEVICE, SHAPES, device_name, pack_tokens

_STEP = {
    "codec": "raw",
    "fp8": "none",
    "packs": 3,
    "packs_per_step": 1,
    "rows_per_pass": 16384,
    "storage_option": [],
    "profile": None,
}


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those measured")
    parser.add_argument("--document", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a document")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--commit", default=revision())
    return Namespace(**_STEP | vars(parser.parse_args()))


def main() -> None:
    options = parse()
    print(
        f"{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"commit {options.commit}",
        flush=True,
    )
    check_gradient(DEVICE)
    target = random_target(options.shape, DEVICE)
    documents = pack_tokens(options.shape) // options.document
    ids = torch.randint(target.vocab_size, (documents, options.document), device=DEVICE)

    @torch.inference_mode()
    def forward() -> None:
        target.base(input_ids=ids, use_cache=False)

    forward()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        url = str(Path(folder) / "store")
        write_store(url, packs_of(options))
        setup = make_setup(options, url)
        cached = measure(setup, options)
        online = measure(setup, options, forward)
    print(
        f"online {1e3 * online:.1f} ms a step, from the store {1e3 * cached:.1f} ms: "
        f"{online / cached:.2f} x"
    )


if __name__ == "__main__":
    main()
