"""Checkpoints: atomic, rotating, readable without unpickling."""

import errno
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dflash_offline.common.errors import BadInput
from dflash_offline.train.checkpoint import (
    RunState,
    check_learned,
    checkpoint_name,
    checkpoints,
    load_optimizer,
    load_state,
    publish,
    save_checkpoint,
)
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export import load_drafter
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.order import StreamState
from dflash_offline.train.provenance import drafter_identity

TARGET = {"weight_digest": "abc", "chat_template_args": "{}"}
EXPORTED = ["config.json", "identity.json", "model.safetensors"]


@pytest.fixture
def parts(config_maker):
    drafter = Drafter(config_maker()).initialise(0)
    return drafter, Optimizer(drafter, weight_decay=0.0, betas=(0.9, 0.95))


def save(out, step, parts, keep=9, **changes):
    state = RunState(step=step, stream=StreamState(epoch=1, position=step), **changes)
    folder = out / "checkpoints" / checkpoint_name(step)
    drafter, optimizer = parts
    save_checkpoint(
        folder,
        state,
        drafter=drafter,
        optimizer=optimizer,
        dtype=torch.bfloat16,
        target=TARGET,
        keep=keep,
    )
    return folder, state


def test_round_trip(tmp_path, parts, config_maker):
    drafter, optimizer = parts
    for parameter in drafter.parameters():
        parameter.grad.fill_(0.1)
    optimizer.step(lr=0.01, weight_sum=torch.tensor(1.0), clip=1.0)
    folder, state = save(tmp_path, 5, parts, learned={"lr": 0.1}, skipped_samples=2)
    assert load_state(folder) == state
    other = Drafter(config_maker()).initialise(1)
    restored = Optimizer(other, weight_decay=0.0, betas=(0.9, 0.95))
    load_optimizer(folder, restored)
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(restored.tensors()[name], tensor), name
    # The folder is an exported drafter too, rounded.
    assert torch.equal(load_drafter(folder).fc.weight, other.fc.weight.bfloat16().float())


def test_state_lies_under_parameter_names_and_is_never_pickled(tmp_path, parts):
    folder, _ = save(tmp_path, 1, parts)
    names = set(load_file(folder / "optimizer.safetensors"))
    assert {"step", "master.fc.weight", "exp_avg.fc.weight", "exp_avg_sq.norm.weight"} <= names
    for file in folder.iterdir():
        with pytest.raises((pickle.UnpicklingError, UnicodeDecodeError, ValueError, EOFError)):
            pickle.loads(file.read_bytes())


def test_old_ones_go_and_order_is_by_number(tmp_path, parts):
    for step in (9, 10, 100):
        save(tmp_path, step, parts, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-100"]


def hidden(out) -> list[str]:
    return [path.name for path in (out / "checkpoints").iterdir() if path.name[0] == "."]


def test_a_full_disk_leaves_no_torn_checkpoint(small_disk, parts):
    disk = small_disk(1)
    save(disk, 1, parts)
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - (64 << 10)))
    with pytest.raises(OSError, match="No space") as full:
        save(disk, 2, parts)
    assert full.value.errno == errno.ENOSPC
    assert [path.name for path in checkpoints(disk)] == ["step-1"]
    assert hidden(disk) == []
    ballast.unlink()
    save(disk, 2, parts)
    assert [path.name for path in checkpoints(disk)] == ["step-1", "step-2"]


def test_what_a_killed_process_left_goes_with_the_next_checkpoint(tmp_path, parts):
    save(tmp_path, 1, parts)
    for name in (".step-2.tmp", ".step-1.old"):
        shutil.copytree(tmp_path / "checkpoints/step-1", tmp_path / "checkpoints" / name)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1"]
    save(tmp_path, 3, parts)
    assert hidden(tmp_path) == []


def test_publish_replaces_the_final_drafter(tmp_path, parts):
    folder, _ = save(tmp_path, 1, parts)
    publish(folder, tmp_path)
    (tmp_path / "draft/old").write_text("x")
    published = publish(folder, tmp_path)
    assert sorted(path.name for path in published.iterdir()) == EXPORTED


def test_a_drafter_that_was_copied_away_still_knows_its_target(tmp_path, parts):
    folder, _ = save(tmp_path, 1, parts)
    published = publish(folder, tmp_path)
    copied = shutil.copytree(published, tmp_path / "elsewhere/draft")
    assert drafter_identity(copied) == TARGET


def test_damage_is_named(tmp_path, parts):
    folder, _ = save(tmp_path, 1, parts)
    weights = folder / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"optimizer\.safetensors"):
        load_optimizer(folder, parts[1])
    record = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(BadInput, match="another format"):
        load_state(folder)
    for text in ("{", "[]", '{"format": 1}', json.dumps(record | {"pages": 3})):
        (folder / "state.json").write_text(text)
        with pytest.raises(BadInput, match="cannot be read"):
            load_state(folder)


def test_another_drafters_state_is_refused(tmp_path, parts, config_maker):
    folder, _ = save(tmp_path, 1, parts)
    other = Drafter(config_maker(num_hidden_layers=3)).initialise(0)
    with pytest.raises(BadInput, match="does not fit"):
        load_optimizer(folder, Optimizer(other, weight_decay=0.0, betas=(0.9, 0.95)))


def test_learned_options_are_compared(tmp_path, parts):
    check_learned({"lr": 1.0}, {"lr": 1.0}, tmp_path)
    with pytest.raises(BadInput, match=r"--block-size: 8 given, but the run in .* started with 16"):
        check_learned({"block_size": 16}, {"block_size": 8}, tmp_path)
    for stored, given in (({}, {"ema": 0.9}), ({"ema": 0.9}, {})):
        with pytest.raises(BadInput, match="--ema: "):
            check_learned(stored, given, tmp_path)
    # The drafter to go on from is one that is there.
    for step in (9, 10):
        folder, _ = save(tmp_path, step, parts)
    with pytest.raises(BadInput, match=r"or --init-from .*/checkpoints/step-10$"):
        check_learned({"lr": 1.0}, {"lr": 2.0}, tmp_path)
    publish(folder, tmp_path)
    with pytest.raises(BadInput, match=r"or --init-from .*/draft$"):
        check_learned({"lr": 1.0}, {"lr": 2.0}, tmp_path)
