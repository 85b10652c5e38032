"""The report of a training run: one HTML file that needs nothing else.

Everything is read from the run's `log.jsonl`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_offline.common.errors import BadInput
from dflash_offline.train.page import figure, note, page, shown, table
from dflash_offline.train.plots import Curve, line_plot, position_plot, time_plot

LOG_NAME = "log.jsonl"
REPORT_NAME = "report.html"
# Means over this share of the last records describe where a run ended.
_LAST_SHARE = 0.1

# What pages cannot do without, by kind of record.
_KEYS = {
    "run": {"config"},
    "train": {"step", "accepted_by_position"},
    "eval": {"step", "acceptance_length", "accepted_by_position", "by_source"},
}

Record = dict[str, Any]


class RunRecords:
    """The records of one run, by kind.

    A resumed run writes again the steps since its checkpoint; the last record of a step counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.config: Record = {}
        self.facts: Record = {}  # what the run decided or found by itself
        train: dict[int, Record] = {}
        evals: dict[int, Record] = {}
        for record in _read(self.folder / LOG_NAME):
            if record["kind"] == "run":
                self.config = record["config"]
                # A run that goes on says again what holds from there.
                self.facts |= {k: v for k, v in record.items() if k not in ("kind", "config")}
            elif record["kind"] == "train":
                train[record["step"]] = record
            elif record["kind"] == "eval":
                evals[record["step"]] = record
        self.train = [train[step] for step in sorted(train)]
        self.evals = [evals[step] for step in sorted(evals)]

    @property
    def name(self) -> str:
        """The run's folder name."""
        return self.folder.resolve().name

    def curve(self, key: str, *, label: str | None = None) -> Curve:
        """Return a value of the training records over steps."""
        return Curve(
            label=label or key,
            steps=[record["step"] for record in self.train],
            values=[_number(record.get(key)) for record in self.train],
        )

    def acceptance_curve(self, *, label: str, source: str | None = None) -> Curve:
        """Return the held-out acceptance length over steps, of all samples or of one source."""
        if source is None:
            values = [_number(record["acceptance_length"]) for record in self.evals]
        else:
            values = [_number(record["by_source"].get(source)) for record in self.evals]
        return Curve(label=label, steps=[record["step"] for record in self.evals], values=values)

    def sources(self) -> list[str]:
        """Return the sources of held-out samples."""
        return sorted({source for record in self.evals for source in record["by_source"]})

    def last_mean(self, key: str) -> float:
        """Return the mean of a training value over the last tenth of the records."""
        last = self.train[-max(1, round(len(self.train) * _LAST_SHARE)) :]
        values = [v for v in (_number(r.get(key)) for r in last) if math.isfinite(v)]
        return sum(values) / len(values) if values else math.nan

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each part of the work, over all records, and on the rest."""
        total: dict[str, float] = {}
        for record in self.train:
            for part, seconds in record.get("seconds", {}).items():
                total[part] = total.get(part, 0.0) + seconds
        rest = _number(self.train[-1].get("elapsed_s")) - sum(total.values())
        if total and rest > 0:
            total["other"] = rest
        return total

    def positions(self) -> dict[str, dict[str, float]]:
        """Return the last acceptance by position, of training blocks and of held-out samples."""
        found = {}
        for label, records in (("training", self.train), ("held out", self.evals)):
            if records:
                shares = records[-1]["accepted_by_position"]
                found[label] = {str(k): _number(share) for k, share in enumerate(shares, start=1)}
        return found


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder.

    Args:
        run_dir: holds `log.jsonl`.

    Returns:
        the path of the page.

    Raises:
        BadInput: there is no log, or no training record in it.
    """
    log = RunRecords(run_dir)
    if not log.train:
        raise BadInput(f"{log.folder / LOG_NAME} holds no training record; train first")
    path = log.folder / REPORT_NAME
    sections = [
        ("result", "Result", table(("measure", "value"), _result_rows(log))),
        ("loss", "Loss", _loss(log)),
        ("schedule", "Learning rate and gradient norm", _schedule(log)),
        ("acceptance", "Acceptance length on held-out samples", _acceptance(log)),
        ("positions", "Acceptance by position", positions(log.positions())),
        ("sources", "Acceptance length by source", _sources(log)),
        ("time", "Where the time went", _time(log)),
        ("config", "Configuration", _configuration(log)),
    ]
    path.write_text(page(f"Training run {log.name}", sections), encoding="utf-8")
    return path


def _loss(log: RunRecords) -> str:
    svg = line_plot("loss", [log.curve("loss")], ylabel="loss per weighted slot")
    return figure(svg, "What --loss minimises, weighted mean over the supervised slots of a step.")


def _schedule(log: RunRecords) -> str:
    rate = line_plot("learning rate", [log.curve("lr")], ylabel="learning rate")
    norms = log.curve("grad_norm")
    is_log = any(value > 0 for value in norms.values)
    norm = line_plot("gradient norm", [norms], ylabel="gradient norm", is_log=is_log)
    return figure(rate, "Peak after the warm-up.") + figure(norm, "Before clipping.")


