"""The stores of a run: opened, checked against each other, and their training samples chosen."""

import warnings
from collections import Counter

import numpy as np

from dflash_offline.common.blobs import options_by_address
from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.errors import BadInput, DamagedStore
from dflash_offline.common.identity import MIX, Scalar, compare
from dflash_offline.common.records import index_digest
from dflash_offline.common.store import supervised
from dflash_offline.common.where import select
from dflash_offline.train.anchors import BlockLayout, candidates
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loss_spec import parse_loss
from dflash_offline.train.token_shards import loss_masks


def open_caches(config: TrainConfig) -> list[Cache]:
    """Open the stores of --cache; all must be of one target.

    Raises:
        BadInput: no store there, an unfinished one, another target, or no teacher where one is due.
    """
    if config.read_cache is not None and not any("://" in url for url in config.cache):
        raise BadInput(
            f"--read-cache {config.read_cache} has no effect on stores in local folders, which are "
            "read where they lie; leave it out"
        )
    if twice := [url for url, count in Counter(config.cache).items() if count > 1]:
        raise BadInput(
            f"--cache {twice[0]} is given twice; give it once, with --weight if it is to count more"
        )
    by_address = options_by_address(config.cache, config.storage_option)
    caches = [
        open_cache(
            url,
            partial=config.partial,
            storage_options=options,
            read_cache=config.read_cache,
            read_cache_gb=config.read_cache_gb,
        )
        for url, options in zip(config.cache, by_address, strict=True)
    ]
    for url, cache in zip(config.cache[1:], caches[1:], strict=True):
        where = f"--cache {url}, to be mixed with {config.cache[0]},"
        compare(cache.identity, caches[0].identity, kinds=MIX, where=where)
    _check_teacher(config, caches)
    return caches


def _check_teacher(config: TrainConfig, caches: list[Cache]) -> None:
    """Refuse stores without the teacher that --loss or --labels ask for."""
    terms = parse_loss(config.loss).terms
    if terms.need_teacher:
        option, remedy = f"--loss {config.loss}", "--loss decay or dpace"
    elif config.labels == "teacher":
        option, remedy = "--labels teacher", "--labels data"
    else:
        return
    whole = bool(terms.rkl or terms.tv)
    for url, cache in zip(config.cache, caches, strict=True):
        schema = cache.schema
        if schema.teacher != "final" and (whole or not schema.num_topk):
            wanted = "--teacher final" if whole else "--teacher final or topk:K"
            raise BadInput(
                f"{option}: {url} holds no such teacher (it has {schema.teacher}); extract with "
                f"{wanted}, or use {remedy}"
            )
        if schema.teacher != caches[0].schema.teacher:
            raise BadInput(
                f"{option}: {url} has the teacher {schema.teacher}, but {config.cache[0]} has "
                f"{caches[0].schema.teacher}; mix stores of one kind, or use {remedy}"
            )


def training_samples(config: TrainConfig, caches: list[Cache]) -> list[list[int]]:
    """Return the samples of each store to train on, in plan order."""
    every = []
    for url, cache in zip(config.cache, caches, strict=True):
        wanted = cache.training_samples
        if not wanted:
            raise BadInput(f"--cache {url} has no training sample; extract with less --holdout")
        if config.where is not None:
            chosen = select(cache.plan, config.where)
            wanted = [index for index in wanted if chosen[index]]
            if not wanted:
                raise BadInput(
                    f"--where {config.where}: no training sample of {url} meets it; widen it"
                )
        every.append(wanted[: config.num_samples])
    return every


def planned(caches: list[Cache], wanted: list[list[int]], name: str) -> np.ndarray:
    """Return a field of the plan for all samples of stores that are trained on."""
    pairs = zip(caches, wanted, strict=True)
    return np.concatenate([cache.plan.column(name)[indices] for cache, indices in pairs])


def what_is_read(caches: list[Cache], wanted: list[list[int]]) -> list[dict[str, Scalar]]:
    """Return what tells stores, and their samples to train on, from others.

    A store that has grown has the identity that it had.
    """
    stores = []
    for cache, indices in zip(caches, wanted, strict=True):
        samples = {"training samples": f"{len(indices)} ({index_digest(indices)})"}
        ours = cache.identity
        stores.append({**ours.target, **ours.store, **ours.plan, **samples})
    return stores


def check_supervision(config: TrainConfig, caches: list[Cache], wanted: list[list[int]]) -> None:
    """Refuse stores in which no sample has a possible anchor; usually reads one pack's masks."""
    for cache, indices in zip(caches, wanted, strict=True):
        packs = cache.plan.column("pack")
        for pack in dict.fromkeys(packs[indices].tolist()):
            members = [index for index in indices if packs[index] == pack]
            try:
                masks = list(loss_masks(cache, pack, members))
            except DamagedStore:
                if config.damaged == "skip":
                    continue
                raise
            if any(len(candidates(supervised(mask, config.supervise))) for mask in masks):
                return
    raise BadInput(
        f"--supervise {config.supervise}: no training sample has two supervised tokens in a row; "
        "choose another rule, or extract data with assistant turns"
    )


def warn_of_short_documents(
    caches: list[Cache], wanted: list[list[int]], layout: BlockLayout
) -> None:
    """Warn once if no document is as long as a block."""
    lengths = planned(caches, wanted, "length")
    longest = int(lengths.max())
    if longest >= layout.block_size:
        return
    # A block may start at any token but the last; its labels end with the document.
    starts = np.concatenate([np.arange(1, length) for length in lengths])
    reach = np.minimum(starts, layout.num_predictions)
    cut = 1.0 - reach.sum() / (len(reach) * layout.num_predictions)
    warnings.warn(
        f"--block-size {layout.block_size} is longer than every document (the longest has "
        f"{longest} tokens): {cut:.0%} of the labels are cut off",
        stacklevel=2,
    )
