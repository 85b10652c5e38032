"""Several training runs side by side: one HTML page and one table."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from dflash_offline.common.errors import BadInput
from dflash_offline.train.page import figure, note, page, shown, table
from dflash_offline.train.plots import Curve, line_plot, time_plot
from dflash_offline.train.report import RunRecords, positions

PAGE_NAME = "comparison.html"
_HEADS = ("run", "steps", "held-out acceptance", "best", "loss", "tokens/s", "rows/s", "seconds")


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the logs of runs, in the given order.

    Raises:
        BadInput: fewer than two runs, one given twice, or one without a training record.
    """
    logs = [RunRecords(folder) for folder in folders]
    if len(logs) < 2:
        raise BadInput(f"--compare: {len(logs)} run given; give at least two, once each")
    if len({log.folder.resolve() for log in logs}) < len(logs):
        raise BadInput("--compare: a run is given twice; give each once")
    for log in logs:
        if not log.train:
            raise BadInput(f"--compare {log.folder}: its log holds no training record")
    return logs


def write_comparison(logs: Sequence[RunRecords], path: Path) -> Path:
    """Write the page that lays the runs' curves over each other.

    Args:
        logs: from `read_runs`.
        path: of the HTML file; its folder must exist.

    Returns:
        `path`.
    """
    names = _names(logs)
    sections = [
        ("result", "Result", table(_HEADS, _rows(logs, names))),
        ("acceptance", "Acceptance length on held-out samples", _acceptance(logs, names)),
        ("loss", "Loss", _curves(logs, names, "loss", "loss per weighted slot")),
        ("training", "Acceptance on training blocks", _curves(logs, names, "acceptance", "tokens")),
        ("positions", "Acceptance by position", _positions(logs, names)),
        ("schedule", "Learning rate", _curves(logs, names, "lr", "learning rate")),
        ("time", "Where the time went", _time(logs, names)),
        ("config", "Options that differ", _differences(logs, names)),
    ]
    title = "Runs " + ", ".join(names)
    path.write_text(page(title, sections), encoding="utf-8")
    return path


def comparison_table(logs: Sequence[RunRecords]) -> Table:
    """Return the table for the terminal."""
    result = Table(title="runs", title_justify="left")
    for index, head in enumerate(_HEADS):
        result.add_column(head, justify="left" if index == 0 else "right")
    for row in _rows(logs, _names(logs)):
        result.add_row(*row)
    return result


def _names(logs: Sequence[RunRecords]) -> list[str]:
    """Return the shortest ends of the runs' paths that tell them apart."""
    parts = [log.folder.resolve().parts for log in logs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("the paths are distinct")


def _rows(logs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, ...]]:
    rows = []
    for log, name in zip(logs, names, strict=True):
        lengths = log.acceptance_curve(label=name).values
        rows.append(
            (
                name,
                str(log.train[-1]["step"]),
                shown(lengths[-1]) if lengths else "n/a",
                shown(max(lengths)) if lengths else "n/a",
                shown(log.last_mean("loss")),
                shown(log.last_mean("tokens_per_s")),
                shown(log.last_mean("rows_per_s")),
                shown(sum(log.seconds().values())),
            )
        )
    return rows


def _acceptance(logs: Sequence[RunRecords], names: Sequence[str]) -> str:
    curves = [
        log.acceptance_curve(label=name) for log, name in zip(logs, names, strict=True) if log.evals
    ]
    if not curves:
        return note("No evaluation on held-out samples in these runs.")
    svg = line_plot("acceptance length", curves, ylabel="acceptance length", has_markers=True)
    return figure(svg, "Tokens gained per target step; 1 is decoding without a drafter.")


def _curves(logs: Sequence[RunRecords], names: Sequence[str], key: str, ylabel: str) -> str:
    pairs = zip(logs, names, strict=True)
    curves: list[Curve] = [log.curve(key, label=name) for log, name in pairs]
    return figure(line_plot(key, curves, ylabel=ylabel), "Over the training steps.")


def _positions(logs: Sequence[RunRecords], names: Sequence[str]) -> str:
    def last(log: RunRecords) -> dict[str, float]:
        found = log.positions()
        return found.get("held out") or found["training"]

    groups = {name: last(log) for log, name in zip(logs, names, strict=True)}
    return positions(groups)


def _time(logs: Sequence[RunRecords], names: Sequence[str]) -> str:
    groups = {name: log.seconds() for log, name in zip(logs, names, strict=True)}
    if not any(groups.values()):
        return note("The logs hold no times.")
    return figure(time_plot(groups), "Wall time of the runs.")


def _differences(logs: Sequence[RunRecords], names: Sequence[str]) -> str:
    keys = dict.fromkeys(key for log in logs for key in log.config)
    values = {key: [json.dumps(log.config.get(key)) for log in logs] for key in keys}
    rows = [(key, *given) for key, given in values.items() if len(set(given)) > 1]
    if not rows:
        return note("All options are equal.")
    return table(("option", *names), rows)
