"""What is checked before a store is written: the address, its identity, the room on the disk."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs, LocalBlobs, is_temporary, nearest_there
from dflash_offline.common.errors import BadInput, DamagedStore
from dflash_offline.common.identity import (
    APPEND,
    RESUME,
    Identity,
    Scalar,
    compare,
    differing,
    known_part,
)
from dflash_offline.common.lease import is_owner_key
from dflash_offline.common.store import (
    COMMIT,
    LOGS,
    MANIFEST_KEY,
    PLAN,
    Header,
    count_plans,
    exists,
    read_fixed,
    read_header,
    stated_digests,
)

# Room that must stay free beside the estimate, for records, logs and other people's files.
_RESERVE_BYTES = 64 << 20


def has_plan(blobs: Blobs, identity: Identity, *, append: bool) -> bool:
    """Return whether the store at an address already has this plan.

    Raises:
        BadInput: it holds something else, or a store made with other settings.
        DamagedStore: what was written before the first pack is missing or changed.
    """
    header = _begun_header(blobs)
    if header is None:
        return False
    where = f"the store at {blobs.url}"
    compare(header.identity, identity, kinds=APPEND, where=where)
    if not all(differing(plan, identity.plan) for plan in _plan_identities(blobs)):
        return True
    if not append:
        compare(header.identity, identity, kinds=RESUME, where=where)
    return False


def refuse_early(blobs: Blobs, known: Identity, *, append: bool) -> None:
    """Refuse what `has_plan` would, by the fields that are known before the corpus is read.

    Args:
        known: fields of an identity; others are not compared.

    Raises:
        BadInput, DamagedStore: as `has_plan`.
    """
    header = _begun_header(blobs)
    if header is None:
        return
    stored, where = header.identity, f"the store at {blobs.url}"
    plans = [known_part(plan, known.plan) for plan in _plan_identities(blobs)]
    is_new = all(differing(plan, known.plan) for plan in plans)
    part = Identity(
        target=known_part(stored.target, known.target),
        store=known_part(stored.store, known.store),
        plan=known_part(stored.plan, known.plan),
    )
    compare(part, known, kinds=RESUME if is_new and not append else APPEND, where=where)


def _begun_header(blobs: Blobs) -> Header | None:
    """Return the root of a store that has a plan; None where there is none to be compared with.

    Raises:
        BadInput: the address holds something else.
        DamagedStore: the manifest is missing.
    """
    header = read_header(blobs, required=False)
    if header is None:
        refuse_strangers(blobs, "--out")
        return None
    if not exists(blobs, MANIFEST_KEY):
        # Packs come after it, so a store that has some is damaged, not new.
        if blobs.list(COMMIT):
            raise DamagedStore(
                f"{MANIFEST_KEY} of {blobs.url} is missing, though packs of its plan are there; "
                f"{records.COPY_OR_ANEW}"
            )
        return None
    return header


def _plan_identities(blobs: Blobs) -> list[dict[str, Scalar]]:
    """Return the plan fields of every plan's identity."""
    stated = stated_digests(blobs)
    keys = [f"{PLAN}/{n}/{records.PLAN_FILES[2]}" for n in range(count_plans(blobs))]
    return [records.unseal(read_fixed(blobs, key, stated), key)["identity"] for key in keys]


def refuse_strangers(blobs: Blobs, name: str) -> None:
    """Refuse to make a store where something else lies.

    Args:
        name: what the user gave the address as.

    Raises:
        BadInput: the address holds what belongs to no store.
    """
    strangers = [key for key in blobs.list("") if not _is_beside_a_store(key)]
    if strangers:
        raise BadInput(
            f"{name} {blobs.url} is not empty and holds no store (it has {strangers[0]}); "
            "give a new folder"
        )


def _is_beside_a_store(key: str) -> bool:
    return key.startswith(f"{LOGS}/") or is_owner_key(key) or is_temporary(key)


def refuse_unwritable(blobs: Blobs) -> None:
    """Refuse a folder of others before anything is done for it.

    Raises:
        BadInput: this user may not write there.
        OSError: nobody may: the file system is read-only.
    """
    if not isinstance(blobs, LocalBlobs):
        return
    folder = nearest_there(blobs.root)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    own = os.access in os.supports_effective_ids
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=own):
        raise BadInput(
            f"--out {blobs.url} cannot be written, since {folder} belongs to others; give a folder "
            "that you may write, or have this one opened"
        )


def refuse_small_disk(blobs: Blobs, states: int, files: Mapping[str, bytes | Path]) -> None:
    """Refuse a disk that cannot take a new store.

    Args:
        states: estimate of what the packs will take, in bytes.
        files: what goes into `target/`.

    Raises:
        BadInput: says what is free and what is needed.
    """
    needed = states + sum(
        v.stat().st_size if isinstance(v, Path) else len(v) for v in files.values()
    )
    free = blobs.free_bytes()
    if free is not None and needed + _RESERVE_BYTES > free:
        raise BadInput(
            f"--out {blobs.url} has {free / 1e9:.2f} GB free and the store needs about "
            f"{(needed + _RESERVE_BYTES) / 1e9:.2f} GB; free space, use fewer samples or layers, "
            "or another --codec"
        )
