"""Whether a target's fast kernels are there: a slow path costs a multiple and says nothing.

Short convolutions in front of linear attention are the exception: for them transformers knows the
package causal_conv1d alone, which wants a compiler, so that they get flash-linear-attention's here.
"""

import importlib
import importlib.util
import inspect
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_flash_linear_attention_available

from dflash_offline.common.errors import BadInput
from dflash_offline.common.plain_console import plain_console
from dflash_offline.common.target import Target

_LINEAR = "linear_attention"
# What transformers calls its PyTorch version of the operation that takes the time.
_REFERENCE = "torch_chunk_gated_delta_rule"
_CONVOLUTION = "causal_conv1d_fn"
_OPERATION, _FAST_CONVOLUTION = "fla.ops.gated_delta_rule", "fla.modules.causal_conv1d"


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
        f"many times slower without the package flash-linear-attention ({problem}); pip install -U "
        "flash-linear-attention, or go on with --allow-slow-path"
    )
    if not allow_slow_path:
        raise BadInput(message)
    plain_console(sys.stderr).print(f"warning: {message}")


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
            importlib.import_module(_OPERATION)
            if not _has_own_convolution():
                importlib.import_module(_FAST_CONVOLUTION)
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
    return not _is_replaced(_modeling(target), _REFERENCE)


def use_fast_convolution(target: Target) -> bool:
    """Let a hybrid target's short convolutions on a GPU run in flash-linear-attention's kernel.

    The whole process is changed: modeling code of transformers looks the function up by its name.
    Nothing is changed where the package causal_conv1d is, or where neither package is.

    Returns:
        Whether anything was changed.
    """
    modeling = _modeling(target)
    if target.device.type != "cuda" or _is_replaced(modeling, _CONVOLUTION):
        return False
    if _why_slow() is not None:
        return False
    modeling[_CONVOLUTION] = fast_convolution
    return True


def fast_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: object,
) -> Tensor:
    """Return the activation of y[t] = bias + sum_i weight[i] x[t - W + 1 + i], by channel.

    Args:
        x: [B, D, T], zero before its first token; best where D is the inner dimension in memory.
        weight: [D, W].
        bias: [D].
        activation: `silu`, or None.
        rest: ignored, except for what keeps packed sequences apart, which must be None.

    Returns:
        [B, D, T] in the dtype of `x`, D inner in memory; sums are in fp32.
    """
    packed = [name for name in ("cu_seqlens", "seq_idx") if rest.get(name) is not None]
    assert not packed, f"{packed} are not supported"
    convolve = importlib.import_module(_FAST_CONVOLUTION).causal_conv1d
    y, _ = convolve(x.transpose(1, 2), weight, bias, activation=activation, backend="triton")
    return y.transpose(1, 2)


def _modeling(target: Target) -> dict[str, Any]:
    return vars(sys.modules[type(target.base).__module__])


def _is_replaced(modeling: dict[str, Any], name: str) -> bool:
    """Say whether the modeling code has something else than transformers' PyTorch version."""
    if name not in modeling:
        return True
    chosen = inspect.getclosurevars(modeling[name]).nonlocals
    return chosen.get("is_new_implementation", True)


def _has_own_convolution() -> bool:
    return importlib.util.find_spec("causal_conv1d") is not None
