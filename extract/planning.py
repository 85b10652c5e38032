"""What an extraction will do, before the target is loaded: options, layers, corpus and plan."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dflash_offline.common.blobs import Blobs, LocalBlobs, blobs_at
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.checkpoint_files import early_digest, find_checkpoint
from dflash_offline.common.codecs import check_codec
from dflash_offline.common.device_choice import resolve_dtype
from dflash_offline.common.errors import BadInput
from dflash_offline.common.identity import Identity, Scalar
from dflash_offline.common.launch import count_workers
from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.lease import refuse_second_run
from dflash_offline.common.local_copy import cache_folder
from dflash_offline.common.records import sha256
from dflash_offline.common.store import MANIFEST_KEY, Plan, Schema, exists
from dflash_offline.common.store_checks import refuse_early, refuse_unwritable
from dflash_offline.common.target import load_config, load_tokenizer
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.fast_path import check_fast_path
from dflash_offline.extract.memory_model import (
    FreeMemory,
    MemoryModel,
    check_memory,
    free_host_bytes,
    memory_model,
)
from dflash_offline.extract.meta_forward import ForwardCost, forward_cost
from dflash_offline.extract.pack_buffers import POOL_UNITS
from dflash_offline.extract.plan import PlanOptions, make_plan, padded_fraction
from dflash_offline.extract.row_journal import RowJournal, fingerprint
from dflash_offline.extract.row_workers import num_cores
from dflash_offline.extract.rows import data_state
from dflash_offline.extract.same_rows import row_facts, rows_digest, stored_plan, with_digest
from dflash_offline.extract.self_check import checked_samples
from dflash_offline.extract.settings import check_teacher, parse_holdout, resolve_max_length
from dflash_offline.extract.target_files import text_identity, unloaded_identity
from dflash_offline.extract.tensor_parallel import check_tensor_parallel
from dflash_offline.extract.token_rows import RowArrays

_DataStates = list[list[tuple[str, int, int, int]]]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Everything that is known before the target is loaded."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatOptions
    schema: Schema
    plan: Plan
    tokens: Sequence[np.ndarray]  # int32 [length] of every sample; none where the store has them
    masks: Sequence[np.ndarray]  # uint8 [length] of every sample, likewise
    checked: list[np.ndarray]  # tokens of the samples that the self-check takes
    plan_fields: dict[str, Scalar]
    memory: str  # what it will take, for people
    journal: RowJournal  # of the rows' tokens, until the plan is written


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the options and the target's configuration say, before the corpus is read.

    Attributes:
        cost: of a forward of `--batch-tokens` tokens.
        shared_by: workers that hold the target's parameters together.
    """

    schema: Schema
    reader: CorpusReader
    plan_options: PlanOptions
    dtype: torch.dtype
    cost: ForwardCost
    num_workers: int
    shared_by: int

    def memory(self, device: torch.device, *, num_packs: int = 0) -> MemoryModel:
        """Return what the extraction takes; before there is a plan, without its packs."""
        return memory_model(
            self.schema,
            self.cost,
            dtype=self.dtype,
            batch_tokens=self.plan_options.batch_tokens,
            pool_packs=min(num_packs, POOL_UNITS * self.plan_options.unit_packs),
            num_workers=self.num_workers,
            on_gpu=device.type == "cuda",
            shared_by=self.shared_by,
        )


def prepare(config: ExtractConfig, device: torch.device, free: FreeMemory) -> Prepared:
    """Check options and what they mean for the target; loads no weights, writes nothing.

    Args:
        free: memory of the GPU, of all the run's, that has least.

    Raises:
        BadInput: an option that cannot be, or too little memory.
    """
    plan_options = _plan_options(config)
    chat_options = ChatOptions.from_options(
        config.chat_template, config.chat_template_arg, config.system_prompt
    )
    remote = config.trust_remote_code
    target_config = load_config(config.target, config.target_revision, trust_remote_code=remote)
    check_codec(config.codec, target_config.hidden_size)
    check_teacher(config.teacher, target_config.vocab_size)
    check_tensor_parallel(config.tp, config.target, target_config)
    schema = _schema(config, target_config)
    check_fast_path(target_config, device, allow_slow_path=config.allow_slow_path)
    max_length = resolve_max_length(
        config.max_length, pack_tokens=config.pack_tokens, config=target_config
    )
    tokenizer = load_tokenizer(config.target, config.target_revision, trust_remote_code=remote)
    dtype = resolve_dtype(config.dtype, device)
    cost = forward_cost(
        target_config,
        target=config.target,
        dtype=dtype,
        num_tokens=config.batch_tokens,
        max_length=max_length,
        shared_by=config.tp,
        trust_remote_code=remote,
    )
    prepared = Prepared(
        schema=schema,
        reader=CorpusReader(
            tokenizer=tokenizer,
            options=chat_options,
            vocab_size=target_config.vocab_size,
            max_length=max_length,
            drop_overlong=config.overlong == "skip",
        ),
        plan_options=plan_options,
        dtype=dtype,
        cost=cost,
        num_workers=_workers_here(config),
        shared_by=config.tp,
    )
    # A plan alone may be made on another machine than the states.
    if not config.plan_only:
        refuse_small_memory(prepared.memory(device), config.batch_tokens, free)
    return prepared


