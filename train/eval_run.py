"""What dflash-eval does: choose the mode, run it, show tables, write results, apply the gate."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dflash_offline.common.cache import open_cache
from dflash_offline.common.device_choice import default_device, dtype_name, resolve_dtype
from dflash_offline.common.device_memory import told_of_memory
from dflash_offline.common.errors import BadInput, FoundProblems
from dflash_offline.common.options import print_config
from dflash_offline.common.plain_console import plain_console
from dflash_offline.train.compare import PAGE_NAME, comparison_table, read_runs, write_comparison
from dflash_offline.train.draft_shape import check_fits
from dflash_offline.train.eval_config import EvalConfig
from dflash_offline.train.evaluate import CacheEvaluation, evaluate_cache
from dflash_offline.train.export import load_drafter
from dflash_offline.train.page import PAGE_BEGINS, shown
from dflash_offline.train.provenance import check_same_target, drafter_identity
from dflash_offline.train.serving_eval import ServingEvaluation, evaluate_serving
from dflash_offline.train.target_head import load_target_head

_CHAT = ("chat_template", "chat_template_arg", "system_prompt")
# Options that mean something in one mode only.
_DECODE_ONLY = (
    "data",
    "num_prompts",
    "max_new_tokens",
    "temperature",
    "seed",
    "target_revision",
    "trust_remote_code",
    *_CHAT,
)
_CACHE_ONLY = ("storage_option", "partial", "supervise", "max_anchors", "rows_per_pass")
# Quotients stay far from where fp32 ends.
_LEAST_TEMPERATURE = 1e-3


def run(config: EvalConfig) -> None:
    """Run dflash-eval.

    Raises:
        BadInput: options that do not fit each other, or a drafter that does not fit the rest.
        FoundProblems: answers differ from the target's own, or the gate is not met.
        Stopped: memory has run out.
    """
    mode = _mode(config)
    where = config.out or (_page_path(config) if mode == "compare" else "the terminal")
    print_config(config, out=str(where), title="dflash-eval")
    if mode == "compare":
        logs = read_runs(config.compare)
        _print(comparison_table(logs), f"page: {write_comparison(logs, Path(where))}")
        return
    smaller = "lower --rows-per-pass, or " if mode == "cache" else ""
    device = _device(config)
    dtype = resolve_dtype(config.dtype, device)
    with told_of_memory(str(device), f"{smaller}go on where more is free"):
        if mode == "cache":
            result, problem = _from_cache(config, device, dtype), None
        else:
            served = evaluate_serving(config, device=device, dtype=dtype)
            _show_serving(served)
            result, problem = served.as_dict(), served.problem()
    if config.out is not None:
        config.out.write_text(json.dumps(_finite(result), indent=2) + "\n", encoding="utf-8")
    if problem is not None:
        raise FoundProblems(problem)
    _gate(config, result["acceptance_length"])


def _mode(config: EvalConfig) -> str:
    given = [name for name in ("cache", "target", "compare") if vars(config)[name]]
    if len(given) != 1:
        what = " and ".join(f"--{name}" for name in given) or "none of them"
        raise BadInput(
            f"one of --cache, --target and --compare must be given, not {what}: --cache for a "
            "store, --target with --data for real decoding, --compare for finished runs"
        )
    mode = given[0]
    if mode == "target" and config.data is None:
        raise BadInput("--data is missing: --target decodes the prompts of a file")
    if mode != "compare" and config.draft is None:
        raise BadInput("--draft is missing: give the folder of an exported drafter")
    foreign = {
        "cache": _DECODE_ONLY,
        "target": _CACHE_ONLY,
        "compare": (*_DECODE_ONLY, *_CACHE_ONLY, "draft", "min_acceptance"),
    }[mode]
    defaults = EvalConfig()
    for name in foreign:
        if vars(config)[name] != vars(defaults)[name]:
            raise BadInput(
                f"--{name.replace('_', '-')} has no meaning with --{mode}; leave one of them out"
            )
    if 0 < config.temperature < _LEAST_TEMPERATURE:
        raise BadInput(
            f"--temperature {config.temperature} is too little to divide logits by; give 0 for the "
            f"best token, or {_LEAST_TEMPERATURE} to 100"
        )
    if config.out is not None:
        _check_out(config.out)
    return mode


def _check_out(out: Path) -> None:
    """Refuse a file that cannot be written, or is not of this command: answers, a configuration."""
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: {out.parent} is no folder; make it first")
    try:
        if not out.exists():
            out.touch()
            out.unlink()
        # Neither a device nor a pipe is read.
        elif out.is_file() and (held := out.read_text()) and not held.startswith(PAGE_BEGINS):
            json.loads(held)["acceptance_length"]
    except OSError as problem:
        raise BadInput(
            f"--out {out} cannot be written ({problem}); give a file in a folder that can"
        ) from problem
    except (ValueError, TypeError, KeyError) as problem:
        raise BadInput(
            f"--out {out} is there and no result of this command; give another file"
        ) from problem


def _page_path(config: EvalConfig) -> Path:
    return config.compare[0].resolve().parent / PAGE_NAME


def _device(config: EvalConfig) -> torch.device:
    if config.device == "auto":
        return default_device()
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device {config.device}: not one to evaluate on; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            f"--device {config.device} is not there: this machine has "
            f"{torch.cuda.device_count()} GPUs; use auto"
        )
    if device.type == "cuda" and device.index is not None:
        # Libraries of a target launch where they are told to, not where its weights lie.
        torch.cuda.set_device(device)
    return device


def _from_cache(config: EvalConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    cache = open_cache(config.cache, partial=config.partial, storage_options=config.storage_option)
    drafter = load_drafter(config.draft, dtype, device)
    check_same_target(drafter_identity(config.draft), cache.identity.target, where=config.cache)
    check_fits(drafter.config, cache, f"--draft {config.draft}")
    head = load_target_head(cache).to(device, dtype)
    evaluation = evaluate_cache(
        drafter,
        cache,
        embed=head.embed,
        head=head.weight,
        supervise=config.supervise,
        max_anchors=config.max_anchors,
        rows_per_pass=config.rows_per_pass,
    )
    _show_cache(evaluation)
    return {
        "mode": "cache",
        "draft": str(config.draft),
        "cache": config.cache,
        "dtype": dtype_name(dtype),
        "acceptance_length": evaluation.acceptance_length,
        "accepted_by_position": evaluation.accepted_by_position,
        "by_source": evaluation.by_source,
        "num_anchors": evaluation.num_anchors,
    }


def _gate(config: EvalConfig, acceptance_length: float) -> None:
    if config.min_acceptance is None or acceptance_length >= config.min_acceptance:
        return
    # NaN where no answer went on after its first token.
    raise FoundProblems(
        f"acceptance length {shown(acceptance_length, 4)} is not at or above --min-acceptance "
        f"{config.min_acceptance:g}"
    )


def _show_cache(evaluation: CacheEvaluation) -> None:
    table = Table(title="held-out samples of the store", title_justify="left")
    table.add_column("source")
    table.add_column("blocks", justify="right")
    table.add_column("acceptance length", justify="right")
    for source, counts in sorted(evaluation.counts.items()):
        table.add_row(source, f"{counts.num_anchors:,}", f"{evaluation.by_source[source]:.3f}")
    if len(evaluation.counts) != 1:
        table.add_row("all", f"{evaluation.num_anchors:,}", f"{evaluation.acceptance_length:.3f}")
    _print(table, _positions_table(evaluation.accepted_by_position))


def _show_serving(served: ServingEvaluation) -> None:
    table = Table(title="speculative decoding", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in served.rows():
        table.add_row(name, value)
    _print(table)
    if served.num_cycles:
        _print(_positions_table(served.accepted_by_position))


def _print(*shown: Table | str) -> None:
    console = plain_console(sys.stdout)
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str))


def _positions_table(shares: list[float]) -> Table:
    table = Table("drafted token")
    for position in range(1, len(shares) + 1):
        table.add_column(str(position), justify="right")
    cells = (f"{100 * s:.0f} %" if math.isfinite(s) else shown(s) for s in shares)
    table.add_row("accepted by position", *cells)
    return table


def _finite(value: Any) -> Any:
    """Replace NaN by null, which JSON can say."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
