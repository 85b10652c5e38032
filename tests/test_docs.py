"""What the documents tell a reader to type works: their commands and code run in order.

Blocks marked `console` hold commands behind `$ `; the lines between are what they print, and are
not compared. `python` blocks run as they stand. All pages run in one folder, the quickstart first.
The target is a tiny random model behind `$TARGET`.
"""

import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from dflash_offline.common.cache import open_cache
from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.codecs import INT_CODECS
from dflash_offline.common.pack_arrays import as_bfloat16

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PAGES = sorted(DOCS.glob("*.md"))
# In the order in which the README names them.
CONSOLE_PAGES = ["extraction.md", "tutorial.md", "training.md", "evaluation.md"]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page's console blocks, continuation lines joined."""
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")


def run_command(line: str) -> None:
    """Run one of our commands in this process; its exit code must be 0."""
    name, *args = shlex.split(os.path.expandvars(line), comments=True)
    module, _, function = SCRIPTS[name].partition(":")
    with pytest.raises(SystemExit) as end:
        getattr(importlib.import_module(module), function)(args)
    assert not end.value.code, line


def run_page(name: str) -> int:
    """Run a page's commands in the working directory; return how many there were."""
    lines = list(commands(DOCS / name))
    for line in lines:
        run_command(line)
    return len(lines)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[Path]:
    """A folder in which the quickstart has been followed."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "demo").mkdir()
    for name in ("prompts.jsonl", "heldout.jsonl"):
        # A few prompts are enough to run every command.
        lines = (ROOT / "demo" / name).read_text().splitlines(keepends=True)[::8]
        (folder / "demo" / name).write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TARGET", str(tiny_target))
        patch.chdir(folder)
        assert run_page("quickstart.md") > 0
        yield folder


@pytest.mark.slow
def test_quickstart(workspace: Path):
    assert (workspace / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("name", CONSOLE_PAGES)
def test_page(name: str):
    """Each goes on where the quickstart ends, also in the folder of a reader of all of them."""
    assert run_page(name) > 0


@pytest.mark.filterwarnings("ignore")  # zarr-python warns about its own future defaults
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_store_format_code(codec, corpus_maker, tmp_path, monkeypatch, capsys):
    corpus = corpus_maker(codec=codec)
    corpus.write(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(DOCS / "store-format.md", "python")
    values: dict = {}
    exec(code, values)
    last = corpus.features[-1]
    assert (values["features"].view("uint32") >> 16 == last).all()
    assert capsys.readouterr().out.splitlines()[0] == str(list(corpus.schema.layers))


@pytest.mark.filterwarnings("ignore")  # zarr-python warns about its own future defaults
@pytest.mark.parametrize("codec", INT_CODECS)
def test_int_codec_code(codec, corpus_maker, tmp_path):
    """The decoder of the page gives the bits that our own reader gives."""
    corpus = corpus_maker(codec=codec)
    with corpus.open(tmp_path / "cache") as store:
        rows = CalibrationRows()
        for features in corpus.features:
            rows.add(as_bfloat16(features))
        store.write_calibration(rows.fit(codec), {})
        corpus.commit(store)
    (code,) = blocks(DOCS / "store-format.md", "python decode")
    page: dict = {}
    exec(code, page)
    theirs = zarr.open_group(tmp_path / "cache", mode="r")
    mean, _, scale = np.moveaxis(theirs["calibration"][:], 1, 0)
    cache = open_cache(str(tmp_path / "cache"))
    for document in cache.read_many(cache.samples):
        sample = cache.plan.samples[document.index]
        rows = slice(sample.start, sample.start + sample.length)
        index = theirs["exact_rows"][sample.pack]
        at, token = np.divmod(index[index > 0] - 1, theirs["features"].shape[2])
        for slot in range(len(cache.schema.layers)):
            codes = theirs["features"][sample.pack, slot, rows]
            factors = theirs["scales"][sample.pack, slot, rows]
            bits = page["decode"](codec, codes, factors, scale[slot], mean[slot])
            for n in np.flatnonzero((at == slot) & (token >= rows.start) & (token < rows.stop)):
                bits[token[n] - rows.start] = theirs["exact"][sample.pack, n]
            np.testing.assert_array_equal(bits, document.features[slot])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, heading = link.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), link
        if heading:
            slugs = {
                re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            }
            assert heading in slugs, link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_console_blocks_are_run(page: Path):
    """A page with console blocks is among those that are run, and its commands are ours."""
    lines = list(commands(page))
    if lines:
        assert page.name in ["quickstart.md", *CONSOLE_PAGES]
    for line in lines:
        assert shlex.split(line)[0] in SCRIPTS, line


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_files_page_is_complete():
    """Every module stands on the page of files, and nothing else does."""
    _, *sections = re.split(r"^## (\w+)$", (DOCS / "files.md").read_text(), flags=re.MULTILINE)
    pages = dict(zip(sections[::2], sections[1::2], strict=True))
    assert set(pages) == {"common", "extract", "kernels", "train"}
    for folder, text in pages.items():
        named = re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)
        assert named == sorted(path.name for path in (ROOT / folder).glob("*.py"))
