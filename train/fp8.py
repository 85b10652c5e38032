"""FP8 as an option of a run: which products have it, and what they need."""

import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.objective import Objective
from dflash_offline.train.target_head import TargetHead

NONE, HEAD, ALL = "none", "head", "all"
# The first GPUs whose matrix units multiply FP8.
_CAPABILITY = (8, 9)


def use_fp8(
    choice: str,
    head: TargetHead,
    drafter: Drafter,
    objective: Objective,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> TargetHead:
    """Switch on what `--fp8` asks for; the drafter is changed in place.

    Args:
        choice: `NONE`, `HEAD` or `ALL`.
        head, drafter: on the device, the head in the compute dtype.

    Returns:
        The head to train with.

    Raises:
        BadInput: the GPU, the dtype, the loss or a width does not go with it.
    """
    if choice == NONE:
        return head
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise BadInput(
            f"--fp8 {choice} needs a GPU that multiplies FP8 (compute capability 8.9 or higher), "
            f"and training is on {_name(device)}; drop it"
        )
    if dtype != torch.bfloat16:
        raise BadInput(
            f"--fp8 {choice} goes with --dtype bfloat16, not {str(dtype).removeprefix('torch.')}; "
            "drop one of them"
        )
    if objective.terms.need_teacher:
        raise BadInput(
            f"--fp8 {choice} makes the logits of cross-entropy only, and --loss asks for a "
            "divergence from the teacher; drop one of them"
        )
    try:
        if choice == ALL:
            drafter.use_fp8()
        return head.with_fp8()
    except ValueError as problem:
        raise BadInput(f"--fp8 {choice}: {problem}; drop it") from problem


def _name(device: torch.device) -> str:
    return "a CPU" if device.type != "cuda" else torch.cuda.get_device_name(device)
