"""An extraction from the first row to the last commit, in the order in which a user sees it.

Everything that can be refused is refused before the target is loaded or anything is written.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dflash_offline.common.blobs import LocalBlobs, blobs_at
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.codecs import check_codec
from dflash_offline.common.errors import FoundProblems, Stopped
from dflash_offline.common.identity import Identity, Scalar
from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.options import config_as_dict, print_config
from dflash_offline.common.progress import JsonLog, format_seconds
from dflash_offline.common.store import LOGS, MANIFEST_KEY, Plan, Schema, exists
from dflash_offline.common.store_checks import refuse_small_disk
from dflash_offline.common.store_size import estimate_bytes
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target, load_config, load_target, load_tokenizer
from dflash_offline.extract.calibrate import calibrate
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.corpus import CorpusReader, TokenRow
from dflash_offline.extract.fast_path import check_fast_path
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.plan import PlanOptions, make_plan, padded_fraction
from dflash_offline.extract.self_check import Check, report, self_check
from dflash_offline.extract.settings import (
    check_teacher,
    default_device,
    parse_holdout,
    resolve_dtype,
    resolve_max_length,
)
from dflash_offline.extract.target_files import run_info, target_files, target_identity
from dflash_offline.extract.worker import Outcome, extract_packs

_TIMED_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Everything that is known before the target is loaded."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatOptions
    schema: Schema
    plan: Plan
    rows: list[TokenRow]  # in the order of the plan's samples
    plan_fields: dict[str, Scalar]

    @property
    def tokens(self) -> list[np.ndarray]:
        """Token ids of every sample, int32 [length]."""
        return [row.tokens for row in self.rows]

    @property
    def masks(self) -> list[np.ndarray]:
        """Loss mask of every sample, uint8 [length]."""
        return [row.mask for row in self.rows]


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
    console.print(_plan_sentence(planned))
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
        console.print(_estimate_sentence(config, planned, target))
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


def plan_extraction(config: ExtractConfig, device: torch.device) -> Planned:
    """Check options, read the corpus and make the plan; loads no weights, writes nothing."""
    check_teacher(config.teacher)
    holdout = parse_holdout(config.holdout)
    chat = ChatOptions.from_options(
        config.chat_template, config.chat_template_arg, config.system_prompt
    )
    remote = config.trust_remote_code
    target_config = load_config(config.target, config.target_revision, trust_remote_code=remote)
    check_codec(config.codec, target_config.hidden_size)
    layers = resolve_layers(config.layers, target_config.num_hidden_layers)
    check_fast_path(target_config, device, allow_slow_path=config.allow_slow_path)
    max_length = resolve_max_length(
        config.max_length, pack_tokens=config.pack_tokens, config=target_config
    )
    tokenizer = load_tokenizer(config.target, config.target_revision, trust_remote_code=remote)
    reader = CorpusReader(
        tokenizer=tokenizer,
        options=chat,
        vocab_size=target_config.vocab_size,
        max_length=max_length,
        drop_overlong=config.overlong == "skip",
    )
    rows, corpus_report = reader.read(config.data, config.num_samples)
    schema = Schema(
        layers=layers,
        hidden=target_config.hidden_size,
        vocab_size=target_config.vocab_size,
        pack_tokens=config.pack_tokens,
        codec=config.codec,
        teacher=config.teacher,
    )
    options = PlanOptions(
        seed=config.seed,
        pack_tokens=config.pack_tokens,
        batch_tokens=config.batch_tokens,
        holdout=holdout,
    )
    plan, order = make_plan(rows, corpus_report, options)
    return Planned(
        tokenizer=tokenizer,
        chat=chat,
        schema=schema,
        plan=plan,
        rows=[rows[index] for index in order],
        plan_fields=_plan_fields(config, plan, max_length),
    )


def _plan_fields(config: ExtractConfig, plan: Plan, max_length: int) -> dict[str, Scalar]:
    content = "".join(plan.column("content_hash").tolist())
    return {
        "sources": ", ".join(Path(each).name for each in config.data),
        "data_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "num_samples": config.num_samples,
        "max_length": max_length,
        "overlong": config.overlong,
        "holdout": config.holdout,
        "seed": config.seed,
        "batch_tokens": config.batch_tokens,
        "unit_packs": plan.unit_packs,
    }


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


def _plan_sentence(planned: Planned) -> str:
    plan, report_data = planned.plan, planned.plan.report
    lengths = plan.column("length")
    skipped = [
        f"{count} skipped: {reason} ({report_data['examples'][reason]})"
        for reason, count in report_data["skipped"].items()
    ]
    cut = [f"{report_data['truncated']} truncated"] if report_data["truncated"] else []
    kept = f"{report_data['rows']} rows, {report_data['kept']} samples"
    counts = "; ".join([kept, *cut, *skipped])
    return (
        f"{counts}. {int(lengths.sum()):,} tokens, "
        f"{int(plan.column('supervised').sum()):,} supervised, {plan.num_packs} packs "
        f"({plan.num_held_out_packs} held out: {report_data['held_out']} samples), "
        f"{padded_fraction(plan):.0%} padding, layers {', '.join(map(str, planned.schema.layers))}"
    )


def _estimate_sentence(config: ExtractConfig, planned: Planned, target: Target) -> str:
    free = blobs_at(config.out, config.storage_option).free_bytes()
    needed = estimate_bytes(planned.schema, planned.plan)
    tokens_per_s = _measure(planned, target)
    tokens = int(planned.plan.column("length").sum()) / (1 - padded_fraction(planned.plan))
    room = "unknown" if free is None else f"{free / 1e9:.2f} GB"
    return (
        f"dry run: at most {needed / 1e9:.3f} GB in {planned.plan.num_packs} packs, {room} free; "
        f"about {format_seconds(tokens / tokens_per_s)} at {tokens_per_s:,.0f} tokens/s of the "
        f"forward on this {target.device.type}. Nothing was written"
    )


def _measure(planned: Planned, target: Target) -> float:
    """Return tokens a second of the forward, from one small batch after a warm-up."""
    batch = [planned.tokens[i][:_TIMED_TOKENS] for i in planned.plan.batches[0][0]]
    while len(batch) > 1 and sum(map(len, batch)) > _TIMED_TOKENS:
        batch.pop()
    with StateForward(target, planned.schema.layers, keep_final=False) as forward:
        forward(batch)
        began = time.monotonic()
        forward(batch)
    return sum(map(len, batch)) / (time.monotonic() - began)


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
