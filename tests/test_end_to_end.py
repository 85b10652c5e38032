"""From prompts to a drafter through the real commands, on a tiny random target.

What one command leaves is all that the next one gets. Training is interrupted and resumed, and its
losses must be those of the run that was not.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.generate_cli import main as generate_command
from dflash_offline.train.cli import main as train_command
from dflash_offline.train.eval_cli import main as eval_command

pytestmark = pytest.mark.slow

NUM_STEPS, CHECKPOINT = 20, 10
TRAINING = [
    *("--draft-layers", "2", "--block-size", "8", "--num-anchors", "8", "--lr", "1e-3"),
    *("--num-steps", str(NUM_STEPS), "--samples-per-step", "4", "--log-every", "1"),
    *("--checkpoint-every", str(CHECKPOINT), "--keep-checkpoints", "5", "--eval-every", "10"),
]


def run(command: Callable, *args: object) -> int:
    """Call a command as the shell would and return its exit code."""
    with pytest.raises(SystemExit) as end:
        command([str(arg) for arg in args])
    return end.value.code or 0


def records(folder: Path, kind: str) -> dict[int, dict]:
    """Return the last record of every step of a run's log."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {record["step"]: record for record in found if record["kind"] == kind}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A folder with prompts, answers, a store and a run of 20 steps."""
    folder = tmp_path_factory.mktemp("whole")
    prompts = [{"id": f"p{i}", "turns": [f"Say the number {i} twice."]} for i in range(24)]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text(lines)
    answers, cache = folder / "answers.jsonl", folder / "cache"
    target = ("--target", tiny_target)
    source = ("--data", folder / "prompts.jsonl", "--out", answers, "--max-new-tokens", 24)
    assert run(generate_command, *target, *source) == 0
    assert run(extract_command, *target, "--data", answers, "--out", cache, "--holdout", "25%") == 0
    assert run(train_command, "--cache", cache, "--out", folder / "run", *TRAINING) == 0
    return folder


def test_answers_are_the_targets(work: Path):
    answers = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 24


def test_store_is_whole(work: Path):
    cache = open_cache(str(work / "cache"))
    assert cache.is_complete
    assert cache.held_out_samples
    assert len(cache.training_samples) + len(cache.held_out_samples) == 24
    assert run(cache_command, "verify", "--deep", work / "cache") == 0


def test_extraction_resumes_to_the_same_bytes(work: Path, tmp_path: Path, tiny_target: Path):
    """A store that lost its last pack gets it back, byte for byte."""
    again = tmp_path / "cache"
    shutil.copytree(work / "cache", again)
    lost = max((again / "commit").glob("*.json"))
    wanted = {path: path.read_bytes() for path in again.glob("features/c/*/0/0/0")}
    lost.unlink()
    for index in again.glob("index-*"):
        index.unlink()
    args = ("--data", work / "answers.jsonl", "--out", again, "--holdout", "25%")
    assert run(extract_command, "--target", tiny_target, *args) == 0
    assert lost.exists()
    assert {path: path.read_bytes() for path in again.glob("features/c/*/0/0/0")} == wanted


def test_resume_gives_identical_losses(work: Path, tmp_path: Path):
    whole = records(work / "run", "train")
    assert sorted(whole) == list(range(1, NUM_STEPS + 1))
    again = tmp_path / "run"
    shutil.copytree(work / "run", again)
    shutil.rmtree(again / "checkpoints" / f"step-{NUM_STEPS}")
    shutil.rmtree(again / "draft")
    args = ("--cache", work / "cache", "--out", again, *TRAINING, "--resume")
    assert run(train_command, *args) == 0
    resumed = records(again, "train")
    assert sorted(resumed) == sorted(whole)
    for step in whole:
        assert resumed[step]["loss"] == whole[step]["loss"], step
    weights = "draft/model.safetensors"
    assert (again / weights).read_bytes() == (work / "run" / weights).read_bytes()


def test_run_leaves_a_drafter_and_a_report(work: Path):
    assert (work / "run" / "draft" / "config.json").is_file()
    page = (work / "run" / "report.html").read_text()
    assert "<svg" in page
    losses = [record["loss"] for record in records(work / "run", "train").values()]
    assert losses[-1] < losses[0]
    assert records(work / "run", "eval")[NUM_STEPS]["acceptance_length"] >= 1


def test_eval_from_the_store(work: Path, tmp_path: Path):
    """The held-out figure of the store is the one that training logged last."""
    out = tmp_path / "held-out.json"
    args = ("--draft", work / "run" / "draft", "--cache", work / "cache", "--out", out)
    assert run(eval_command, *args) == 0
    logged = records(work / "run", "eval")[NUM_STEPS]["acceptance_length"]
    assert json.loads(out.read_text())["acceptance_length"] == pytest.approx(logged, rel=1e-6)


def test_eval_by_decoding_is_lossless(work: Path, tmp_path: Path, tiny_target: Path):
    """Exit code 0 says that every token is the target's own; a gate that is not met gives 1."""
    args = ("--draft", work / "run" / "draft", "--target", tiny_target, "--data")
    some = (work / "prompts.jsonl", "--num-prompts", 3, "--max-new-tokens", 24)
    assert run(eval_command, *args, *some, "--dtype", "float32") == 0
    assert run(eval_command, *args, *some, "--min-acceptance", 8.5) == 1
