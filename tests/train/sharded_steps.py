"""Steps of a toy drafter, shared out to the processes of a job where there are several.

`worlds.py SIZES sharded_steps.py KIND DTYPE MISTAKE OUT [START]`: saves what the optimiser holds
before and after, the norms of the gradients, and what this process keeps in memory. DTYPE may be
`fp8`, which is bfloat16 with products in FP8.
"""

import gc
import sys

import torch
from conftest import HIDDEN, Toy, make_config

from dflash_offline.train.distributed import join_world, leave_world, sum_over_ranks
from dflash_offline.train.objective import DECAY, Objective
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.sharding import Sharding
from dflash_offline.train.step import accumulate
from dflash_offline.train.stream import assemble
from dflash_offline.train.warm_up import blank_pass

OBJECTIVE = Objective(loss=DECAY, gamma=4.0)
# Documents of each process: none for the third, so that it runs idle passes alone.
PARTS = {1: [(0, 5)], 2: [(0, 4), (4, 5)], 3: [(0, 4), (4, 5), (5, 5)]}
# Shapes of whole weights that no slice has.
WHOLE = {(48, HIDDEN), (HIDDEN, 48), (HIDDEN, 2 * HIDDEN)}


def held_bytes(drafter: torch.nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Count what is in memory between steps; `whole` is of weights that are not in slices."""
    gc.collect()
    slices = [each.to_local() for each in drafter.parameters()]
    return {
        "all": 4 * sum(each.numel() for each in drafter.parameters()),
        "values": sum(each.untyped_storage().nbytes() for each in slices),
        "gradients": optimizer._parts.gradients.nbytes,
        "moments": sum(each.nbytes for own in optimizer._state.values() for each in own.values()),
        "whole": sum(
            each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter) and tuple(each.shape) in WHOLE
        ),
    }


def main(kind: str, dtype_name: str, mistake: str, out: str, start: str | None = None) -> None:
    world = join_world("cpu")
    dtype = torch.bfloat16 if dtype_name == "fp8" else getattr(torch, dtype_name)
    toy = Toy(make_config(num_hidden_layers=3), torch.float32)
    head, options = toy.head.to(torch.device("cpu"), dtype), toy.options()
    sharding = None
    if world.size > 1:
        sharding = Sharding(toy.drafter, world=world, device=torch.device("cpu"), dtype=dtype)
        if mistake == "mean":
            for unit in [*toy.drafter.layers, toy.drafter]:
                unit.set_gradient_divide_factor(float(world.size))
    if dtype_name == "fp8":
        toy.drafter.use_fp8()
    optimizer = Optimizer(
        toy.drafter, weight_decay=0.1, betas=(0.9, 0.95), kind=kind, ema=0.8, world=world
    )
    idle = blank_pass(options, "raw", hidden=HIDDEN, exact=False, labelled=mistake == "labelled")
    first, last = PARTS[world.size][world.rank]

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        documents = [toy.document(9 + 3 * i, seed=10 * number + i) for i in range(first, last)]
        passes = [assemble([each], options) for each in documents]
        missing = 0 if sharding is None else sharding.missing_passes(len(passes))
        totals = accumulate(toy.drafter, head, OBJECTIVE, passes)
        if missing:
            assert missing == 4 - len(passes)
            accumulate(toy.drafter, head, OBJECTIVE, [idle] * missing)
        sum_over_ranks([totals])
        norm, skipped = optimizer.step(lr=0.01, weight_sum=totals[1], clip=0.5)
        assert skipped == 0
        return torch.stack([norm, totals[0] / totals[1]]).float()

    norms = [step(number) for number in range(2)]
    if sharding is not None:
        torch.save(held_bytes(toy.drafter, optimizer), f"{out}.held{world.rank}")
    before = {name: each.clone() for name, each in optimizer.tensors().items()}
    if start is not None:
        before = torch.load(start)
        optimizer.load(before.__getitem__)
    norms += [step(number) for number in range(2, 4)]
    after = optimizer.tensors()
    with optimizer.averaged():
        drafter = toy.drafter if sharding is None else sharding.whole()
        averages = {
            name: each.to(dtype).float().clone() for name, each in drafter.state_dict().items()
        }
    if world.is_first:
        torch.save([before, after, averages, torch.stack(norms)], out)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
