"""A verified copy of a store's fixed files on local disk, for libraries that read only paths."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from dflash_offline.common.blobs import Blobs, LocalBlobs
from dflash_offline.common.errors import DamagedStore

_PART_BYTES = 16 << 20


def cache_folder() -> Path:
    """Return where this machine keeps what can be made again, under `$XDG_CACHE_HOME`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dflash-offline"


def local_copy(blobs: Blobs, digests: Mapping[str, str], folder: str) -> Path:
    """Return the local twin of a folder, fetching the files that are not there yet.

    Twins lie in `cache_folder`, named by their content, so stores with the same target share one.
    A file that is there is read to its end all the same: the disk may have changed it since.

    Args:
        digests: key to SHA-256 of the store's fixed files.

    Raises:
        DamagedStore: a file is not what the manifest states.
    """
    wanted = {key: sha for key, sha in digests.items() if key.startswith(f"{folder}/")}
    listing = "\n".join(f"{key} {sha}" for key, sha in sorted(wanted.items()))
    name = hashlib.sha256(listing.encode()).hexdigest()[:16]
    local = LocalBlobs(cache_folder() / name)
    for key, sha in wanted.items():
        try:
            check_file(local, key, sha)
        except DamagedStore:
            with suppress(FileNotFoundError):
                local.delete(key)
            # Another process may fetch the same file; either copy will do.
            with suppress(FileExistsError):
                local.create(key, _checked_parts(blobs, key, sha))
    return local.root / folder


def check_file(blobs: Blobs, key: str, sha: str) -> None:
    """Read a fixed file to its end.

    Raises:
        DamagedStore: it is missing or not what the manifest states.
    """
    for _ in _checked_parts(blobs, key, sha):
        pass


def _checked_parts(blobs: Blobs, key: str, sha: str) -> Iterator[bytes]:
    """Yield a file in parts, and raise at its end when it is not what was stated."""
    try:
        size = blobs.size(key)
    except FileNotFoundError:
        raise DamagedStore(f"{key} is missing") from None
    digest = hashlib.sha256()
    for offset in range(0, size, _PART_BYTES):
        part = blobs.read_range(key, offset, _PART_BYTES)
        digest.update(part)
        yield part
    if digest.hexdigest() != sha:
        raise DamagedStore(f"{key} differs from the manifest")