def _schema(config: ExtractConfig, target_config: PreTrainedConfig) -> Schema:
    return Schema(
        layers=resolve_layers(config.layers, target_config.num_hidden_layers),
        hidden=target_config.hidden_size,
        vocab_size=target_config.vocab_size,
        pack_tokens=config.pack_tokens,
        codec=config.codec,
        teacher=config.teacher,
    )


def _plan_options(config: ExtractConfig) -> PlanOptions:
    return PlanOptions(
        seed=config.seed,
        pack_tokens=config.pack_tokens,
        batch_tokens=config.batch_tokens,
        holdout=parse_holdout(config.holdout),
    )


def plan_extraction(config: ExtractConfig, device: torch.device, free: FreeMemory) -> Planned:
    """Check options, and read the corpus and make the plan, or find that the store has it.

    Loads no weights, writes nothing.

    Args:
        free: memory of the GPU, of all the run's, that has least.

    Raises:
        BadInput: anything the user gave that cannot be used, or too little memory.
    """
    prepared = prepare(config, device, free)
    reader, schema = prepared.reader, prepared.schema
    blobs = blobs_at(config.out, config.storage_option)
    refuse_unwritable(blobs)
    refuse_second_run(blobs)
    known = _known_identity(config, prepared, blobs)
    refuse_early(blobs, known, append=config.append)
    states, facts = list(map(data_state, config.data)), row_facts(reader)
    digest = rows_digest(reader, facts, config.data, num_threads=num_cores())
    journal = _journal(blobs, states, {**facts, "rows": digest})
    plan_fields = partial(_plan_fields, config, prepared)
    stored = None
    if not config.append:
        stored = stored_plan(blobs, schema, digest=digest, plan_fields=plan_fields)
    tokens: Sequence[np.ndarray] = ()
    masks: Sequence[np.ndarray] = ()
    if stored is not None:
        plan, checked = stored
        click.echo(f"the data is what {blobs.url} was planned with: not tokenised again", err=True)
    else:
        kept, report = reader.read(
            config.data, config.num_samples, num_workers=num_cores(), journal=journal
        )
        plan, order = make_plan(kept, report, prepared.plan_options)
        refuse_early(blobs, replace(known, plan=plan_fields(plan)), append=config.append)
        if digest is not None and _are_untouched(config.data, states):
            plan = with_digest(plan, digest)
        tokens, masks = RowArrays(kept, order), RowArrays(kept, order, masks=True)
        checked = [tokens[at] for at in checked_samples(plan.column("length"))]
    memory = prepared.memory(device, num_packs=plan.num_packs)
    if not config.plan_only:
        refuse_small_memory(memory, config.batch_tokens, free)
    return Planned(
        tokenizer=reader.tokenizer,
        chat=reader.options,
        schema=schema,
        plan=plan,
        tokens=tokens,
        masks=masks,
        checked=checked,
        plan_fields=plan_fields(plan),
        memory=memory.sentence(free),
        journal=journal,
    )


def _are_untouched(specs: Sequence[str], states: _DataStates) -> bool:
    """Return whether files are still in the states in which they were before they were read."""
    try:
        return list(map(data_state, specs)) == states
    except (BadInput, OSError):
        # The rows are read, and the plan stands without a file that has gone since.
        return False