def _acceptance(log: RunRecords) -> str:
    ylabel = "acceptance length"
    curve = log.curve("acceptance", label="training blocks")
    training = line_plot("training acceptance", [curve], ylabel=ylabel)
    text = "Tokens gained per target step; 1 is decoding without a drafter."
    if not log.evals:
        return note("No evaluation on held-out samples in this run.") + figure(training, text)
    held_out = log.acceptance_curve(label="held out")
    svg = line_plot("acceptance length", [held_out], ylabel=ylabel, has_markers=True)
    return figure(svg, text) + figure(training, "On the training blocks.")


def positions(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figure of acceptance by position; see `position_plot`."""
    caption = "Share of blocks in which this token and all before it were right."
    return figure(position_plot(groups), caption)


def _sources(log: RunRecords) -> str:
    if not log.evals:
        return note("No evaluation on held-out samples in this run.")
    sources = log.sources()
    curves = [log.acceptance_curve(label=source, source=source) for source in sources]
    svg = line_plot("acceptance by source", curves, ylabel="acceptance length", has_markers=True)
    last = log.evals[-1]["by_source"]
    rows = [(source, shown(_number(last.get(source)))) for source in sources]
    return figure(svg, "Held-out samples.") + table(("source", "acceptance length"), rows)


def _time(log: RunRecords) -> str:
    seconds = log.seconds()
    if not seconds:
        return note("The log holds no times.")
    total = sum(seconds.values())
    rows = [
        (part, shown(spent), f"{100 * spent / total:.1f} %" if total else "n/a")
        for part, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    times = figure(time_plot({log.name: seconds}), "Wall time of the run.")
    return times + table(("part", "seconds", "share"), rows)


def _result_rows(log: RunRecords) -> list[tuple[str, str]]:
    rows = [("steps", str(log.train[-1]["step"]))]
    if log.evals:
        lengths = [_number(record["acceptance_length"]) for record in log.evals]
        best = max(range(len(lengths)), key=lambda i: lengths[i])
        rows += [
            ("acceptance length, held out, last", shown(lengths[-1])),
            (
                "acceptance length, held out, best",
                f"{shown(lengths[best])} at step {log.evals[best]['step']}",
            ),
        ]
    rows += [
        ("acceptance length, training blocks, end", shown(log.last_mean("acceptance"))),
        ("loss, end", shown(log.last_mean("loss"))),
        ("tokens per second, end", shown(log.last_mean("tokens_per_s"))),
        ("supervised rows per second, end", shown(log.last_mean("rows_per_s"))),
        ("waiting for data, end", f"{shown(100 * log.last_mean('data_wait_frac'))} %"),
    ]
    for name, key, factor, unit in (
        ("model FLOPs utilisation, end", "mfu", 100, " %"),
        ("read from the store, end", "read_bytes_per_s", 1e-9, " GB/s"),
        ("peak memory", "memory_bytes", 1e-9, " GB"),
    ):
        value = log.last_mean(key)
        if math.isfinite(value):
            rows.append((name, f"{shown(factor * value)}{unit}"))
    last = log.train[-1]
    rows += [
        (f"{kind} left out", str(last[key]))
        for kind, key in (
            ("steps", "skipped_steps"),
            ("samples without an anchor", "skipped_samples"),
            ("damaged samples", "damaged_samples"),
        )
        if last.get(key)
    ]
    return rows


def _configuration(log: RunRecords) -> str:
    """Return tables of the options and of what the run decided, one for each nested mapping."""
    flat = {key: value for key, value in log.facts.items() if not isinstance(value, Mapping)}
    tables = [table(("option", "value"), _rows(log.config))]
    if flat:
        tables.append(table(("of the run", "value"), _rows(flat)))
    for name, nested in log.facts.items():
        if isinstance(nested, Mapping):
            tables.append(table((f"of the {name}", "value"), _rows(nested)))
    return "<br>".join(tables)


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, "" if value is None else _plain(value)) for key, value in values.items()]


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_plain(each) for each in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _keys(record: Record) -> set[str]:
    """Return what a record of its kind has at least."""
    return {"kind"} | _KEYS.get(str(record.get("kind")), set())


def _read(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as problem:
        raise BadInput(f"{path} is missing: give the folder of a training run") from problem
    except UnicodeDecodeError as problem:
        raise BadInput(f"{path} is no text: give the folder of a training run") from problem
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as problem:
            # A run that was killed may leave half a line at the end, and only there.
            if number < len(lines):
                raise BadInput(f"{path} line {number} is not JSON: {problem}") from problem
            break
        if not isinstance(record, dict) or not _keys(record) <= set(record):
            raise BadInput(
                f"{path} line {number} is no record of dflash-train; give the folder of a "
                "training run"
            )
        records.append(record)
    return records
