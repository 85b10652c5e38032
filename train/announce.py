"""What a run says before its first step: the options, what was chosen, and what it will take."""

import resource
import sys

import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.common.options import print_config, save_config
from dflash_offline.common.plain_console import plain_console
from dflash_offline.train.setup import Setup
from dflash_offline.train.sharding import ALL


def say(*lines: str) -> None:
    """Print lines for the user on stderr."""
    console = plain_console(sys.stderr)
    for line in lines:
        console.print(line, soft_wrap=True)


def announce(setup: Setup) -> None:
    """Save and print the resolved configuration, and what was chosen for the user."""
    config = setup.config
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise BadInput(f"--out {config.out} cannot be made ({problem}); give another") from problem
    (config.out / "config.yaml").write_text(save_config(config))
    print_config(config, out=str(config.out), title="dflash-train")
    drafter = setup.drafter.config
    num_parameters = sum(each.numel() for each in setup.drafter.parameters())
    samples = sum(len(indices) for indices in setup.wanted)
    say(
        f"mask token {setup.mask_token.id}: {setup.mask_token.reason}",
        f"drafter of {drafter.num_hidden_layers} layers, {num_parameters / 1e6:.1f} M "
        f"parameters, reads layers {', '.join(map(str, drafter.target_layer_ids))}",
        f"{samples:,} training samples, {setup.num_steps or 'unbounded'} steps, "
        f"{setup.dtype} on {setup.device}, {setup.world.size} process(es)",
        setup.memory,
    )
    if drafter.sample_from_anchor:
        say(
            "anchor-first layout: z-lab's package and SGLang read such a drafter one token off, "
            "vLLM refuses it, unless a release of theirs says otherwise"
        )
    if config.shard == ALL and setup.sharding is None:
        say("--shard all: there is one process, which holds everything")
    if config.num_steps is not None and config.num_epochs is not None:
        say(f"--num-steps {config.num_steps} counts, --num-epochs {config.num_epochs} does not")
    if setup.checkpoint is not None:
        say(f"going on from {setup.checkpoint}")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors took on a GPU, or this process on a machine without."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kibibytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
