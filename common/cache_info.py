"""`dflash-cache info` and `preview`: what a store holds, at a glance."""

import json
import sys
from collections import Counter
from typing import Any

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.cache_cli import InfoConfig, PreviewConfig
from dflash_offline.common.calibration_file import read_codec_report
from dflash_offline.common.errors import BadInput
from dflash_offline.common.plain_console import plain_console
from dflash_offline.common.store import LOSS_MASK, TOKENS, TOPK_IDS, TOPK_LOGPROBS, supervised

_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")
_HISTOGRAM_BINS = 8
_BAR_CHARACTERS = 40


def info(config: InfoConfig) -> None:
    """Print what a store holds."""
    cache = open_cache(config.url, partial=True, storage_options=config.storage_option)
    summary = summarise(cache)
    if config.json:
        click.echo(json.dumps(summary, indent=1))
        return
    console = plain_console(sys.stdout)
    console.print(_overview(config.url, summary))
    console.print(_table("Sources", summary["sources"]))
    console.print(_lengths(summary["lengths"]))
    if summary["codec_error"]:
        console.print(_table(*_codec_error(summary["codec_error"])))
    identity = [
        {"kind": kind, "field": name, "value": str(value)}
        for kind, fields in summary["identity"].items()
        for name, value in fields.items()
    ]
    console.print(_table("Identity", identity))


def summarise(cache: Cache) -> dict[str, Any]:
    """Return sizes, counts, sources and identity of a store as plain data."""
    plan, schema = cache.plan, cache.schema
    records = [cache.record(pack)["arrays"] for pack in cache.packs]
    stored = Counter(dict.fromkeys(schema.state_arrays, 0))
    for arrays in records:
        for name, array in arrays.items():
            stored[name] += array["bytes"]
    usable = np.array(cache.samples, dtype=np.int64)
    lengths, trained = plan.column("length")[usable], plan.column("supervised")[usable]
    raw = int(lengths.sum()) * schema.bytes_per_token()
    apart = (TOKENS, LOSS_MASK, TOPK_IDS, TOPK_LOGPROBS)
    states = sum(size for name, size in stored.items() if name not in apart)
    counts, edges = np.histogram(lengths, bins=_HISTOGRAM_BINS)
    return {
        "format": 1,
        "packs": len(cache.packs),
        "planned_packs": plan.num_packs,
        "samples": len(usable),
        "planned_samples": len(plan.samples),
        "held_out_samples": len(cache.held_out_samples),
        "quarantined_samples": cache.num_quarantined,
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(trained.sum()),
        "layers": list(schema.layers),
        "hidden": schema.hidden,
        "codec": schema.codec,
        "teacher": schema.teacher,
        "pack_tokens": schema.pack_tokens,
        "stored_bytes": {name: int(size) for name, size in sorted(stored.items())},
        "states_bytes": int(states),
        "states_bytes_bf16": raw,
        "ratio": round(raw / states, 3) if states else None,
        "lengths": {"counts": counts.tolist(), "edges": [round(float(e)) for e in edges]},
        "sources": _by_source(cache, usable, lengths, trained),
        "codec_error": read_codec_report(cache.blobs),
        "target_licence": _licence(cache),
        "plan_report": plan.report,
        "identity": cache.identity.as_dict(),
    }


def _by_source(
    cache: Cache, usable: np.ndarray, lengths: np.ndarray, trained: np.ndarray
) -> list[dict[str, Any]]:
    sources = cache.plan.column("source")[usable]
    licences = cache.plan.column("licence")[usable]
    held_out = cache.plan.column("held_out")[usable]
    rows = []
    for name in sorted(set(sources)):
        of = sources == name
        rows.append(
            {
                "source": name,
                "samples": int(of.sum()),
                "held out": int((of & held_out).sum()),
                "tokens": int(lengths[of].sum()),
                "supervised": f"{trained[of].sum() / max(1, lengths[of].sum()):.1%}",
                "licence": ", ".join(sorted(set(licences[of]) - {""})) or "not stated",
            }
        )
    return rows


def _licence(cache: Cache) -> str:
    for name in _LICENCE_FILES:
        try:
            lines = cache.blobs.read(f"target/{name}").decode(errors="replace").split("\n")
        except FileNotFoundError:
            continue
        return next((line.strip() for line in lines if line.strip()), "not stated")
    return "not stated"


