"""`dflash-cache repair` and `rm`: what is given up leaves the index first and the disk afterwards,
so that a crash in between changes nothing that a reader sees.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import track

from dflash_offline.common.blobs import Blobs, LocalBlobs, is_temporary
from dflash_offline.common.cache import Cache, Document, open_cache
from dflash_offline.common.cache_cli import RemoveConfig, RepairConfig
from dflash_offline.common.cache_verify import broken_packs, find_file_problems, read_checked
from dflash_offline.common.errors import BadInput, DamagedStore, FoundProblems
from dflash_offline.common.lease import is_owner_key
from dflash_offline.common.pack_index import (
    damaged_indexes,
    leftovers,
    scan_records,
    write_pack_index,
)
from dflash_offline.common.plan_writer import restore_metadata
from dflash_offline.common.quantize import EncodedStates
from dflash_offline.common.records import REMOVED
from dflash_offline.common.signals import signals_wait
from dflash_offline.common.store import (
    COMMIT,
    FINAL,
    LOSS_MASK,
    TOKENS,
    Schema,
    exists,
    index_key,
    read_plan,
    shard_key,
)
from dflash_offline.common.store_writer import Store, own
from dflash_offline.common.topk import TopK
from dflash_offline.common.where import select


def repair(config: RepairConfig) -> None:
    """Give up broken packs and delete leftovers; extraction then redoes just those.

    Raises:
        FoundProblems: a file that no run writes again is damaged.
    """
    with own(config.url, config.storage_option) as (blobs, header):
        index, unreadable = scan_records(blobs)
        cache = Cache(blobs, index=index)
        broken = broken_packs(cache)
        if config.retry_quarantined:
            bad = {pack for pack, (_, members) in index.packs.items() if members} - set(broken)
            # What `rm` took stays away.
            bad = {p for p in bad if REMOVED not in cache.record(p)["quarantined"].values()}
            broken |= dict.fromkeys(bad, "holds quarantined samples")
        for pack, reason in sorted(broken.items()):
            click.echo(f"pack {pack} given up: {reason}")
        for key in unreadable:
            click.echo(f"{key} given up: not a readable record")
        kept = index.without(set(broken))
        written = write_pack_index(blobs, kept, cache.plan.num_packs)
        for key in damaged_indexes(blobs):
            # Their numbers have no gaps, so a damaged one is replaced, not deleted.
            blobs.replace(key, blobs.read(index_key(written.number - 1)))
        missing = set(range(cache.plan.num_packs)) - set(kept.packs)
        _delete_all(blobs, [*unreadable, *_damaged_tokens(cache, missing)])
        removed = _delete_leftovers(blobs, header.schema, set(kept.packs))
        if written.dropped:
            # Their records are gone; the same bytes count again, from a copy of the store too.
            write_pack_index(blobs, written.cleared(), cache.plan.num_packs)
        removed += len(blobs.drop_stale_uploads())
        if not cache.num_unplanned:
            restore_metadata(blobs, header.schema, cache.plan.num_packs)
        click.echo(
            f"{config.url}: {len(kept.packs)} packs kept, {len(broken)} given up, "
            f"{removed} leftover objects deleted; dflash-extract computes what is missing"
        )
        beyond = list(find_file_problems(cache, deep=True))
    if beyond:
        raise FoundProblems(
            f"{'; '.join(beyond)}: not made again by a rerun; take these files from a copy of the "
            "store, or extract anew"
        )


def _damaged_tokens(cache: Cache, packs: set[int]) -> list[str]:
    """Return the token shards of some packs that are not what the plan says."""
    _, token_files = read_plan(cache.blobs, batches=False)
    damaged = []
    for pack in packs:
        for name, stated in token_files[pack].items():
            try:
                read_checked(cache, name, pack, stated)
            except (DamagedStore, FileNotFoundError):
                damaged.append(shard_key(name, pack))
    return damaged


def _delete_leftovers(blobs: Blobs, schema: Schema, packs: set[int]) -> int:
    """Delete temporary files, and shards and records of packs that do not exist."""
    gone = leftovers(blobs, schema, packs)
    gone += [key for name in (TOKENS, LOSS_MASK) for key in blobs.list(name) if is_temporary(key)]
    return _delete_all(blobs, gone)


def _delete_all(blobs: Blobs, keys: Iterable[str]) -> int:
    count = 0
    for key in keys:
        if exists(blobs, key):
            blobs.delete(key)
            count += 1
    return count


def remove(config: RemoveConfig) -> None:
    """Remove a store, or the states and tokens of the samples that meet a condition."""
    if config.where is None:
        _remove_store(config)
        return
    cache = open_cache(config.url, partial=True, storage_options=config.storage_option)
    meets = select(cache.plan, config.where)
    chosen = sorted(set(np.flatnonzero(meets).tolist()) & set(cache.samples))
    if uncommitted := np.count_nonzero(meets & ~np.isin(cache.plan.column("pack"), cache.packs)):
        click.echo(
            f"warning: {uncommitted} more samples lie in packs that are not computed, as an "
            "interrupted rm leaves them too; their tokens stay until dflash-extract has finished "
            "the store and rm is run again",
            err=True,
        )
    packs = sorted({cache.plan.samples[index].pack for index in chosen})
    question = f"Remove {len(chosen)} samples, rewriting {len(packs)} packs of {config.url}?"
    if not chosen or not _is_meant(config, question):
        click.echo("nothing removed")
        return
    kept = set(cache.samples) - set(chosen)
    with Store.open(config.url, config.storage_option) as store:
        for pack in track(packs, "rewrite", transient=True):
            _rewrite_pack(store, cache, pack, kept)
    click.echo(f"{len(chosen)} samples removed from {len(packs)} packs of {config.url}")


def _rewrite_pack(store: Store, cache: Cache, pack: int, kept: set[int]) -> None:
    """Commit a pack again with zeros where samples were that are not kept."""
    members = store.pack_samples(pack)
    readable = [index for index in members if index in kept]
    documents: dict[int, Any] = {}
    features, final = None, None
    if cache.schema.is_coded:
        # As codes: states that are coded twice would lose twice.
        coded = cache.read_codes(members)
        documents = {d.index: d for d in coded if d.index in readable}
        states = [d.states if d.index in documents else d.states.zeros() for d in coded]
        features = EncodedStates.joined(states)
    else:
        documents = {d.index: d for d in cache.read_many(readable)}
        features, final = _lay_out(cache, members, documents)
    k, lengths = cache.schema.num_topk, (cache.plan.samples[index].length for index in members)
    best = [
        documents[index].topk if index in documents else TopK.zeros(length, k)
        for index, length in zip(members, lengths, strict=True)
    ]
    reasons = cache.record(pack)["quarantined"]
    tokens, masks = (
        {i: getattr(d, name) for i, d in documents.items()} for name in ("tokens", "loss_mask")
    )
    gone_now = {i: reasons.get(i, REMOVED) for i in members if i not in documents}
    joined = TopK.joined(best) if k else None
    # In between, the states of all samples of the pack are nowhere.
    with signals_wait():
        store.drop_packs({pack})
        store.rewrite_tokens(pack, tokens, masks)
        store.commit_pack(pack, features, final, topk=joined, quarantined=gone_now)


def _lay_out(
    cache: Cache, members: list[int], documents: Mapping[int, Document]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return states [K, tokens, H] and [tokens, H]; zeros without a document."""
    schema = cache.schema
    lengths = [cache.plan.samples[index].length for index in members]
    features = np.zeros((len(schema.layers), sum(lengths), schema.hidden), np.uint16)
    final = np.zeros(features.shape[1:], np.uint16) if FINAL in schema.state_arrays else None
    start = 0
    for index, length in zip(members, lengths, strict=True):
        if index in documents:
            features[:, start : start + length] = documents[index].features
            if final is not None:
                final[start : start + length] = documents[index].final
        start += length
    return features, final


