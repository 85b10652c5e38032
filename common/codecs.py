"""How an inner chunk becomes bytes, and its name in zarr's metadata; which codecs a store can have.

`raw` keeps the bits. `lossless` is blosc with zstd-1 and byte shuffle in 1 MiB blocks: the shuffle
puts sign and exponent into one plane, and blocks of that size let zstd give that plane a table of
its own (the default block size mixes both planes and loses two thirds of the gain). With the int
codecs a store holds codes and scales as `raw` bytes; their arithmetic is common/quantize.py.
"""

from typing import Any, Protocol

import numpy as np
from numcodecs import blosc

from dflash_offline.common.errors import BadInput

_BLOCK_BYTES = 1 << 20


class Codec(Protocol):
    """Bytes of one C-contiguous inner chunk of an array, in and out."""

    name: str
    zarr_codecs: list[dict[str, Any]]
    # Stored bytes over array bytes that an estimate counts on: an upper bound seen on real states.
    ratio: float

    def encode(self, chunk: np.ndarray) -> memoryview | bytes:
        """Return the stored bytes, without their checksum."""
        ...

    def decode(self, stored: memoryview, out: np.ndarray) -> None:
        """Fill the C-contiguous `out`; raises `ValueError` when the bytes do not fit it."""
        ...


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


class Raw:
    """The bits as they are."""

    name = "raw"
    zarr_codecs = [_BYTES]  # noqa: RUF012 - a constant of the codec
    ratio = 1.0

    def encode(self, chunk: np.ndarray) -> memoryview:
        return memoryview(chunk).cast("B")

    def decode(self, stored: memoryview, out: np.ndarray) -> None:
        if len(stored) != out.nbytes:
            raise ValueError(f"{len(stored)} bytes where {out.nbytes} are expected")
        memoryview(out).cast("B")[:] = stored


class Lossless:
    """Standard zarr blosc, exact."""

    name = "lossless"
    zarr_codecs = [  # noqa: RUF012 - a constant of the codec
        _BYTES,
        {
            "name": "blosc",
            "configuration": {
                "cname": "zstd",
                "clevel": 1,
                "shuffle": "shuffle",
                "typesize": 2,
                "blocksize": _BLOCK_BYTES,
            },
        },
    ]
    ratio = 0.75

    def encode(self, chunk: np.ndarray) -> bytes:
        return blosc.compress(chunk, b"zstd", 1, blosc.SHUFFLE, _BLOCK_BYTES)

    def decode(self, stored: memoryview, out: np.ndarray) -> None:
        try:
            blosc.decompress(stored, out)
        except RuntimeError as problem:
            raise ValueError(str(problem)) from problem


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Lossless())}
INT_CODECS = ("int8", "int4", "int3")
CODEC_NAMES = (*CODECS, *INT_CODECS)
# Channels that share a scale in int4.
GROUP = 64


def codec_named(name: str) -> Codec:
    """Return what makes bytes of an array's inner chunks.

    Raises:
        BadInput: there is no such codec.
    """
    if name not in CODECS:
        raise BadInput(f"codec {name} makes no bytes; choose one of {', '.join(CODECS)}")
    return CODECS[name]


def check_codec(name: str, hidden: int) -> None:
    """Refuse a codec that a store of this width cannot have.

    Raises:
        BadInput: no such codec, or one that needs another width.
    """
    if name not in CODEC_NAMES:
        raise BadInput(f"--codec {name} is not available; choose one of {', '.join(CODEC_NAMES)}")
    if name in ("int4", "int3") and hidden % GROUP:
        raise BadInput(
            f"--codec {name} needs a hidden size that is a multiple of {GROUP}, but the target's "
            f"is {hidden}; use int8 or lossless"
        )


def code_bytes(codec: str, hidden: int) -> int:
    """Return the bytes of one row of codes of an int codec."""
    return {"int8": hidden, "int4": hidden // 2, "int3": 3 * hidden // 8}[codec]


def num_scales(codec: str, hidden: int) -> int:
    """Return the scales of one row of codes."""
    return hidden // GROUP if codec == "int4" else 1
