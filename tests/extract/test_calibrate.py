"""Extraction into int stores: the codes are those of the states that a raw store has."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common.cache import open_cache
from dflash_offline.common.calibration_file import read_codec_report
from dflash_offline.common.pack_arrays import as_bfloat16, bits_of
from dflash_offline.common.quantize import decode_states, encode_states
from dflash_offline.extract.cli import main as extract_command


def extract(target: Path, data: Path, out: Path, codec: str, *more: str) -> None:
    args = ("--target", target, "--data", data, "--out", out, "--codec", codec, *more)
    with pytest.raises(SystemExit) as end:
        extract_command([str(arg) for arg in (*args, "--teacher", "final", "--holdout", "20%")])
    assert not end.value.code


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"Count to {i}."}, answer(i)]}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(i: int) -> dict:
    return {"role": "assistant", "content": " ".join(str(n) for n in range(i + 3))}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4", "int3"])
def test_codes_are_those_of_the_states(tmp_path, tiny_target, data, codec):
    extract(tiny_target, data, tmp_path / "raw", "raw")
    extract(tiny_target, data, tmp_path / "coded", codec, "--pack-tokens", "128")
    raw, coded = open_cache(str(tmp_path / "raw")), open_cache(str(tmp_path / "coded"))
    assert len(coded.packs) > 1
    for sample_id in raw.plan.column("id"):
        states, codes = raw[sample_id], coded[sample_id]
        features, final = as_bfloat16(states.features), as_bfloat16(states.final)
        is_first = torch.arange(features.shape[1]) == 0
        encoded = encode_states(features, final, is_first, coded.calibration)
        expected, expected_final = decode_states(encoded, coded.calibration)
        # Batches differ between the two plans, and with them the rounding of the target's forward.
        close = np.isclose(as_bfloat16(codes.features).float(), expected.float(), atol=0.02)
        assert close.mean() > 0.98
        assert bits_of(expected_final).shape == codes.final.shape
    report = read_codec_report(coded.blobs)
    assert report["codec"] == codec
    assert report["num_samples"] == 12 - len(coded.held_out_samples)
    assert report["final"]["top1_agreement"] > 0.9


@pytest.mark.slow
def test_resumed_codes_are_the_same_bytes(tmp_path, tiny_target, data):
    more = ("--pack-tokens", "128")
    extract(tiny_target, data, tmp_path / "a", "int4", *more)
    store = tmp_path / "a"
    calibration = (store / "calibration/c/0/0/0").read_bytes()
    shards = [path for path in store.glob("*/c/*/**/*") if path.is_file()]
    before = {path: path.read_bytes() for path in shards}
    max((store / "commit").glob("*.json")).unlink()
    for index in store.glob("index-*"):
        index.unlink()
    extract(tiny_target, data, tmp_path / "a", "int4", *more)
    assert {path: path.read_bytes() for path in shards} == before
    assert (store / "calibration/c/0/0/0").read_bytes() == calibration
