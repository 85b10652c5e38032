"""The target's part of a store: what identifies it, and the files that training needs of it."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from dflash_offline.common.chat import ChatOptions, chat_identity, tokenizer_identity
from dflash_offline.common.checkpoint_files import Checkpoint
from dflash_offline.common.device_choice import dtype_name
from dflash_offline.common.errors import BadInput
from dflash_offline.common.identity import Scalar
from dflash_offline.common.target import Target

# The state that `lm_head` consumes, and the one that a layer id means.
NORM_CONVENTION = "features before, final after the final norm"
_LEGAL = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def target_identity(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    options: ChatOptions,
    *,
    layers: tuple[int, ...],
) -> dict[str, Scalar]:
    """Return the fields that stores must share for their states to mean the same."""
    return {
        "weight_digest": target.weight_digest(),
        "model_type": target.config.model_type,
        **unloaded_identity(target.checkpoint, target.dtype, layers=layers),
        **text_identity(tokenizer, options),
    }


def unloaded_identity(
    checkpoint: Checkpoint, dtype: torch.dtype, *, layers: tuple[int, ...]
) -> dict[str, Scalar]:
    """Return the fields of `target_identity` that need neither the target nor its tokenizer."""
    return {
        "revision": checkpoint.revision or "",
        "compute_dtype": dtype_name(dtype),
        "feature_dtype": "bfloat16",
        "norm_convention": NORM_CONVENTION,
        "layers": ",".join(map(str, layers)),
    }


def text_identity(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> dict[str, Scalar]:
    """Return the fields that texts must share to become the same tokens."""
    digest = {"tokenizer_sha256": tokenizer_identity(tokenizer)}
    try:
        return {**digest, **chat_identity(tokenizer, options)}
    except BadInput:
        # Token ids and plain completions need no template, so a target without one will do.
        return digest


def target_files(target: Target, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return file name to content of everything that training needs of the target.

    Configuration of the text part, tokenizer, embedding, head (left out where tied), final norm,
    and the checkpoint's licence files.
    """
    tensors = {"embed_tokens.weight": target.embed_weight()}
    tensors |= {f"norm.{name}": part for name, part in target.final_norm.named_parameters()}
    if not target.tied:
        tensors["lm_head.weight"] = target.head_weight()
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    files = {"tensors.safetensors": save(plain)}
    with tempfile.TemporaryDirectory() as folder:
        target.config.save_pretrained(folder)
        target.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            files[path.name] = path.read_bytes()
    source = target.checkpoint.folder()
    for pattern in _LEGAL:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                files[path.name] = path.read_bytes()
    return files


def run_info(target: Target) -> dict[str, str]:
    """Return what explains the bytes of a pack: device, software, attention, `--tp`."""

    is_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers_version,
        "attention": target.config._attn_implementation or "",
        "compute_dtype": dtype_name(target.dtype),
        "tp": str(target.shared_by),
    }
