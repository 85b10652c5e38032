"""Whether a target's fast kernels are there: a slow path costs a multiple and says nothing."""

import importlib

import torch
from rich.console import Console
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_flash_linear_attention_available

from dflash_offline.common.errors import BadInput

_LINEAR = "linear_attention"


def check_fast_path(
    config: PreTrainedConfig, device: torch.device, *, allow_slow_path: bool
) -> None:
    """Refuse a hybrid target on a GPU without flash-linear-attention.

    Raises:
        BadInput: says how many layers are concerned and what to install.
    """
    # Only families with several kinds of layers list them.
    layer_types = getattr(config, "layer_types", None) or []
    num_linear = layer_types.count(_LINEAR)
    if device.type != "cuda" or not num_linear:
        return
    problem = _why_slow()
    if problem is None:
        return
    message = (
        f"--target has {num_linear} of {len(layer_types)} layers with linear attention, which run "
        f"many times slower without the package flash-linear-attention ({problem}); pip install "
        "flash-linear-attention, or go on with --allow-slow-path"
    )
    if not allow_slow_path:
        raise BadInput(message)
    Console(stderr=True).print(f"warning: {message}", highlight=False)


def _why_slow() -> str | None:
    """Return what keeps transformers from the fast kernels; it would say nothing and go on."""
    if not is_flash_linear_attention_available():
        return "not installed, or too old"
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as problem:
        return f"its import fails: {problem}"
    return None
