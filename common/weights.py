"""A checkpoint as a causal language model: safetensors by transformers, GGUF dequantised."""

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from dflash_offline.common.checkpoint_files import Checkpoint


def load_causal(
    checkpoint: Checkpoint, config: PreTrainedConfig, *, dtype: torch.dtype, **extra: Any
) -> PreTrainedModel:
    """Load a checkpoint into host memory.

    Args:
        checkpoint: where it lies.
        config: its whole configuration.
        dtype: of the weights.
        extra: further arguments of `from_pretrained`.

    Raises:
        OSError, ValueError, KeyError: as transformers raises them.
    """
    with _bars_only_on_terminals():
        if checkpoint.gguf_file:
            return _load_gguf(checkpoint, config, dtype=dtype, **extra)
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.where, config=config, dtype=dtype, **checkpoint.load_arguments(), **extra
        )


def _load_gguf(
    checkpoint: Checkpoint, config: PreTrainedConfig, *, dtype: torch.dtype, **extra: Any
) -> PreTrainedModel:
    """Load a GGUF file with every weight dequantised, the only way that is fast to run."""
    # `from_pretrained(gguf_file=...)` does the same, but only where accelerate is installed.
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        names = model_class(config)
    path = str(checkpoint.folder() / checkpoint.gguf_file)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)["tensors"]
    return model_class.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, **extra
    )


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a weight that several may share."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def gathered(weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the whole of weights that several processes share, all of which must call this."""
    whole = {}
    for name, weight in weights.items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        whole[name] = full.detach().to(device)
    return whole


@contextmanager
def _bars_only_on_terminals() -> Iterator[None]:
    """Keep transformers' progress bars, hundreds of redrawn lines, out of log files."""
    if sys.stderr.isatty():
        yield
        return
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        # The GGUF reader has a bar of its own, which no setting turns off.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_enabled:
            enable_progress_bar()
