"""An extraction from the first row to the last commit, in the order in which a user sees it.

Everything that can be refused is refused before the target is loaded or anything is written. Of
several workers the first plans, owns the store and talks to the user; the others wait for the plan,
and all of them take units from one queue.
"""

import os
import sys

import torch

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.device_choice import resolve_dtype
from dflash_offline.common.device_memory import told_of_memory
from dflash_offline.common.errors import BadInput, FoundProblems, Stopped
from dflash_offline.common.identity import Identity
from dflash_offline.common.options import config_as_dict, print_config
from dflash_offline.common.plain_console import plain_console
from dflash_offline.common.progress import JsonLog, format_seconds
from dflash_offline.common.records import REMOVED
from dflash_offline.common.store import MANIFEST_KEY, exists
from dflash_offline.common.store_checks import refuse_small_disk
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target, load_target
from dflash_offline.extract.best_tokens import BestTokens
from dflash_offline.extract.calibrate import calibrate
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.crew import Crew
from dflash_offline.extract.estimate import dry_run
from dflash_offline.extract.fast_path import refuse_slow, use_fast_convolution
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.memory_model import free_device_bytes
from dflash_offline.extract.pipeline import num_writers
from dflash_offline.extract.place import Place, place_in
from dflash_offline.extract.plan import frequent_shapes
from dflash_offline.extract.planning import Planned, plan_extraction, plan_sentence, store_fields
from dflash_offline.extract.run_log import log_checks, run_log
from dflash_offline.extract.self_check import report, self_check, stored_check
from dflash_offline.extract.stop_request import StopRequest
from dflash_offline.extract.tally import Tally
from dflash_offline.extract.target_files import run_info, target_files, target_identity
from dflash_offline.extract.tensor_parallel import TensorGroup
from dflash_offline.extract.worker import Worker, unfinished_units

_POLL_S = 0.1
_UNUSABLE = "do not train from this store"
_PLANNED, _UNITS, _TAKEN = "planned", "units", "taken"


def work(config: ExtractConfig) -> None:
    """Be one of the workers that our own launcher starts."""
    place = place_in(os.environ)
    assert place is not None
    try:
        extract(config, place)
    except Stopped:
        if not place.is_first:
            # The first worker or the launcher tells the user.
            raise SystemExit(Stopped.exit_code) from None
        raise


def extract(config: ExtractConfig, place: Place) -> None:
    """Be one worker of a `dflash-extract` run, or all of it.

    Raises:
        BadInput: anything the user gave that cannot be used; nothing has been written.
        Stopped: a signal, a full disk or a lost worker; what is committed is safe.
        FoundProblems: the self-check failed, or more samples than `--max-bad` are quarantined.
    """
    device = _device(place)
    if config.dry_run or config.plan_only:
        if not place.is_first:
            return
        place = Place()
    free_bytes = free_device_bytes(device)
    with (
        StopRequest() as stop,
        Crew(place, stop, device=str(device), free_bytes=free_bytes) as crew,
        told_of_memory(str(device), "what is committed is safe, go on where more is free"),
    ):
        if place.is_first:
            _lead(config, crew, stop, device)
        else:
            _follow(config, crew, stop, device)


def _lead(config: ExtractConfig, crew: Crew, stop: StopRequest, device: torch.device) -> None:
    print_config(config, out=config.out, title="dflash-extract")
    console = plain_console(sys.stderr)
    if config.dry_run:
        console.print(dry_run(config, device))
        return
    if config.plan_only and config.dtype == "auto" and device.type == "cpu":
        console.print(
            "warning: without a GPU --dtype auto is float32, and a plan keeps it; for states made "
            "on GPUs plan with --dtype bfloat16"
        )
    planned = plan_extraction(config, device, crew.least_free())
    console.print(plan_sentence(planned))
    blobs = blobs_at(config.out, config.storage_option)
    if not exists(blobs, MANIFEST_KEY):
        refuse_small_disk(blobs, estimate_bytes(planned.schema, planned.plan), {})
    crew.publish(_PLANNED, True)
    group, target = _load(config, crew, stop, device)
    with group.leading(target):
        _lead_target(config, planned, target, crew, stop)
    while not (config.plan_only or crew.are_done()):
        stop.wait(_POLL_S)


def _lead_target(
    config: ExtractConfig, planned: Planned, target: Target, crew: Crew, stop: StopRequest
) -> None:
    console = plain_console(sys.stderr)
    # A plan alone may be made where the target's forward takes minutes.
    checks = [] if config.plan_only else self_check(target, planned.schema.layers, planned.checked)
    report(checks)
    with (
        _open_store(config, planned, target) as store,
        run_log(store.blobs, config, crew.place, checks) as log,
    ):
        if config.plan_only:
            console.print(f"planned {store.plan.num_packs} packs; run again without --plan-only")
            return
        with _forward(store, target) as forward:
            calibrate(store, forward, target, seed=config.seed, batch_tokens=config.batch_tokens)
            units = unfinished_units(store)
            crew.publish(_UNITS, {"units": units, "claim": store.claim})
            worker = _worker(store, forward, crew, stop, log=log, target=target)
            total = worker.lead(crew.shares(units, _TAKEN))
        store.refresh()
        checks = []
        if total.tokens and len(store.quarantined) < len(store.plan.samples):
            cache = open_cache(config.out, partial=True, storage_options=config.storage_option)
            checks = stored_check(target, cache)
        log_checks(log, "stored-check", checks)
        log.write({"kind": "end", **total.as_record()})
        report(checks, what="check of the store", remedy=_UNUSABLE)
    console.print(_end_sentence(config, store, total))
    _refuse_too_many_bad(config, store)


