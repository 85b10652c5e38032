"""Whether a store's plan was made of the same rows: then nothing needs to be tokenised again.

What decides the rows, from the bytes of the data to the code that makes tokens of them, has a
digest, which the plan's report keeps as information. Where there is none, or another, the corpus is
read, and the identity of the store decides.
"""

import inspect
import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash_offline.common import chat, prompts, store, turns
from dflash_offline.common.blobs import Blobs
from dflash_offline.common.errors import DamagedStore
from dflash_offline.common.identity import Scalar
from dflash_offline.common.pack_index import read_pack_index
from dflash_offline.common.pack_reader import read_flat
from dflash_offline.common.records import sha256
from dflash_offline.common.store import LOSS_MASK, TOKENS, Plan, Schema, shard_key
from dflash_offline.extract import (
    conversations,
    corpus,
    plan,
    prefixes,
    row_journal,
    rows,
    token_rows,
)
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.self_check import checked_samples
from dflash_offline.extract.target_files import text_identity

_PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow")
_MODULES = (
    *(rows, conversations, corpus, row_journal, token_rows, prefixes, plan),
    *(chat, turns, prompts, store),
)
_REPORTED = "rows_sha256"


def row_facts(reader: CorpusReader) -> dict[str, Any]:
    """Return what makes tokens of rows, beside the data: plain JSON data."""
    return {
        "python": platform.python_version(),
        "packages": [version(package) for package in _PACKAGES],
        "modules": [inspect.getsource(module) for module in _MODULES],
        "text": text_identity(reader.tokenizer, reader.options),
        # Templates read them.
        "special_tokens": reader.tokenizer.special_tokens_map,
        "tokenizer": _saved_files(reader.tokenizer),
        "limits": [reader.vocab_size, reader.max_length, reader.drop_overlong],
    }


def _saved_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the SHA-256 of a tokenizer's files, settings of its Python side included."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: sha256(path.read_bytes()) for path in sorted(Path(folder).iterdir())}


def rows_digest(
    reader: CorpusReader, facts: Mapping[str, Any], specs: Sequence[str], *, num_threads: int
) -> str | None:
    """Return a SHA-256 of everything that decides the rows; None where not all of it is known.

    Args:
        facts: `row_facts` of the reader.
        specs: `--data` values, whose files are read to their ends.
        num_threads: that read.

    Raises:
        BadInput: a file cannot be read.
    """
    # Code shipped with a checkpoint may do anything.
    if type(reader.tokenizer).__module__.partition(".")[0] != "transformers":
        return None
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
        contents = [rows.data_content(spec, pool) for spec in specs]
    if not all(contents):
        return None
    return sha256(json.dumps({**facts, "contents": contents}, sort_keys=True).encode())


def with_digest(made: Plan, digest: str) -> Plan:
    """Return a new plan whose report says what it was made of."""
    return replace(made, report={**made.report, _REPORTED: digest})


def stored_plan(
    blobs: Blobs,
    schema: Schema,
    *,
    digest: str | None,
    plan_fields: Callable[[Plan], dict[str, Scalar]],
) -> tuple[Plan, list[np.ndarray]] | None:
    """Return a store's plan where another of these rows would be the same, with its tokens there.

    Args:
        schema: that the options ask for.
        digest: `rows_digest` of the data at hand.
        plan_fields: what the options say of a plan, for its identity.

    Returns:
        The plan, and the tokens of the samples that the self-check takes, int32 [T] each. None
        where anything differs, is missing or damaged, and where more than one plan is stored.
    """
    header = store.read_header(blobs, required=False)
    if digest is None or header is None or header.schema != schema:
        return None
    if store.count_plans(blobs) != 1:
        return None
    found, token_files = store.read_plan(blobs, batches=True)
    if found.report.get(_REPORTED) != digest or plan_fields(found) != header.identity.plan:
        return None
    if read_pack_index(blobs, found.num_packs).given_up:
        # Their tokens may be written anew too, where `dflash-cache rm` was killed.
        return None
    for name in (TOKENS, LOSS_MASK):
        wanted = {shard_key(name, pack) for pack in range(found.num_packs)}
        if wanted - set(blobs.list(f"{name}/c")):
            # Given up by a repair: written again of the corpus alone.
            return None
    try:
        return found, [
            _tokens_of(blobs, schema, found.samples[at], token_files)
            for at in checked_samples(found.column("length"))
        ]
    except DamagedStore:
        return None


def _tokens_of(
    blobs: Blobs, schema: Schema, sample: store.Sample, token_files: Sequence[dict[str, Any]]
) -> np.ndarray:
    row = read_flat(blobs, schema, TOKENS, sample.pack, token_files[sample.pack][TOKENS])
    return row[sample.start :][: sample.length]
