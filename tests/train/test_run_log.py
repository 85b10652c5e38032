"""Records, curves and the progress line of a run."""

import json
import sys
import time
import types

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_offline.common.errors import BadInput
from dflash_offline.train.distributed import World
from dflash_offline.train.phase_clock import PHASES, PhaseClock
from dflash_offline.train.run_log import Counts, RunLog, Window, speeds
from dflash_offline.train.wandb_log import WandbLog, check_wandb


def window_of(*steps: tuple[list[float], float]) -> Window:
    window = Window()
    for totals, skipped in steps:
        window.add(
            torch.tensor(totals, dtype=torch.float64),
            torch.tensor(0.5),
            torch.tensor(skipped),
            Counts(tokens=100, rows=30, flops=5e6, bytes_read=2e6, skipped_samples=1),
        )
    return window


def test_a_window_is_the_mean_over_its_sums():
    # Loss, weight, blocks, accepted by position: not a mean of means.
    window = window_of(([6.0, 2.0, 4, 3, 1], 0.0), ([10.0, 6.0, 4, 3, 2], 0.0))
    record = window.read()
    assert window.take_skipped() == 0
    assert record["loss"] == pytest.approx(2.0)
    assert record["accepted_by_position"] == pytest.approx([0.75, 0.375])
    assert record["acceptance"] == pytest.approx(2.125)
    assert record["grad_norm"] == 0.5
    assert window.counts == Counts(
        tokens=200, rows=60, flops=1e7, bytes_read=4e6, skipped_samples=2
    )


def test_a_window_goes_on_from_its_sums():
    first = window_of(([6.0, 2.0, 4, 3, 1], 0.0), ([10.0, 6.0, 4, 3, 2], 0.0))
    assert first.sums() == (2, 16.0, 8.0, 8.0, 6.0, 3.0)
    second = Window(first.sums())
    assert second.sums() == first.sums()
    second.add(
        torch.tensor([8.0, 4.0, 2, 2, 0], dtype=torch.float64),
        torch.tensor(0.5),
        torch.tensor(0.0),
        Counts(),
    )
    assert second.sums() == (3, 24.0, 12.0, 10.0, 8.0, 3.0)
    assert second.num_steps == 1


def test_speeds():
    counts = Counts(tokens=200, rows=60, flops=1e7, bytes_read=4e6)
    found = speeds(counts, 2.0, datasheet=1e7, world_size=2)
    assert found == {
        "tokens_per_s": 100.0,
        "rows_per_s": 30.0,
        "read_bytes_per_s": 2e6,
        "mfu": 0.25,
    }
    assert "mfu" not in speeds(counts, 2.0, datasheet=None, world_size=1)
    assert counts.over(World(), torch.device("cpu")) == counts


def test_skipped_steps_are_counted_and_leave_no_trace():
    window = window_of(([0.0] * 5, 1.0), ([4.0, 2.0, 2, 1, 0], 0.0))
    assert (window.take_skipped(), window.take_skipped()) == (1, 0)
    assert window.read()["loss"] == pytest.approx(2.0)
    nothing = window_of(([0.0] * 5, 1.0)).read()
    assert nothing["acceptance"] == 1.0
    assert nothing["loss"] is None


def record(step: int, loss: float) -> dict:
    return {
        "step": step,
        "loss": loss,
        "acceptance": 1.5,
        "accepted_by_position": [0.4, 0.1],
        "tokens_per_s": 1234.0,
        "rows_per_s": 567.0,
        "read_bytes_per_s": 1.5e8,
        "mfu": 0.41,
        "memory_bytes": 2e9,
        "data_wait_frac": 0.012,
    }


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_records_and_curves(tmp_path, capsys):
    with RunLog(tmp_path, total=2, step=0, recorded=0, done=0) as log:
        log.run({"lr": 0.1}, device="cpu")
        log.train(record(1, 3.0), done=1)
        log.train(record(2, 2.5), done=2)
        log.evaluation(
            {
                "step": 2,
                "acceptance_length": 1.7,
                "accepted_by_position": [0.5, 0.2, None],
                "by_source": {"code": 1.5},
            }
        )
    assert [each["kind"] for each in lines(tmp_path)] == ["run", "train", "train", "eval"]
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [event.value for event in curves.Scalars("train/loss")] == [3.0, 2.5]
    assert [event.value for event in curves.Scalars("eval/accepted/2")] == pytest.approx([0.2])
    assert [event.value for event in curves.Scalars("eval/by_source/code")] == [1.5]
    assert "train/step" not in curves.Tags()["scalars"]
    shown = capsys.readouterr().err
    assert (
        "step 2  loss 2.500  acceptance 1.50  tok/s 1,234  rows/s 567  MFU 41.0%  data-wait 1.2%  "
        "read 0.15 GB/s  memory 2.0 GB  ETA"
    ) in shown