def _remove_store(config: RemoveConfig) -> None:
    """Delete every object of a store.

    Raises:
        FoundProblems: part of it lies behind links, and stays.
    """
    with own(config.url, config.storage_option) as (blobs, _header):
        keys = blobs.list("")
        if not _is_meant(config, f"Delete {len(keys)} objects of {config.url}?"):
            click.echo("nothing removed")
            return
        # Records and indexes first: from then on nothing exists for a reader.
        is_first = (f"{COMMIT}/", index_key(0)[:-1])
        # Ownership last: whoever took it in between would lose what it writes.
        keys.sort(key=lambda key: (not key.startswith(is_first), is_owner_key(key)))
        links = _links_to_elsewhere(blobs.root) if isinstance(blobs, LocalBlobs) else []
        _delete_all(blobs, keys)
        if isinstance(blobs, LocalBlobs):
            _drop_empty_folders(blobs.root)
    if links:
        raise FoundProblems(
            f"{config.url} is no store any more, but what lies behind its links was left, since it "
            f"may be of others too ({', '.join(links)}); delete it there, and the links that stay"
        )
    click.echo(f"{config.url} removed")


def _links_to_elsewhere(root: Path) -> list[str]:
    walked = os.walk(root)
    found = (Path(at) / name for at, folders, files in walked for name in folders + files)
    return [f"{path.relative_to(root)} -> {path.resolve()}" for path in found if path.is_symlink()]


def _drop_empty_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        # Of another run by now, a link, or where a disk is mounted.
        with suppress(OSError):
            os.rmdir(folder)


def _is_meant(config: RemoveConfig, question: str) -> bool:
    try:
        return config.yes or click.confirm(question)
    except click.Abort:
        raise BadInput("nobody is there to answer; add --yes, and nothing is asked") from None