def _follow(config: ExtractConfig, crew: Crew, stop: StopRequest, device: torch.device) -> None:
    crew.expect(_PLANNED)
    group, target = _load(config, crew, stop, device)
    if not group.is_leader:
        group.follow(target)
        crew.report(Tally(), is_done=True)
        return
    told = crew.expect(_UNITS)
    store = Store.join(config.out, config.storage_option, claim=told["claim"])
    with (
        group.leading(target),
        run_log(store.blobs, config, crew.place) as log,
        _forward(store, target) as forward,
    ):
        worker = _worker(store, forward, crew, stop, log=log, target=target)
        worker.follow(crew.shares(told["units"], _TAKEN))


def _device(place: Place) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        return torch.device("cpu")
    if place.local_rank >= num_gpus:
        raise BadInput(
            f"LOCAL_RANK {place.local_rank} has no GPU on this machine, which has {num_gpus}; "
            "start at most one worker for each"
        )
    # Kernels of other packages go to the current device.
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _load(
    config: ExtractConfig, crew: Crew, stop: StopRequest, device: torch.device
) -> tuple[TensorGroup, Target]:
    """Return the target, and the workers that this one shares it with."""
    # A plan is made by one worker alone, whose GPU may not hold a target that others share.
    size = 1 if config.plan_only else config.tp
    group = TensorGroup(crew.place, size, stop, store=crew.meeting("targets"), device=device)
    target = load_target(
        config.target,
        dtype=resolve_dtype(config.dtype, device),
        device="cpu" if config.plan_only else device,
        revision=config.target_revision,
        head=config.teacher.startswith("topk"),
        trust_remote_code=config.trust_remote_code,
        tensor_parallel=size,
        layers=not config.plan_only,
    )
    refuse_slow(target, allow_slow_path=config.allow_slow_path)
    use_fast_convolution(target)
    return group, target


def _worker(
    store: Store,
    forward: StateForward,
    crew: Crew,
    stop: StopRequest,
    *,
    log: JsonLog,
    target: Target,
) -> Worker:
    k = store.schema.num_topk
    return Worker(
        store,
        forward,
        crew,
        stop,
        log=log,
        run_info=run_info(target),
        writers=num_writers(crew.place.local_size),
        best_tokens=BestTokens(target, k) if k else None,
    )


def _forward(store: Store, target: Target) -> StateForward:
    # Best tokens are made of the final state, which is not stored then.
    return StateForward(
        target,
        store.schema.layers,
        keep_final=store.schema.teacher != "none",
        frequent_shapes=frequent_shapes(store.plan),
    )


def _open_store(config: ExtractConfig, planned: Planned, target: Target) -> Store:
    schema = planned.schema
    identity = Identity(
        target=target_identity(target, planned.tokenizer, planned.chat, layers=schema.layers),
        store=store_fields(schema),
        plan=planned.plan_fields,
    )
    store = Store.create_or_resume(
        config.out,
        schema=schema,
        identity=identity,
        plan=planned.plan,
        tokens=planned.tokens,
        masks=planned.masks,
        target_files=target_files(target, planned.tokenizer),
        options=config_as_dict(config),
        append=config.append,
        storage_options=config.storage_option,
    )
    planned.journal.drop()
    return store


def _end_sentence(config: ExtractConfig, store: Store, total: Tally) -> str:
    splits = f", {total.splits} batches split for want of memory" if total.splits else ""
    return (
        f"{len(store.committed)} of {store.plan.num_packs} packs in {config.out}: "
        f"{total.tokens:,} tokens, {total.written_bytes / 1e6:,.1f} MB written in "
        f"{format_seconds(total.seconds)} ({total.tokens_per_s:,.0f} tokens/s), "
        f"{len(store.quarantined)} quarantined{splits}"
    )


def _refuse_too_many_bad(config: ExtractConfig, store: Store) -> None:
    samples = len(store.plan.samples)
    most = samples * config.max_bad / 100
    if len(store.quarantined) <= most:
        return
    bad = {index: why for index, why in store.why_quarantined().items() if why != REMOVED}
    if len(bad) > most:
        index = min(bad)
        raise FoundProblems(
            f"{len(bad)} of {samples} samples are quarantined, more than --max-bad "
            f"{config.max_bad} %: the first is {store.plan.samples[index].id} "
            f"({bad[index]}); they are left out when the store is read"
        )
