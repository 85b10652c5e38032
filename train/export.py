"""Write a drafter as a z-lab checkpoint folder and read one back.

The folder holds `config.json` and `model.safetensors`: 3 tensors and 11 more a layer, without a
prefix, without embedding or head.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_offline.common.device_choice import dtype_name
from dflash_offline.common.errors import BadInput
from dflash_offline.train.draft_shape import check_kernels
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the drafter to `folder` in the z-lab format, tensors rounded to `dtype`."""
    save_weights(drafter.config, drafter.state_dict(), folder, dtype)


def save_weights(
    config: DrafterConfig, weights: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Write a drafter's configuration and weights; see `save_drafter`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = dtype_name(dtype)
    values = config.to_json() | {"dtype": name, "torch_dtype": name}
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()
    }
    write_tensors(tensors, folder / WEIGHTS_NAME)


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the file cannot be written; the library has an error of its own for that.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as problem:
        number = re.search(r"os error ([0-9]+)", str(problem))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from problem


def load_drafter_config(folder: Path) -> DrafterConfig:
    """Read the configuration of an exported drafter, ours or z-lab's.

    Raises:
        BadInput: the folder holds no DFlash drafter that this program can read.
    """
    path = Path(folder) / CONFIG_NAME
    try:
        return DrafterConfig.from_json(json.loads(path.read_text()))
    except FileNotFoundError as problem:
        # A run keeps its drafter in a folder of its own.
        inner = Path(folder) / "draft"
        what = inner if (inner / CONFIG_NAME).is_file() else "the folder of an exported drafter"
        raise BadInput(f"drafter {folder}: no {CONFIG_NAME} there; give {what}") from problem
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise BadInput(f"drafter {folder}: {CONFIG_NAME} is not JSON ({problem})") from problem


def load_drafter(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Drafter:
    """Load an exported drafter, ours or z-lab's.

    Args:
        folder: holds `config.json` and one or more safetensors files.
        dtype: dtype of the parameters.
        device: where they go.

    Raises:
        BadInput: no drafter there, tensors missing, unknown or of another shape, or a GPU has no
            kernels for it.
    """
    drafter = Drafter(load_drafter_config(folder))
    if torch.device(device).type == "cuda":
        check_kernels(drafter.config, dtype)
    tensors = _read_tensors(Path(folder))
    wanted = drafter.state_dict()
    missing, unknown = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which DFlash has not"
        raise BadInput(f"drafter {folder}: {what}; give a complete z-lab checkpoint")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise BadInput(
                f"drafter {folder}: {name} has shape {tuple(tensor.shape)} where its config.json "
                f"asks for {tuple(wanted[name].shape)}"
            )
    drafter.load_state_dict(tensors)
    return drafter.to(device=device, dtype=dtype)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise BadInput(
            f"drafter {folder}: no {WEIGHTS_NAME} there; give the folder of an exported drafter"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as problem:
            raise BadInput(f"drafter {folder}: {file.name} cannot be read: {problem}") from problem
    # SpecForge and vLLM put the same names under `model.`.
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
