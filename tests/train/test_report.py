"""The report page: every section and plot has its data, and nothing comes from elsewhere."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.train.page import shown, table
from dflash_offline.train.plots import MAX_POINTS, Curve, line_plot, thin
from dflash_offline.train.report import RunRecords, write_report

CHROMIUM = "/usr/bin/chromium"
MEASURE_PLOTS = """<script>
for (const plot of document.querySelectorAll("svg"))
  console.log("plot", plot.getBoundingClientRect().height, plot.querySelectorAll("path").length);
</script>"""
SECTIONS = {
    "result": 0,
    "loss": 1,
    "schedule": 2,
    "acceptance": 2,
    "positions": 1,
    "sources": 1,
    "time": 1,
    "config": 0,
}


def write_log(folder: Path, *, steps: int = 50, evals: bool = True, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"lr": 0.001, "cache": ["store <1>"], "seed": None}
    drafter = {"block_size": 4, "dflash_config": {"mask_token_id": 16}}
    records = [{"kind": "run", "config": config, "drafter": drafter, "mask_token": "a spare row"}]
    for step in range(1, steps + 1):
        records.append(
            {
                "kind": "train",
                "step": step,
                "loss": 9.0 / step,
                "acceptance": 1 + step / 50,
                "accepted_by_position": [0.5, 0.25, 0.125],
                "lr": 1e-3 * step,
                "grad_norm": 2.0,
                "tokens_per_s": 1234.0,
                "rows_per_s": 777.0,
                "data_wait_frac": 0.03,
                "elapsed_s": 1.25 * step,
                "seconds": {"data": 0.1, "forward": 0.4, "backward": 0.3, "optimizer": 0.2},
            }
            | changes
        )
        if evals and step % 10 == 0:
            records.append(
                {
                    "kind": "eval",
                    "step": step,
                    "acceptance_length": 1 + step / 100,
                    "accepted_by_position": [0.6, 0.3, 0.1],
                    "by_source": {"code": 1.5, "chat": 1 + step / 200},
                }
            )
    lines = [json.dumps(record) for record in records]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class Page(HTMLParser):
    """Sections by id with their text, and the number of plots and drawn paths in each."""

    VOID = frozenset({"meta", "br", "hr", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: dict[str, str] = {}
        self.plots: dict[str, int] = {}
        self.paths: dict[str, int] = {}
        self.section = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = values["id"]
            self.text[self.section] = ""
            self.plots[self.section] = self.paths[self.section] = 0
        elif self.section and tag == "svg":
            self.plots[self.section] += 1
        elif self.section and tag == "path":
            self.paths[self.section] += 1

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data):
        if self.section:
            self.text[self.section] += data


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_log(tmp_path_factory.mktemp("runs") / "first")
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


def test_every_section_has_its_plots(page_text: str) -> None:
    page = Page(page_text)
    assert page.plots == SECTIONS
    for section, plots in SECTIONS.items():
        # A plot without data has axes and ticks alone, fewer paths than this.
        assert page.paths[section] >= 8 * plots
        assert len(page.text[section]) > 40


def test_numbers_are_shown(page_text: str) -> None:
    page = Page(page_text)
    assert "1.5 at step 50" in page.text["result"]
    assert "777" in page.text["result"]
    assert "3 %" in page.text["result"]
    assert re.search(r"chat\s*1\.25", page.text["sources"])
    assert re.search(r"forward\s*20\s*32\.0 %", page.text["time"])
    assert re.search(r"other\s*12\.5\s*20\.0 %", page.text["time"])
    assert "store <1>" in page.text["config"]
    assert "0.001" in page.text["config"]
    assert "a spare row" in page.text["config"]
    assert "mask_token_id 16" in page.text["config"]


def test_page_stands_alone(page_text: str) -> None:
    page = Page(page_text)
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert "link" not in names
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        page.tags
    )
    for _, values in page.tags:
        for key in ("src", "href", "xlink:href"):
            assert (values.get(key) or "#").startswith("#")
    assert "@import" not in page_text
    assert "url(http" not in page_text
    assert "prefers-color-scheme: dark" in page_text
    # Black text or axes would vanish on a dark page.
    assert "currentColor" in page_text
    assert not re.search(r"(fill|stroke): #(000000|010203)", page_text)
    ids = re.findall(r'\sid="([^"]+)"', page_text)
    assert len(ids) == len(set(ids))


def test_run_without_evaluation(tmp_path: Path) -> None:
    text = write_report(write_log(tmp_path / "run", evals=False)).read_text(encoding="utf-8")
    page = Page(text)
    assert "No evaluation" in page.text["acceptance"]
    assert "No evaluation" in page.text["sources"]
    assert page.plots["acceptance"] == 1


def test_short_run_with_nothing_finite(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", steps=1, evals=False, loss=math.nan, grad_norm=0.0)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "n/a" in page.text["result"]


def test_resumed_run_counts_a_step_once(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", steps=20)
    log = run / "log.jsonl"
    again = log.read_text().replace('"loss": 0.45', '"loss": 0.5').splitlines()
    # The second run starts from step 11 and was killed in the middle of a line.
    resumed = [line for line in again if json.loads(line).get("step", 99) > 10]
    log.write_text("\n".join([*again[:20], *resumed]) + '\n{"kind": "tra')
    records = RunRecords(run)
    assert [record["step"] for record in records.train] == list(range(1, 21))
    assert records.train[-1]["loss"] == 0.5
    assert records.seconds()["data"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "missing"),
        ("", "no training record"),
        ("{\n{}\n", "line 1 is not JSON"),
        ('{"packs": 3}\n', "no record of dflash-train"),
        ("[1]\n", "no record of dflash-train"),
        ('{"kind": "train", "loss": 1.0}\n', "no record of dflash-train"),
        ('{"kind": "run", "workers": 2}\n', "no record of dflash-train"),
        ("\udcff", "is no text"),
    ],
    ids=["missing", "empty", "damaged", "foreign", "list", "other train", "other run", "bytes"],
)
def test_bad_log(content: str | None, word: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content, errors="surrogateescape")
    with pytest.raises(BadInput, match=word):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_thin() -> None:
    steps = np.arange(1009)
    values = np.where(steps == 500, np.nan, steps.astype(float))
    step, mean, low, high = thin(steps, values)
    assert len(step) == MAX_POINTS
    assert (low <= mean).all()
    assert (mean <= high).all()
    assert low[0] == 0
    assert high[-1] == 1008
    assert thin([], []).shape == (4, 0)


def test_line_plot_is_reproducible() -> None:
    curve = Curve(label="loss", steps=[1, 2, 3], values=[3.0, 2.0, math.inf])
    first, second = (line_plot("loss", [curve], ylabel="loss") for _ in range(2))
    assert first == second
    assert 'viewBox="0 0 360 216"' in first
    assert not re.search(r"<svg[^>]*(width|height)=", first)


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "n/a"), (1.2345, "1.23"), (12345.6, "12,346"), (0.000123, "0.000123"), (0, "0")],
)
def test_shown(value: float, text: str) -> None:
    assert shown(value) == text


def test_table_escapes() -> None:
    assert "<b>" not in table(("a",), [("<b>",)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs /usr/bin/chromium")
def test_renders_in_a_browser(page_text: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_text + MEASURE_PLOTS, encoding="utf-8")
    picture = tmp_path / "phone.png"
    browser = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--enable-logging=stderr"),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=390,2400",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert picture.stat().st_size > 20_000
    # Whatever a page's console says, errors of the page included, stands in such a line.
    said = re.findall(r'CONSOLE.*?"(.*)", source', browser.stderr)
    assert len(said) == browser.stderr.count("CONSOLE") == page_text.count("<svg")
    for words in said:
        height, num_shapes = map(float, re.fullmatch(r"plot ([\d.]+) (\d+)", words).groups())
        assert height > 100
        assert num_shapes > 3


def test_what_only_some_logs_hold(tmp_path):
    plain = write_report(write_log(tmp_path / "plain")).read_text()
    assert "utilisation" not in plain
    assert "left out" not in plain
    measured = {"mfu": 0.4, "read_bytes_per_s": 1.5e9, "memory_bytes": 36e9, "damaged_samples": 3}
    page = write_report(write_log(tmp_path / "full", skipped_steps=0, **measured)).read_text()
    for name, value in (
        ("model FLOPs utilisation, end", "40 %"),
        ("read from the store, end", "1.5 GB/s"),
        ("peak memory", "36 GB"),
        ("damaged samples left out", "3"),
    ):
        assert re.search(rf"{name}</t[dh]>\s*<td[^>]*>{re.escape(value)}<", page), name
    assert "steps left out" not in page
