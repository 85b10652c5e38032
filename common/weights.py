"""A checkpoint as a causal language model: safetensors by transformers, GGUF dequantised."""

import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
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
from dflash_offline.common.target_parts import decoder_layers, decoder_of


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
        OSError, ValueError, KeyError: as transformers raises them, or a weight is missing.
    """
    with _bars_only_on_terminals():
        if checkpoint.gguf_file:
            return _load_gguf(checkpoint, config, dtype=dtype, **extra)
        source = {"config": config, "dtype": dtype, **checkpoint.load_arguments(), **extra}
        return _complete(
            *AutoModelForCausalLM.from_pretrained(
                checkpoint.where, output_loading_info=True, **source
            )
        )


def load_without_layers(
    checkpoint: Checkpoint, config: PreTrainedConfig, *, dtype: torch.dtype, **extra: Any
) -> PreTrainedModel:
    """Load a checkpoint into host memory, but its decoder layers onto the meta device.

    Their weights are not read: where transformers converts them, as it does experts and other
    dtypes, they would all be copied into memory. Loaded whole are a GGUF file, which is
    dequantised, a checkpoint whose own code may run, layers that share weights, and those of no
    known name. Arguments and what it raises are as for `load_causal`.
    """
    if checkpoint.gguf_file or checkpoint.trust_remote_code:
        return load_causal(checkpoint, config, dtype=dtype, **extra)
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (layers := decoder_layers(empty)) is None:
        return load_causal(checkpoint, config, dtype=dtype, **extra)
    name = next(name for name, module in empty.named_modules() if module is layers)
    if any(key.startswith(f"{name}.") for key in empty.all_tied_weights_keys):
        return load_causal(checkpoint, config, dtype=dtype, **extra)
    source = {"config": empty.config, "dtype": dtype, **checkpoint.load_arguments(), **extra}
    with _bars_only_on_terminals():
        causal = _complete(
            *_class_without(type(empty), name).from_pretrained(
                checkpoint.where, output_loading_info=True, **source
            )
        )
    causal.set_submodule(name, layers)
    return causal


def _class_without(model_class: type[PreTrainedModel], name: str) -> type[PreTrainedModel]:
    """Return a class of models whose modules called `name` are none, so that no weight is theirs.

    `from_pretrained(device_map=...)` could leave them on the meta device, but wants accelerate,
    which moves the other weights too.
    """

    def build(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)
        self.set_submodule(name, nn.ModuleList())

    ignored = rf"(^|\.){re.escape(name.rpartition('.')[2])}\.\d+\."
    known = model_class._keys_to_ignore_on_load_unexpected or ()
    # transformers looks conversions of weights up by the class's name, its code by the module's.
    members = {
        "__init__": build,
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [*known, ignored],
    }
    return type(model_class.__name__, (model_class,), members)


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
    return _complete(
        *model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            **extra,
        )
    )


def _complete(causal: PreTrainedModel, loading: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model none of whose text weights is random; transformers would only report it.

    Raises:
        ValueError: weights of the decoder or of the head were not in the checkpoint.
    """
    names = {id(module): name for name, module in causal.named_modules()}
    parts = (decoder_of(causal), causal.get_output_embeddings())
    read = tuple(f"{names[id(part)]}." for part in parts if part is not None)
    if missing := sorted(name for name in loading["missing_keys"] if name.startswith(read)):
        raise ValueError(f"{len(missing)} missing, which would be random, such as {missing[0]}")
    return causal


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