class FakeWandb(types.ModuleType):
    """The part of the package's API that is used; the package itself is optional."""

    Error = RuntimeError

    def __init__(self, *, has_key: bool, has_network: bool) -> None:
        super().__init__("wandb")
        self.has_key, self.has_network = has_key, has_network
        self.started: dict = {}
        self.logged: list[dict] = []
        self.is_finished = False

    def Settings(self, **settings):
        return settings

    def login(self, *, prompt):
        assert prompt is False
        return self.has_key

    def init(self, **options):
        if options["mode"] == "online" and not self.has_network:
            raise self.Error("no network")
        self.started = options
        return self

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.is_finished = True


@pytest.mark.parametrize(
    ("has_key", "has_network", "mode"),
    [(True, True, "online"), (True, False, "offline"), (False, True, "offline")],
    ids=["online", "no-network", "no-key"],
)
def test_records_go_to_wandb(tmp_path, monkeypatch, has_key, has_network, mode):
    fake = FakeWandb(has_key=has_key, has_network=has_network)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = WandbLog("drafters", tmp_path / "first", {"lr": 0.1})
    with RunLog(tmp_path / "first", total=1, step=0, recorded=0, done=0, wandb=wandb) as log:
        log.train(record(1, 3.0), done=1)
        log.evaluation({"step": 1, "accepted_by_position": [0.5, None]})
    assert fake.started["mode"] == mode
    assert (fake.started["project"], fake.started["name"]) == ("drafters", "first")
    assert fake.started["config"] == {"lr": 0.1}
    assert fake.logged[0]["train/step"] == 1
    assert fake.logged[0]["train/accepted/2"] == 0.1
    assert fake.logged[1] == {"eval/step": 1, "eval/accepted/1": 0.5}
    assert fake.is_finished
    first = fake.started["id"]
    WandbLog("drafters", tmp_path / "first", {})
    assert fake.started["id"] == first
    WandbLog("drafters", tmp_path / "second", {})
    assert fake.started["id"] != first


def test_without_the_package_the_option_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb(None)
    with pytest.raises(BadInput, match="pip install wandb"):
        check_wandb("drafters")


def test_steps_that_are_run_again_are_forgotten(tmp_path):
    with RunLog(tmp_path, total=9, step=0, recorded=0, done=0) as log:
        log.run({})
        for step in range(1, 6):
            log.train(record(step, float(step)), done=step)
        log.evaluation({"step": 5, "acceptance_length": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "lo')
    with RunLog(tmp_path, total=9, step=3, recorded=3, done=3) as log:
        log.train(record(4, 40.0), done=4)
    kept = [(each["kind"], each.get("step"), each.get("loss")) for each in lines(tmp_path)]
    assert kept == [
        ("run", None, None),
        ("train", 1, 1.0),
        ("train", 2, 2.0),
        ("train", 3, 3.0),
        ("train", 4, 40.0),
    ]
    with RunLog(tmp_path, total=9, step=0, recorded=0, done=0) as log:
        log.run({"again": True})
    assert [each["kind"] for each in lines(tmp_path)] == ["run"]


def test_the_clock_gives_each_phase_its_time_once():
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("data"):
        time.sleep(0.02)
    with clock.phase("forward"):
        pass
    taken = clock.take()
    assert set(taken) == set(PHASES)
    assert taken["data"] >= 0.02
    assert taken["forward"] < 0.02
    assert set(clock.take().values()) == {0.0}
