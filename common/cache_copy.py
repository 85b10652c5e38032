"""`dflash-cache copy`: a store, or part of it, somewhere else; run again to resume.

Where nothing changes, objects are copied as they are. Another codec, fewer layers or fewer samples
make a new store from what the old one decodes to. Records come last either way.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np
from rich.progress import track

from dflash_offline.common.blobs import Blobs, blobs_at, options_by_address
from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import CopyConfig
from dflash_offline.common.cache_verify import find_file_problems, read_checked
from dflash_offline.common.calibration import CalibrationRows, calibration_batches
from dflash_offline.common.calibration_file import read_codec_report
from dflash_offline.common.codec_report import codec_report
from dflash_offline.common.errors import BadInput, DamagedStore
from dflash_offline.common.identity import Identity
from dflash_offline.common.logit_scales import logit_scale, logit_softcap, text_config
from dflash_offline.common.pack_index import (
    PackIndex,
    pack_of,
    read_record,
    scan_records,
    write_pack_index,
)
from dflash_offline.common.pack_reader import read_flat
from dflash_offline.common.quantize import EncodedStates
from dflash_offline.common.records import index_digest
from dflash_offline.common.store import (
    CALIBRATION_MANIFEST_KEY,
    COMMIT,
    FINAL,
    GROUP_KEY,
    LOSS_MASK,
    TARGET,
    TOKENS,
    Plan,
    Schema,
    commit_key,
    count_plans,
    exists,
    manifest_key,
    shard_key,
)
from dflash_offline.common.store_checks import refuse_strangers
from dflash_offline.common.store_writer import Store, own
from dflash_offline.common.topk import joined_topk
from dflash_offline.common.where import select

_COPY_BYTES = 16 << 20


def copy(config: CopyConfig) -> None:
    """Copy a store.

    Raises:
        BadInput: the destination holds something else.
        DamagedStore: a byte of the source is not what was written.
    """
    addresses = (config.source, config.destination)
    of_source, of_copy = options_by_address(addresses, config.storage_option)
    cache = open_cache(config.source, partial=True, storage_options=of_source)
    if config.codec is None and config.layers is None and config.where is None:
        count = _copy_objects(cache, config.destination, of_copy)
    else:
        count = _copy_content(cache, config, of_copy)
    click.echo(f"{config.destination}: {count} packs, every byte checked")


def _copy_objects(cache: Cache, destination: str, storage_options: Sequence[str]) -> int:
    blobs = blobs_at(destination, storage_options)
    fixed = [*cache.fixed_files(), *(manifest_key(n) for n in range(count_plans(cache.blobs)))]
    if cache.schema.is_coded:
        fixed.append(CALIBRATION_MANIFEST_KEY)
    _refuse_other_content(cache.blobs, blobs)
    # The root makes the destination a store that can be owned; it must be there first.
    fixed.sort(key=lambda key: key != GROUP_KEY)
    _copy_object(cache.blobs, blobs, fixed[0])
    with own(destination, storage_options):
        for key in fixed[1:]:
            _copy_object(cache.blobs, blobs, key)
        there = _packs_to_keep(blobs, cache.plan.num_packs)
        for pack in track(cache.packs, "copy", transient=True):
            if pack in there.packs:
                _refuse_other_pack(cache, read_record(blobs, there, pack), blobs.url)
                continue
            for name, stated in cache.record(pack)["arrays"].items():
                key = shard_key(name, pack)
                content = read_checked(cache, name, pack, stated)
                if exists(blobs, key):
                    blobs.delete(key)
                blobs.create(key, [content])
            _copy_object(cache.blobs, blobs, commit_key(pack))
        index, _ = scan_records(blobs)
        write_pack_index(blobs, index, cache.plan.num_packs)
    problems = list(find_file_problems(Cache(blobs), deep=True))
    if problems:
        raise DamagedStore(f"{destination}: {'; '.join(problems)}")
    return len(cache.packs)


def _packs_to_keep(blobs: Blobs, num_packs: int) -> PackIndex:
    """Return the packs that exist, once records that do not count are gone.

    A pack that was given up is likely to be copied with the same bytes, and counts then.
    """
    index, _ = scan_records(blobs)
    for key in blobs.list(COMMIT):
        if pack_of(key) not in index.packs:
            blobs.delete(key)
    return write_pack_index(blobs, index.cleared(), num_packs) if index.dropped else index


def _refuse_other_pack(cache: Cache, copied: dict[str, Any], url: str) -> None:
    record = cache.record(copied["pack"])
    if any(record[name] != copied[name] for name in ("arrays", "quarantined")):
        raise BadInput(
            f"pack {copied['pack']} of DST {url} is not that of SRC {cache.blobs.url}: samples "
            "were removed or states computed anew since; give a new folder, or remove DST first"
        )


def _refuse_other_content(source: Blobs, destination: Blobs) -> None:
    if exists(destination, GROUP_KEY):
        if destination.read(GROUP_KEY) != source.read(GROUP_KEY):
            raise BadInput(
                f"DST {destination.url} holds another store than {source.url}; give a new folder"
            )
    else:
        refuse_strangers(destination, "DST")


def _copy_object(source: Blobs, destination: Blobs, key: str) -> None:
    if exists(destination, key):
        # An append has raised its number of packs since.
        if key.endswith(f"/{GROUP_KEY}") and destination.read(key) != source.read(key):
            destination.replace(key, source.read(key))
        return
    size = source.size(key)
    destination.create(
        key,
        (
            source.read_range(key, offset, min(_COPY_BYTES, size - offset))
            for offset in range(0, size, _COPY_BYTES)
        ),
    )


def _copy_content(cache: Cache, config: CopyConfig, storage_options: Sequence[str]) -> int:
    """Make a new store from decoded documents."""
    layers = _wanted_layers(cache, config.layers)
    schema = replace(cache.schema, layers=layers, codec=config.codec or cache.schema.codec)
    chosen = _wanted_samples(cache, config.where)
    plan, groups = _smaller_plan(cache.plan, chosen)
    rows = [row for group in groups for row in _tokens_of(cache, group)]
    with Store.create_or_resume(
        config.destination,
        schema=schema,
        identity=_changed_identity(cache, schema, config.where, chosen=chosen),
        plan=plan,
        tokens=[tokens for tokens, _ in rows],
        masks=[mask for _, mask in rows],
        target_files=_target_files(cache),
        options={**cache.options, "copied_from": config.source},
        storage_options=storage_options,
    ) as store:
        _calibrate(store, cache, list(itertools.chain.from_iterable(groups)))
        todo = sorted(set(range(plan.num_packs)) - store.committed)
        for pack in track(todo, "copy", transient=True):
            if schema.is_coded and schema.codec == cache.schema.codec:
                coded = cache.read_codes(groups[pack], layers)
                states = EncodedStates.joined([d.states for d in coded])
                store.commit_pack(pack, states, topk=joined_topk([d.topk for d in coded]))
                continue
            documents = cache.read_many(groups[pack], layers)
            features = np.concatenate([d.features for d in documents], axis=1)
            finals = [d.final for d in documents if d.final is not None]
            has_final = FINAL in schema.state_arrays
            final = np.concatenate(finals) if has_final else None
            best = joined_topk([d.topk for d in documents])
            store.commit_pack(pack, features, final, topk=best)
    return plan.num_packs


def _calibrate(store: Store, cache: Cache, sources: Sequence[int]) -> None:
    """Take the source's calibration along with its codes, or fit one on samples of the copy.

    Args:
        sources: sample of `cache` behind each sample of `store`.
    """
    if not store.needs_calibration:
        return
    layers, codec = store.schema.layers, store.schema.codec
    if codec == cache.schema.codec:
        slots = [cache.schema.layers.index(layer) for layer in layers]
        slots += range(len(cache.schema.layers), cache.schema.num_slots)
        report = read_codec_report(cache.blobs)
        report["layers"] = [each for each in report["layers"] if each["layer"] in layers]
        store.write_calibration(cache.calibration.chosen(slots), report)
        return
    rows = CalibrationRows()
    for batch in calibration_batches(store.plan, 0, batch_tokens=store.schema.pack_tokens):
        for document in cache.read_many([sources[index] for index in batch], layers):
            final = None if document.final is None else document.final_torch()
            rows.add(document.features_torch(), final)
    calibration = rows.fit(codec)
    target = text_config(cache.target_config)
    error = codec_report(
        rows,
        calibration,
        layers=layers,
        head=cache.target_tensor("lm_head") if store.schema.teacher == "final" else None,
        logit_scale=logit_scale(target),
        logit_softcap=logit_softcap(target),
    )
    store.write_calibration(calibration, error)


def _wanted_layers(cache: Cache, layers: str | None) -> tuple[int, ...]:
    if layers is None:
        return cache.schema.layers
    try:
        wanted = tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise BadInput(f"--layers {layers} is no list of numbers; write 1,9,17") from None
    if len(set(wanted)) < len(wanted):
        raise BadInput(f"--layers {layers} repeats an id; name each once")
    missing = [layer for layer in wanted if layer not in cache.schema.layers]
    if missing:
        held = ",".join(map(str, cache.schema.layers))
        raise BadInput(f"--layers {layers} asks for {missing[0]}; the store holds {held}")
    return wanted


def _wanted_samples(cache: Cache, where: str | None) -> list[int]:
    if not cache.samples:
        raise BadInput(f"SRC {cache.blobs.url} has no sample left that can be read; copy another")
    if where is None:
        return cache.samples
    meets = select(cache.plan, where)
    chosen = [index for index in cache.samples if meets[index]]
    if not chosen:
        raise BadInput(f"--where {where!r} meets none of {len(cache.samples)} samples; loosen it")
    return chosen


def _smaller_plan(plan: Plan, chosen: Sequence[int]) -> tuple[Plan, list[list[int]]]:
    """Return the plan of the chosen samples, and the old sample indices of each new pack.

    Packs stay together and in order; those that lose every sample are gone.
    """
    is_chosen = np.zeros(len(plan.samples), bool)
    is_chosen[list(chosen)] = True
    groups = [[i for i in members if is_chosen[i]] for members in plan.pack_samples()]
    groups = [group for group in groups if group]
    samples = []
    for pack, group in enumerate(groups):
        start = 0
        for index in group:
            sample = plan.samples[index]
            samples.append(replace(sample, pack=pack, start=start))
            start += sample.length
    firsts = np.cumsum([0, *map(len, groups)])
    smaller = Plan(
        samples=samples,
        batches=[[list(range(a, b))] for a, b in itertools.pairwise(firsts)],
        num_packs=len(groups),
        num_held_out_packs=len({s.pack for s in samples if s.held_out}),
        unit_packs=1,
        report={**plan.report, "kept_by_copy": len(samples)},
    )
    return smaller, groups


def _tokens_of(cache: Cache, group: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return int32 token ids [T] and uint8 loss mask [T] of samples of one pack."""
    samples = [cache.plan.samples[index] for index in group]
    pack = samples[0].pack
    stated = cache.record(pack)["arrays"]
    tokens, mask = (
        read_flat(cache.blobs, cache.schema, name, pack, stated[name])
        for name in (TOKENS, LOSS_MASK)
    )
    spans = [slice(sample.start, sample.start + sample.length) for sample in samples]
    return [(tokens[span], mask[span]) for span in spans]


def _changed_identity(
    cache: Cache, schema: Schema, where: str | None, *, chosen: Sequence[int]
) -> Identity:
    old = cache.identity
    plan = old.plan if where is None else {**old.plan, "where": where}
    if len(chosen) < len(cache.plan.samples):
        # What comes to an unfinished source later would take another place in the copy.
        plan = {**plan, "copied_samples": index_digest(chosen)}
    layers = ",".join(map(str, schema.layers))
    return Identity(
        target={**old.target, "layers": layers},
        store={**old.store, "codec": schema.codec},
        plan=plan,
    )


def _target_files(cache: Cache) -> dict[str, Any]:
    folder = cache.target_path
    prefix = f"{TARGET}/"
    keys = [key for key in cache.fixed_files() if key.startswith(prefix)]
    return {key.removeprefix(prefix): folder / key.removeprefix(prefix) for key in keys}
