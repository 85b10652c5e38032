"""Whether a target's fast kernels are there: a slow path costs a multiple and says nothing."""

import importlib
import inspect
import sys
import warnings

import torch
from rich.console import Console
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_flash_linear_attention_available

from dflash_offline.common.errors import BadInput
from dflash_offline.common.target import Target

_LINEAR = "linear_attention"
# What transformers calls its PyTorch version of the operation that takes the time.
_REFERENCE = "torch_chunk_gated_delta_rule"


def check_fast_path(
    config: PreTrainedConfig, device: torch.device, *, allow_slow_path: bool
) -> None:
    """Refuse a hybrid target on a GPU without flash-linear-attention; call it before loading one.

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
        with warnings.catch_warnings():
            # The package warns of others that it would like. Where warnings are errors,
            # transformers takes that for a broken package and its own slow path; an import that
            # has succeeded is not tried again.
            warnings.simplefilter("ignore")
            importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as problem:
        return f"its import fails: {problem}"
    return None


def refuse_slow(target: Target, *, allow_slow_path: bool) -> None:
    """Refuse a target that was loaded without its fast kernels although they are installed.

    Raises:
        BadInput: on a GPU, unless slow paths are allowed.
    """
    if target.device.type == "cuda" and is_slow(target) and not allow_slow_path:
        raise BadInput(
            f"--target {target.checkpoint.given} was loaded with transformers' own version of "
            "linear attention, many times slower than flash-linear-attention, which is installed; "
            "update both packages, or go on with --allow-slow-path"
        )


def is_slow(target: Target) -> bool:
    """Return whether a loaded target's linear attention is transformers' PyTorch version.

    Whatever the reason is, transformers does not refuse; it remembers what it chose in the closure
    of the function that it calls.
    """
    modeling = vars(sys.modules[type(target.base).__module__])
    if _REFERENCE not in modeling:
        return False
    chosen = inspect.getclosurevars(modeling[_REFERENCE]).nonlocals
    return not chosen.get("is_new_implementation", True)
