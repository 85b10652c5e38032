"""An extraction from the first row to the last commit, in the order in which a user sees it.

Everything that can be refused is refused before the target is loaded or anything is written.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from dflash_offline.common.blobs import LocalBlobs, blobs_at
from dflash_offline.common.errors import FoundProblems, Stopped
from dflash_offline.common.identity import Identity
from dflash_offline.common.options import config_as_dict, print_config
from dflash_offline.common.progress import JsonLog, format_seconds
from dflash_offline.common.store import LOGS, MANIFEST_KEY, exists
from dflash_offline.common.store_checks import refuse_small_disk
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target, load_target
from dflash_offline.extract.calibrate import calibrate
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.estimate import estimate_sentence
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.planning import Planned, plan_extraction, plan_sentence
from dflash_offline.extract.self_check import Check, report, self_check
from dflash_offline.extract.settings import default_device, resolve_dtype
from dflash_offline.extract.target_files import run_info, target_files, target_identity
from dflash_offline.extract.worker import Outcome, extract_packs


def extract(config: ExtractConfig) -> None:
    """Run `dflash-extract`.

    Raises:
        BadInput: anything the user gave that cannot be used; nothing has been written.
        Stopped: a signal or a full disk; what is committed is safe.
        FoundProblems: the self-check failed, or more samples than `--max-bad` are quarantined.
    """
    print_config(config, out=config.out, title="dflash-extract")
    console = Console(stderr=True, highlight=False)
    device = default_device()
    planned = plan_extraction(config, device)
    console.print(plan_sentence(planned))
    blobs = blobs_at(config.out, config.storage_option)
    if not config.dry_run and not exists(blobs, MANIFEST_KEY):
        refuse_small_disk(blobs, estimate_bytes(planned.schema, planned.plan), {})
    target = load_target(
        config.target,
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        revision=config.target_revision,
        head=False,
        trust_remote_code=config.trust_remote_code,
    )
    if config.dry_run:
        console.print(estimate_sentence(config, planned, target))
        return
    # A plan alone may be made where the target's forward takes minutes.
    checks = [] if config.plan_only else self_check(target, planned.schema.layers, planned.tokens)
    report(checks)
    with (
        _open_store(config, planned, target) as store,
        _log(store, config, checks) as log,
    ):
        if config.plan_only:
            console.print(f"planned {store.plan.num_packs} packs; run again without --plan-only")
            return
        outcome = Outcome()
        with StateForward(
            target, store.schema.layers, keep_final=planned.schema.teacher == "final"
        ) as forward:
            calibrate(store, forward, target, seed=config.seed, batch_tokens=config.batch_tokens)
            forward.encode_with(store.calibration)
            extract_packs(store, forward, run_info=run_info(target), outcome=outcome)
        log.write({"kind": "end", **_outcome_record(outcome)})
    console.print(_end_sentence(config, store, outcome))
    _refuse_too_many_bad(config, store, outcome)


def _open_store(config: ExtractConfig, planned: Planned, target: Target) -> Store:
    schema = planned.schema
    identity = Identity(
        target=target_identity(target, planned.tokenizer, planned.chat, layers=schema.layers),
        store={
            "codec": schema.codec,
            "teacher": schema.teacher,
            "pack_tokens": schema.pack_tokens,
            "chunk_tokens": schema.chunk_tokens,
        },
        plan=planned.plan_fields,
    )
    return Store.create_or_resume(
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


@contextmanager
def _log(store: Store, config: ExtractConfig, checks: list[Check]) -> Iterator[JsonLog]:
    """Keep the run's log in the store: a file that grows, on object storage one for each run."""
    blobs = store.blobs
    with tempfile.TemporaryDirectory() as temporary:
        folder = blobs.root / LOGS if isinstance(blobs, LocalBlobs) else Path(temporary)
        log = JsonLog(folder / "extract.jsonl")
        log.write({"kind": "run", "config": config_as_dict(config)})
        for check in checks:
            record = {"name": check.name, "value": check.value, "bound": check.bound}
            log.write({"kind": "self-check", **record, "ok": check.is_good})
        try:
            yield log
        finally:
            log.close()
            if not isinstance(blobs, LocalBlobs):
                # The reason why a run ends matters more than its log.
                with suppress(Stopped, OSError):
                    content = (folder / "extract.jsonl").read_bytes()
                    blobs.create(f"{LOGS}/extract-{time.time_ns()}.jsonl", [content])


def _outcome_record(outcome: Outcome) -> dict[str, object]:
    return {
        "tokens": outcome.tokens,
        "padded_frac": outcome.padded_frac(),
        "written_bytes": outcome.written_bytes,
        "seconds": outcome.seconds,
        "quarantined": outcome.quarantined,
    }


def _end_sentence(config: ExtractConfig, store: Store, outcome: Outcome) -> str:
    speed = outcome.tokens / max(outcome.seconds, 1e-9)
    return (
        f"{len(store.committed)} of {store.plan.num_packs} packs in {config.out}: "
        f"{outcome.tokens:,} tokens, {outcome.written_bytes / 1e6:,.1f} MB written in "
        f"{format_seconds(outcome.seconds)} ({speed:,.0f} tokens/s), "
        f"{len(outcome.quarantined)} quarantined"
    )


def _refuse_too_many_bad(config: ExtractConfig, store: Store, outcome: Outcome) -> None:
    samples, bad = len(store.plan.samples), len(outcome.quarantined)
    if bad > samples * config.max_bad / 100:
        index, reason = next(iter(outcome.quarantined.items()))
        raise FoundProblems(
            f"{bad} of {samples} samples are quarantined, more than --max-bad {config.max_bad} %: "
            f"the first is {store.plan.samples[index].id} ({reason}); they are left out when the "
            "store is read"
        )