def _overview(url: str, summary: dict[str, Any]) -> Table:
    share = summary["supervised_tokens"] / max(1, summary["tokens"])
    best_bytes = sum(summary["stored_bytes"].get(name, 0) for name in (TOPK_IDS, TOPK_LOGPROBS))
    best = {"best tokens": f"{best_bytes / 1e6:,.1f} MB stored"} if best_bytes else {}
    rows = {
        "packs": f"{summary['packs']} of {summary['planned_packs']} committed",
        "samples": (
            f"{summary['samples']} ({summary['held_out_samples']} held out, "
            f"{summary['quarantined_samples']} quarantined)"
        ),
        "tokens": f"{summary['tokens']:,} ({share:.1%} supervised)",
        "layers": f"{', '.join(map(str, summary['layers']))} of width {summary['hidden']}",
        "teacher": summary["teacher"],
        "codec": summary["codec"],
        "states": (
            f"{summary['states_bytes'] / 1e6:,.1f} MB stored, "
            f"{summary['states_bytes_bf16'] / 1e6:,.1f} MB as bfloat16 "
            f"(ratio {summary['ratio']})"
        ),
        **best,
        "target's licence": summary["target_licence"],
    }
    table = Table(title=url, title_justify="left", show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _codec_error(report: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return title and rows of the codec's error; none when it was not measured."""
    states = {f"layer {each['layer']}": each for each in report.get("layers", ())}
    states |= {"final state": report["final"]} if "final" in report else {}
    rows = [
        {
            "state": name,
            "error after norm, median": f"{each['median']:.4f}",
            "99 %": f"{each['p99']:.4f}",
            "top-1 of the head": f"{each['top1_agreement']:.2%}" if "kl" in each else "",
            "KL": f"{each['kl']:.5f}" if "kl" in each else "",
        }
        for name, each in states.items()
    ]
    title = f"Error of {report['codec']} on {report['num_tokens']:,} tokens of the calibration"
    return f"{title}, {report['exact_frac']:.2%} of rows stored exactly", rows


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        is_number = isinstance(rows[0][name], int)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()))
    return table


def _lengths(histogram: dict[str, list[int]]) -> Table:
    table = Table(title="Sample lengths", title_justify="left", show_header=False, box=None)
    most = max(histogram["counts"], default=1) or 1
    edges = histogram["edges"]
    for low, high, count in zip(edges, edges[1:], histogram["counts"], strict=False):
        bar = "█" * round(_BAR_CHARACTERS * count / most)
        table.add_row(f"{low:,} to {high:,} tokens", f"{count:,}", bar)
    return table


def preview(config: PreviewConfig) -> None:
    """Print a sample's text; supervised tokens are coloured, or bracketed without colours."""
    from transformers import AutoTokenizer

    cache = open_cache(config.url, partial=True, storage_options=config.storage_option)
    if not cache.samples:
        raise BadInput(f"{config.url} has no sample left that can be read")
    sample_id = config.sample or cache.plan.samples[cache.samples[0]].id
    try:
        document = cache[sample_id]
    except KeyError:
        raise BadInput(
            f"--sample {sample_id} is not in {config.url}; its first ids are "
            + ", ".join(cache.plan.samples[i].id for i in cache.samples[:3])
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(cache.target_path)
    console = plain_console(sys.stdout)
    trained = supervised(document.loss_mask)
    console.print(
        f"{document.id} from {document.source}: {len(document.tokens)} tokens, "
        f"{trained.sum()} supervised"
    )
    text = Text()
    tokens = document.tokens[: config.max_tokens]
    # Runs of one kind are decoded together: a character can take several tokens.
    starts = [0, *(np.flatnonzero(np.diff(trained[: len(tokens)].astype(np.int8))) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        piece = tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=False)
        if not trained[start]:
            text.append(piece, style="dim")
        elif console.is_terminal:
            text.append(piece, style="bold green")
        else:
            text.append(f"⟦{piece}⟧")
    console.print(text)
    if len(document.tokens) > len(tokens):
        console.print(f"… {len(document.tokens) - len(tokens)} more tokens (--max-tokens)")
