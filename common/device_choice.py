"""The device where none is named; precisions by name, and the one that `--dtype` means."""

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the precision of a name; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a precision's name, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
