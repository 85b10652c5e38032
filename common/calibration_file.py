"""A store's calibration as files: one zarr array, the report of the codec's error, their manifest.

Written once, before the first pack; the manifest comes last and makes them count. Letters: S slots,
H hidden.
"""

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs
from dflash_offline.common.shards import CRC_BYTES, checksum
from dflash_offline.common.store import (
    CALIBRATION,
    CALIBRATION_KEY,
    CALIBRATION_MANIFEST_KEY,
    CODEC_REPORT_KEY,
    GROUP_KEY,
    exists,
    read_fixed,
)

if TYPE_CHECKING:
    from dflash_offline.common.quantize import Calibration

_PARTS = ("mean", "reciprocal", "scale")
_JSON_KEY = f"{CALIBRATION}/{GROUP_KEY}"


def calibration_files(calibration: "Calibration", report: Mapping[str, Any]) -> dict[str, bytes]:
    """Return key to content, in the order in which they are to be written.

    Args:
        calibration: on the CPU.
        report: plain data, from `codec_report`; empty where there is none.
    """
    values = np.stack([getattr(calibration, name).numpy() for name in _PARTS], axis=1)  # [S, 3, H]
    payload = np.ascontiguousarray(values, "<f4").tobytes()
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(values.shape),
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(values.shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [bytes_codec, {"name": "crc32c"}],
        "attributes": {
            "codec": calibration.codec,
            "exact_bound": calibration.exact_bound,
            "num_tokens": calibration.num_tokens,
            "num_samples": calibration.num_samples,
            "rows": list(_PARTS),
        },
    }
    files = {
        _JSON_KEY: records.pretty_json(metadata),
        CALIBRATION_KEY: payload + struct.pack("<I", checksum(payload)),
        CODEC_REPORT_KEY: records.pretty_json(report),
    }
    digests = {key: records.sha256(content) for key, content in files.items()}
    return {**files, CALIBRATION_MANIFEST_KEY: records.manifest(digests)}


def calibration_digests(blobs: Blobs) -> dict[str, str]:
    """Return the SHA-256 of the files that the calibration's manifest lists; none without one.

    Raises:
        DamagedStore: the manifest is not what was written.
    """
    if not exists(blobs, CALIBRATION_MANIFEST_KEY):
        return {}
    content = blobs.read(CALIBRATION_MANIFEST_KEY)
    return records.unseal(content, CALIBRATION_MANIFEST_KEY)["files"]


def read_calibration(blobs: Blobs) -> "Calibration | None":
    """Return the calibration, or `None` where none is written yet.

    Raises:
        DamagedStore: a file is missing or not what was written.
    """
    import torch

    from dflash_offline.common.quantize import Calibration

    digests = calibration_digests(blobs)
    if not digests:
        return None
    metadata = json.loads(read_fixed(blobs, _JSON_KEY, digests))
    payload = read_fixed(blobs, CALIBRATION_KEY, digests)[:-CRC_BYTES]
    values = np.frombuffer(payload, "<f4").reshape(metadata["shape"])
    attributes = metadata["attributes"]
    parts = {name: torch.from_numpy(values[:, at].copy()) for at, name in enumerate(_PARTS)}
    return Calibration(
        codec=attributes["codec"],
        exact_bound=attributes["exact_bound"],
        num_tokens=attributes["num_tokens"],
        num_samples=attributes["num_samples"],
        **parts,
    )


def read_codec_report(blobs: Blobs) -> dict[str, Any]:
    """Return the report of the codec's error as plain data, empty for a store that loses nothing.

    Raises:
        DamagedStore: a file is missing or not what was written.
    """
    digests = calibration_digests(blobs)
    return json.loads(read_fixed(blobs, CODEC_REPORT_KEY, digests)) if digests else {}