def _journal(blobs: Blobs, states: _DataStates, facts: Mapping[str, Any]) -> RowJournal:
    """Return where the rows' tokens are kept until the store has them.

    On this machine's disk, whatever storage the store is on: nothing is written there before its
    plan stands. Of each store one corpus is kept, by everything that makes tokens of rows.
    """
    address = str(blobs.root.resolve()) if isinstance(blobs, LocalBlobs) else blobs.url
    if not all(states):
        # Nothing says whether rows in memory are the same the next time.
        return RowJournal(None)
    name = fingerprint({**facts, "data": states})
    return RowJournal(cache_folder() / "planning" / fingerprint(address) / name)


def refuse_small_memory(memory: MemoryModel, batch_tokens: int, free: FreeMemory) -> None:
    """Refuse an extraction that does not fit into what is free.

    Raises:
        BadInput: says what is needed and what to change.
    """
    check_memory(memory, batch_tokens=batch_tokens, device_free=free, host_free=free_host_bytes())


def _workers_here(config: ExtractConfig) -> int:
    """Return the workers of this machine: those of an outer launcher, or our own.

    What is only planned or estimated may run elsewhere: then there is at least one group.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or count_workers(config.gpus, on_cpu=False)
    if config.dry_run or config.plan_only:
        return max(1, here // config.tp) * config.tp
    return here


def store_fields(schema: Schema) -> dict[str, Scalar]:
    """Return the fields that an append must share with what a store holds."""
    return {
        "codec": schema.codec,
        "teacher": schema.teacher,
        "pack_tokens": schema.pack_tokens,
        "chunk_tokens": schema.chunk_tokens,
    }


def _known_identity(config: ExtractConfig, prepared: Prepared, blobs: Blobs) -> Identity:
    """Return what is known of a store's identity before the corpus is read."""
    remote = config.trust_remote_code
    checkpoint = find_checkpoint(config.target, config.target_revision, trust_remote_code=remote)
    schema = prepared.schema
    digest = early_digest(checkpoint) if exists(blobs, MANIFEST_KEY) else None
    return Identity(
        target={
            **({} if digest is None else {"weight_digest": digest}),
            **unloaded_identity(checkpoint, prepared.dtype, layers=schema.layers),
            **text_identity(prepared.reader.tokenizer, prepared.reader.options),
        },
        store=store_fields(schema),
        plan=_option_fields(config, prepared),
    )


def _plan_fields(config: ExtractConfig, prepared: Prepared, plan: Plan) -> dict[str, Scalar]:
    content = "".join(plan.column("content_hash").tolist())
    return {**_option_fields(config, prepared), "data_sha256": sha256(content.encode())}


def _option_fields(config: ExtractConfig, prepared: Prepared) -> dict[str, Scalar]:
    return {
        "sources": ", ".join(Path(each).name for each in config.data),
        "num_samples": config.num_samples,
        "max_length": prepared.reader.max_length,
        "overlong": config.overlong,
        # 1% and 0.01 are the same.
        "holdout": f"{100 * prepared.plan_options.holdout:g}%",
        "seed": config.seed,
        "batch_tokens": config.batch_tokens,
        "unit_packs": prepared.plan_options.unit_packs,
    }


def plan_sentence(planned: Planned) -> str:
    """Return what became of the rows and what the plan is, for people."""
    plan, report_data = planned.plan, planned.plan.report
    lengths = plan.column("length")
    skipped = [
        f"{count} skipped: {reason} ({report_data['examples'][reason]})"
        for reason, count in report_data["skipped"].items()
    ]
    layers = ", ".join(map(str, planned.schema.layers))
    cut = [f"{report_data['truncated']} truncated"] if report_data["truncated"] else []
    if (merged := report_data["merged"])["rows"]:
        cut.append(
            f"{merged['rows']} merged into rows that begin with them "
            f"({merged['tokens']:,} tokens saved)"
        )
    kept = f"{report_data['rows']} rows, {report_data['kept']} samples"
    counts = "; ".join([kept, *cut, *skipped])
    return (
        f"{counts}. {int(lengths.sum()):,} tokens, "
        f"{int(plan.column('supervised').sum()):,} supervised, {plan.num_packs} packs "
        f"({plan.num_held_out_packs} held out: {report_data['held_out']} samples), "
        f"{padded_fraction(plan):.0%} padding, layers {layers}\n"
        f"{planned.memory}"
    )
