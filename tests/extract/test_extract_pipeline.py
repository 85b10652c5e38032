"""Behind the forward: back-pressure, memory that is used again, split batches, failing threads."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common import store_writer
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import Stopped
from dflash_offline.common.pack_index import read_pack_index, read_record
from dflash_offline.common.target import load_target
from dflash_offline.extract import forward as forward_module
from dflash_offline.extract import pack_buffers, state_ring
from dflash_offline.extract import plan as plan_module
from dflash_offline.extract import run as run_module
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.plan import PlanOptions

SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--teacher", "final")


@pytest.fixture
def small_units(monkeypatch):
    """Units of two packs, so that a small corpus has many."""
    monkeypatch.setitem(PlanOptions.__init__.__kwdefaults__, "unit_packs", 2)


@pytest.fixture
def extract(make_target, write_corpus, run, tmp_path):
    """`extract(count, name, *options)` runs the command and returns exit code and store."""

    def call(count: int, name: str, *options: object) -> tuple[int, Path]:
        out = tmp_path / name
        args = ("--target", make_target("qwen3"), "--data", write_corpus(count), "--out", out)
        return run(extract_command, *args, *SMALL, *options), out

    return call


def content(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for array in store.glob("*/c")
        for path in sorted(array.rglob("*"))
        if path.is_file()
    }


def records_of(store: Path) -> dict[int, dict]:
    cache = open_cache(str(store), partial=True)
    index = read_pack_index(cache.blobs, cache.plan.num_packs)
    return {pack: read_record(cache.blobs, index, pack) for pack in index.packs}


def test_slow_writer_holds_the_forward_up(extract, small_units, monkeypatch):
    """However slow the disk is, two units of packs and two batches are in memory, no more."""
    commit, states = store_writer.Store.commit_pack, forward_module.StateForward.states
    made: list[pack_buffers.PackBuffer] = []
    init = pack_buffers.PackBuffer.__init__
    forwarded, committed, ahead = 0, 0, []

    def slow(store, pack, *args, **kwargs):
        nonlocal committed
        time.sleep(0.05)
        written = commit(store, pack, *args, **kwargs)
        committed += store.pack_length(pack)
        return written

    def counted(forward, samples, out):
        nonlocal forwarded
        ahead.append(forwarded - committed)
        forwarded += sum(map(len, samples))
        return states(forward, samples, out)

    monkeypatch.setattr(run_module, "self_check", lambda *_args: [])
    monkeypatch.setattr(run_module, "num_writers", lambda _workers: 1)
    monkeypatch.setattr(store_writer.Store, "commit_pack", slow)
    monkeypatch.setattr(forward_module.StateForward, "states", counted)
    monkeypatch.setattr(
        pack_buffers.PackBuffer,
        "__init__",
        lambda self, *args: made.append(self) or init(self, *args),
    )
    code, out = extract(80, "slow", "--codec", "raw")
    assert code == 0
    num_packs = open_cache(str(out)).plan.num_packs
    assert num_packs > 3 * 4
    assert len(made) <= 2 * 2
    assert max(ahead) <= 2 * 2 * 256 + state_ring.NUM_BUFFERS * 512
    # It does run ahead: the disk is not waited for batch by batch.
    assert max(ahead) > 512


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_memory_that_goes_back_is_not_read_again(codec, extract, small_units, monkeypatch):
    """Everything that is handed back is overwritten at once, and the store is the same."""
    code, sound = extract(60, "sound", "--codec", codec)
    assert code == 0
    release, give = state_ring.StateRing.release, pack_buffers.PackPool.release

    @torch.inference_mode()
    def poison_ring(ring, buffer):
        buffer.rows.fill_(torch.nan)
        for memory in buffer.host.values():
            memory.fill_(0xFF)
        release(ring, buffer)

    def poison_pack(pool, buffer):
        for memory in buffer.memory.values():
            memory.view("uint8")[...] = 0xFF
        give(pool, buffer)

    monkeypatch.setattr(state_ring.StateRing, "release", poison_ring)
    monkeypatch.setattr(pack_buffers.PackPool, "release", poison_pack)
    code, poisoned = extract(60, "poisoned", "--codec", codec)
    assert code == 0
    assert content(poisoned) == content(sound)


@pytest.mark.parametrize("where", ["load_target", "Worker"])
def test_memory_that_is_gone_is_no_bug(where, extract, monkeypatch, capsys):
    """While the target is loaded, or for the ring: others may take memory after the estimate."""

    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(run_module, where, fail)
    code, _ = extract(9, "store")
    assert code == 3
    assert "memory of cpu has run out (CUDA out of memory" in capsys.readouterr().err


def out_of_memory_above(monkeypatch, padded_tokens: int) -> None:
    states = forward_module.StateForward.states

    def limited(forward, samples, out):
        if len(samples) * max(map(len, samples)) > padded_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return states(forward, samples, out)

    monkeypatch.setattr(run_module, "self_check", lambda *_args: [])
    monkeypatch.setattr(forward_module.StateForward, "states", limited)


def test_batch_that_does_not_fit_is_split(extract, make_target, monkeypatch, capsys):
    out_of_memory_above(monkeypatch, 300)
    code, out = extract(30, "split", "--codec", "raw")
    assert code == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "batches split for want of memory" in said
    runs = [record["run"] for record in records_of(out).values()]
    splits = {tuple(place) for run in runs for place in run.get("split_batches", [])}
    end = json.loads((out / "logs/extract.jsonl").read_text().splitlines()[-1])
    assert end["kind"] == "end"
    assert end["splits"] >= len(splits) > 0
    assert_close_to_reference(make_target("qwen3"), out)


def assert_close_to_reference(folder: Path, store: Path) -> None:
    target = load_target(folder, dtype=torch.float32, device="cpu", head=False)
    cache = open_cache(str(store))
    with forward_module.StateForward(target, cache.schema.layers, keep_final=True) as forward:
        for document in cache.read_many(cache.samples[:8]):
            alone = forward([document.tokens])
            for ours, wanted in (
                (document.features, alone.features),
                (document.final, alone.final),
            ):
                values = [
                    torch.from_numpy(x.view("int16")).view(torch.bfloat16) for x in (ours, wanted)
                ]
                torch.testing.assert_close(*values, rtol=1 / 100, atol=1e-5)


def test_sample_that_does_not_fit_stops_the_run(extract, monkeypatch, capsys):
    out_of_memory_above(monkeypatch, 20)
    code, _ = extract(5, "never", "--codec", "raw")
    assert code == 3
    assert "does not hold the forward of one sample" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("problem", "code"), [(Stopped("the disk is full"), 3), (RuntimeError("unforeseen"), 70)]
)
def test_failing_thread_stops_the_run(problem, code, extract, monkeypatch, capsys):
    commit = store_writer.Store.commit_pack

    def failing(store, pack, *args, **kwargs):
        if pack == 2:
            raise problem
        return commit(store, pack, *args, **kwargs)

    monkeypatch.setattr(store_writer.Store, "commit_pack", failing)
    got, out = extract(30, "failing", "--codec", "raw")
    assert got == code
    assert str(problem) in capsys.readouterr().err
    assert 2 not in records_of(out)
    monkeypatch.setattr(store_writer.Store, "commit_pack", commit)
    assert extract(30, "failing", "--codec", "raw")[0] == 0


def test_quarantine_of_earlier_runs_counts(extract, monkeypatch, capsys):
    take = forward_module.Capture.take

    def poisoned(capture):
        states = take(capture)
        states[0][2] = float("inf")
        return states

    monkeypatch.setattr(run_module, "self_check", lambda *_args: [])
    monkeypatch.setattr(forward_module.Capture, "take", poisoned)
    assert extract(12, "bad", "--codec", "raw")[0] == 1
    monkeypatch.setattr(forward_module.Capture, "take", take)
    capsys.readouterr()
    assert extract(12, "bad", "--codec", "raw")[0] == 1
    assert "not finite in layer 0 at position 2" in " ".join(capsys.readouterr().err.split())


def test_attention_is_planned_for_frequent_shapes_only(make_target):
    """cuDNN's, which PyTorch prefers on Hopper; the plan's batches decide, and nothing else."""
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=False)
    seen = []
    target.base.register_forward_pre_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    samples = [np.arange(length, dtype=np.int32) for length in (7, 5)]
    with forward_module.StateForward(
        target, (0, 1), keep_final=True, frequent_shapes={(2, 7)}
    ) as forward:
        forward(samples)
        forward(samples[:1])
        forward(samples)
    assert seen == [True, False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_extraction_plans_attention_for_its_frequent_shapes(extract, monkeypatch):
    """Samples of one length, cut there, and a few shorter ones: the longest come often."""
    given = []
    init = forward_module.StateForward.__init__
    monkeypatch.setattr(
        forward_module.StateForward,
        "__init__",
        lambda self, *args, **named: given.append(named) or init(self, *args, **named),
    )
    monkeypatch.setattr(plan_module, "_WORTH_A_PLAN", 2)
    code, _ = extract(40, "cut", "--codec", "raw", "--max-length", 40, "--batch-tokens", 160)
    assert code == 0
    assert given[-1]["frequent_shapes"] == {(4, 40)}
