"""A drafter whose weights are shared out, for those that are too large to be whole on every GPU.

FSDP2 brings a layer's weights together, in the compute dtype, while the layer runs forward or
backward, and sums its gradients, in fp32, to the processes that hold their slices. A slice is a
run of a parameter's rows. A pass of one process needs all the others, so a process with fewer
passes than another runs idle ones.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dflash_offline.common.errors import BadInput
from dflash_offline.train.distributed import World, with_the_others
from dflash_offline.train.drafter import Drafter

# What `--shard` says for it.
ALL = "all"
# Since torch 2.10 a tensor may have gradients of another dtype than its own.
_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


class Sharding:
    """Shares out a drafter's weights, and knows what the processes have to agree on.

    Args:
        drafter: whole, on any device; its parameters become slices, in place.
        world: this process's place.
        device: where its slices go.
        dtype: in which passes compute.

    Raises:
        BadInput: this torch cannot do it.
    """

    def __init__(
        self, drafter: Drafter, *, world: World, device: torch.device, dtype: torch.dtype
    ) -> None:
        if not _HAS_GRAD_DTYPE:
            raise BadInput(
                f"--shard all: torch {torch.__version__} cannot sum its gradients unrounded, 2.10 "
                "and later can; upgrade it, or use --shard optimizer"
            )
        self._drafter = drafter
        self._dtype = dtype
        # Numbers of passes are compared on the host, so that nobody waits for a device.
        self._on_host = dist.new_group(backend="gloo") if device.type == "cuda" else None
        mesh = init_device_mesh(device.type, (world.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        units = [*drafter.layers, drafter]
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        for unit in units:
            # Gradients are sums; FSDP's default is the mean over processes.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.unshard()
            for parameter in unit.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.grad_dtype = torch.float32
            unit.reshard()
        drafter.use_gathered()

    def missing_passes(self, own: int) -> int:
        """Return how many passes more than `own` the process with the most has."""
        most = torch.tensor(own)
        with with_the_others():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._on_host)
        return int(most) - own

    @torch.no_grad()
    def whole(self) -> Drafter:
        """Return the drafter as it is, whole, in the compute dtype; all processes take part."""
        with torch.device("meta"):
            whole = Drafter(self._drafter.config)
        whole = whole.to(self._dtype).requires_grad_(False)
        named = dict(self._drafter.named_parameters())
        with with_the_others():
            values = {name: each.to(self._dtype).full_tensor() for name, each in named.items()}
        whole.load_state_dict(values, assign=True)
        return whole
