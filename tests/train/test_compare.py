"""Several runs in one page and one table."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash_offline.common.errors import BadInput
from dflash_offline.train.compare import comparison_table, read_runs, write_comparison


def write_run(folder: Path, *, lr: float, gain: float, evals: bool = True) -> Path:
    folder.mkdir(parents=True)
    records = [{"kind": "run", "config": {"lr": lr, "seed": 0, "loss": "decay"}}]
    for step in (1, 2, 3):
        records.append(
            {
                "kind": "train",
                "step": step,
                "loss": 5.0 / step,
                "acceptance": 1.0 + gain,
                "accepted_by_position": [gain, gain / 2],
                "lr": lr,
                "grad_norm": 1.0,
                "tokens_per_s": 100.0,
                "rows_per_s": 50.0,
                "data_wait_frac": 0.0,
                "seconds": {"data": 1.0, "forward": 2.0},
            }
        )
    if evals:
        for step, length in ((2, 1 + gain), (3, 1 + gain / 2)):
            records.append(
                {
                    "kind": "eval",
                    "step": step,
                    "acceptance_length": length,
                    "accepted_by_position": [gain, gain / 4],
                    "by_source": {"chat": length},
                }
            )
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def text_of(table) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()


def test_comparison(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a" / "run", lr=0.001, gain=0.5),
        write_run(tmp_path / "b" / "run", lr=0.002, gain=0.8),
        write_run(tmp_path / "c" / "run", lr=0.002, gain=0.1, evals=False),
    ]
    logs = read_runs(runs)
    path = write_comparison(logs, tmp_path / "page.html")
    page = path.read_text(encoding="utf-8")
    for section in ("acceptance", "loss", "training", "positions", "schedule", "time", "config"):
        body = page.split(f'<section id="{section}">')[1].split("</section>")[0]
        for name in ("a/run", "b/run"):
            assert name in body, (section, name)
    options = page.split('<section id="config">')[1]
    assert "0.002" in options
    assert "decay" not in options, "only options that differ are listed"
    table = text_of(comparison_table(logs))
    assert "a/run" in table
    # Last and best held-out acceptance of the second run.
    assert "1.4" in table
    assert "1.8" in table
    assert "n/a" in table


def test_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lr=0.001, gain=0.5)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "log.jsonl").write_text("")
    with pytest.raises(BadInput, match="at least two"):
        read_runs([run])
    with pytest.raises(BadInput, match="twice"):
        read_runs([run, tmp_path / "." / "run"])
    with pytest.raises(BadInput, match="no training record"):
        read_runs([run, empty])
    with pytest.raises(BadInput, match="missing"):
        read_runs([run, tmp_path / "nowhere"])
