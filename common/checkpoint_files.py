"""Where a target's files lie: a GGUF file, a folder or a hub id, and the digest of its weights."""

import hashlib
import json
import os
import re
import struct
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants

from dflash_offline.common.errors import BadInput

_SAMPLE_BYTES = 64
_SAMPLES_PER_FILE = 4096
_PROBE_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A place that transformers can load from.

    Attributes:
        given: what the user wrote.
        where: folder or hub id.
        gguf_file: name of the GGUF file inside `where`, when the target is one.
        revision: branch, tag or commit of a hub id.
        offline: whether only files that are already here may be used.
    """

    given: str
    where: str
    gguf_file: str | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False

    def load_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that every `from_pretrained` of this checkpoint takes."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.gguf_file:
            arguments["gguf_file"] = self.gguf_file
        if self.revision:
            arguments["revision"] = self.revision
        if self.offline:
            arguments["local_files_only"] = True
        return arguments

    def folder(self) -> Path:
        """Return the local folder that holds the files (the hub's snapshot once it is loaded)."""
        if Path(self.where).is_dir():
            return Path(self.where)
        snapshot = huggingface_hub.snapshot_download(
            self.where, revision=self.revision, local_files_only=True
        )
        return Path(snapshot)


def find_checkpoint(
    target: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> Checkpoint:
    """Tell a GGUF file, a folder and a hub id apart, without reading weights.

    Raises:
        BadInput: nothing there, at once also where the hub cannot be reached; or a revision of what
            lies here.
    """
    given = str(target)
    path = Path(given).expanduser()
    if revision and path.exists():
        raise BadInput(
            f"--target-revision {revision} is for a hub id, and --target {given} is a file or "
            "folder here; leave the revision out, or give the hub's id from another folder"
        )
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(given=given, where=str(path.parent), gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(
                f"--target {given} is a folder without config.json; give a Hugging Face folder, a "
                "GGUF file or a hub id"
            )
        return Checkpoint(given=given, where=str(path), trust_remote_code=trust_remote_code)
    if path.exists():
        raise BadInput(
            f"--target {given} is a file that does not end in .gguf; give a GGUF file, a Hugging "
            "Face folder or a hub id"
        )
    if path.is_absolute() or given.endswith(".gguf") or not _HUB_ID.fullmatch(given):
        raise BadInput(
            f"--target {given} does not exist; give a GGUF file, a Hugging Face folder or a hub id"
        )
    return Checkpoint(
        given=given,
        where=given,
        revision=revision,
        offline=_must_be_offline(given, revision),
        trust_remote_code=trust_remote_code,
    )


def _must_be_offline(hub_id: str, revision: str | None) -> bool:
    """Ask the hub once: transformers alone retries for 20 s before it gives up."""
    if not _hub_answers():
        cached = huggingface_hub.try_to_load_from_cache(hub_id, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise BadInput(
                f"--target {hub_id} is no local file or folder, is not in the hub's cache, and the "
                "hub cannot be reached; correct the path, or download it first"
            )
        return True
    return False


def _hub_answers() -> bool:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def sampled_digest(checkpoint: Checkpoint) -> str:
    """Return a SHA-256 over names, shapes, sizes and a fixed sample of bytes of all weights.

    Reads at most 64 bytes at three places of each tensor (safetensors) or at 4,096 places of each
    file (GGUF, pickles), so that hundreds of gigabytes take seconds. File names do not count:
    re-sharding a checkpoint keeps its digest.
    """
    digest = hashlib.sha256()
    folder = checkpoint.folder()
    if checkpoint.gguf_file:
        digest.update(_file_sample(folder / checkpoint.gguf_file))
    elif shards := sorted(folder.glob("*.safetensors")):
        tensors = [entry for shard in shards for entry in _tensor_samples(shard)]
        for entry in sorted(tensors):
            digest.update(entry)
    else:
        for path in sorted(folder.glob("pytorch_model*.bin")):
            digest.update(_file_sample(path))
    return digest.hexdigest()


def early_digest(checkpoint: Checkpoint) -> str | None:
    """Return `sampled_digest` of files that are here before the target is loaded.

    None for a hub id, which may still have to be downloaded, and for files that are not what they
    should be, of which loading will tell more.
    """
    if not Path(checkpoint.where).is_dir():
        return None
    try:
        return sampled_digest(checkpoint)
    except (OSError, ValueError, ArithmeticError, MemoryError, LookupError, struct.error):
        return None


def _file_sample(path: Path) -> bytes:
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, size // _SAMPLES_PER_FILE)
    with path.open("rb", buffering=0) as file:
        parts = [os.pread(file.fileno(), _SAMPLE_BYTES, at) for at in range(0, size, step)]
    return struct.pack("<Q", size) + b"".join(parts)


def _tensor_samples(path: Path) -> list[bytes]:
    with path.open("rb", buffering=0) as file:
        (header_bytes,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 0))
        header = json.loads(os.pread(file.fileno(), header_bytes, 8))
        entries = []
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + header_bytes + offset for offset in tensor["data_offsets"])
            # Offsets relative to the shard stay out, so that re-sharding changes nothing.
            label = f"{name} {tensor['dtype']} {tensor['shape']}".encode()
            last = max(begin, end - _SAMPLE_BYTES)
            places = (begin, (begin + last) // 2, last)
            sample = b"".join(
                os.pread(file.fileno(), min(_SAMPLE_BYTES, end - at), at) for at in places
            )
            entries.append(label + sample)
    return entries
