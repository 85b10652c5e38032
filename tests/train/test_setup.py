"""What a run refuses before anything is written, and what it warns of."""

import json

import pytest
import torch

from dflash_offline.common.errors import BadInput
from dflash_offline.train.cli import main
from dflash_offline.train.distributed import World
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export import load_drafter_config, save_drafter
from dflash_offline.train.loop import train
from dflash_offline.train.setup import prepare
from dflash_offline.train.start import start


def test_an_unfinished_store_asks_for_partial(config, corpus_maker, tmp_path):
    corpus = corpus_maker()
    with corpus.open(tmp_path / "store") as store:
        corpus.commit(store, [0])
    with pytest.raises(BadInput, match="--partial"):
        train(config(tmp_path / "store", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    train(config(tmp_path / "store", tmp_path / "run", partial=True, num_steps=1))
    # The held-out pack is not there yet, so nothing is evaluated.
    assert '"kind": "eval"' not in (tmp_path / "run/log.jsonl").read_text()


def test_one_warning_when_blocks_are_longer_than_documents(config, corpus_maker, tmp_path):
    corpus_maker(lengths=(12, 14, 11, 13), prompt_tokens=3).write(tmp_path / "store")
    with pytest.warns(UserWarning, match=r"longest has 14 tokens\): \d+% of the labels") as caught:
        train(config(tmp_path / "store", tmp_path / "run", block_size=16, num_steps=1))
    assert len(caught) == 1


REFUSED = {
    "block-size": (["--block-size", "1"], "--block-size"),
    "not-a-store": (["--cache", "{tmp}/nothing"], "nothing"),
    "mask": (["--mask-token-id", "97"], "--mask-token-id 97 is no row"),
    "layer": (["--layers", "2"], "--layers 2"),
    "weights": (["--weight", "1", "--weight", "2"], "--weight: 2 given for 1"),
    "teacher": (["--labels", "teacher"], "--teacher final"),
    "divergence": (["--loss", "kl=0.9,ce=0.1"], "--loss kl=0.9,ce=0.1: "),
    "loss": (["--loss", "decay,mse"], "mse is no part of a loss"),
    "where": (["--where", "length > 5000"], "--where"),
    "no-cuda": (["--device", "cuda"], "no CUDA device"),
    "epochs": (["--num-epochs", "inf"], "--num-epochs"),
    "weight": (["--weight", "inf"], "--weight"),
    "rate": (["--lr", "inf"], "--lr"),
    "out": (["--out", "{tmp}/store/zarr.json/run"], "cannot be made"),
    "read-cache": (["--read-cache", "{tmp}/kept"], "--read-cache"),
    "init": (["--init-from", "{tmp}/nothing"], "no config.json"),
}


def test_a_saved_config_is_read_back(small_store, tmp_path, capsys):
    args = ["--cache", small_store[0], "--out", str(tmp_path / "one"), "--num-epochs", "2"]
    args += ["--draft-layers", "1", "--block-size", "4", "--mask-token-id", "96"]
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    saved = str(tmp_path / "one/config.yaml")
    with pytest.raises(SystemExit) as end:
        main(["--config", saved, "--out", str(tmp_path / "two"), "--num-steps", "1"])
    assert end.value.code == 0
    assert "--num-epochs 2.0 does not" in capsys.readouterr().err
    assert load_drafter_config(tmp_path / "two/draft").block_size == 4


@pytest.mark.parametrize(("extra", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(small_store, tmp_path, capsys, extra, words):
    if "cuda" in extra and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    out = tmp_path / "run"
    args = {
        "--cache": small_store[0],
        "--out": str(out),
        "--draft-layers": "1",
        "--block-size": "4",
        "--mask-token-id": "96",
        "--num-steps": "2",
    }
    given = [each.format(tmp=tmp_path) for each in extra]
    for name in given[::2]:
        args.pop(name, None)
    with pytest.raises(SystemExit) as end:
        main([*(part for pair in args.items() for part in pair), *given])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert not out.exists()


def test_torchrun_says_how_many_processes_there_are(config, small_store, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    options = config(small_store[0], tmp_path / "run", gpus="2")
    with pytest.raises(BadInput, match="--gpus 2 is for a run that starts its own workers"):
        start(options)
    assert not (tmp_path / "run").exists()


def test_a_drafter_of_another_width_is_refused(config, small_store, tmp_path, config_maker):
    options = {"draft_layers": None, "block_size": None, "mask_token_id": None, "num_steps": 1}
    cases = {
        "hidden_size": config_maker(vocab_size=97),
        "vocab_size": config_maker(hidden_size=64),
        "num_target_layers": config_maker(hidden_size=64, vocab_size=97, num_target_layers=9),
        "layer 2": config_maker(hidden_size=64, vocab_size=97, target_layer_ids=(1, 2)),
    }
    for words, shape in cases.items():
        folder = tmp_path / words.replace(" ", "")
        save_drafter(Drafter(shape).initialise(0), folder)
        with pytest.raises(BadInput, match=words):
            train(config(small_store[0], tmp_path / "run", init_from=folder, **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [None, "3,1"])
def test_layers_come_in_the_order_in_which_engines_capture_them(
    config, corpus_maker, tmp_path, given
):
    corpus_maker(layers=(3, 1)).write(tmp_path / "store")
    setup = prepare(config(tmp_path / "store", tmp_path / "run", layers=given), World())
    assert setup.drafter.config.target_layer_ids == (1, 3)


def test_a_files_mask_token_and_layers(config, small_store, tmp_path):
    def shape(file: dict, **options):
        path = tmp_path / "draft.json"
        path.write_text(json.dumps({"dflash_config": file}))
        given = config(small_store[0], tmp_path / "run", draft_config=path, **options)
        return prepare(given, World()).drafter.config

    mask = {"mask_token_id": 5}
    assert shape(mask, mask_token_id=None).mask_token_id == 5
    assert shape(mask, mask_token_id=7).mask_token_id == 7
    with pytest.raises(BadInput, match="mask_token_id of --draft-config 97 is no row of"):
        shape({"mask_token_id": 97}, mask_token_id=None)
    layers = {"target_layer_ids": [1]}
    assert shape(layers).target_layer_ids == (1,)
    assert shape(layers, layers="1").target_layer_ids == (1,)
    with pytest.raises(BadInput, match="--layers 1,3 does not go with --draft-config"):
        shape(layers, layers="1,3")


@pytest.mark.parametrize("anchor_first", [False, True])
def test_a_layout_that_engines_do_not_serve_is_said(
    config, small_store, tmp_path, capsys, anchor_first
):
    file = tmp_path / "draft.json"
    file.write_text(json.dumps({"sample_from_anchor": anchor_first}))
    train(config(small_store[0], tmp_path / "run", draft_config=file, num_steps=1))
    assert ("anchor-first layout" in capsys.readouterr().err) is anchor_first


def test_stores_of_different_targets_are_not_mixed(config, corpus_maker, small_store, tmp_path):
    corpus = corpus_maker(seed=1)
    corpus.identity.target["weights"] = "1" * 8
    corpus.write(tmp_path / "other")
    words = rf"weights is '.*' but --cache {tmp_path}/other, to be mixed with .*, has '11111111'"
    with pytest.raises(BadInput, match=words):
        train(config("", tmp_path / "run", cache=(small_store[0], str(tmp_path / "other"))))


def test_one_store_is_given_once(config, small_store, tmp_path):
    with pytest.raises(BadInput, match="is given twice; give it once, with --weight"):
        train(config("", tmp_path / "run", cache=(small_store[0],) * 2))


def test_no_supervision_at_all(config, corpus_maker, tmp_path):
    corpus = corpus_maker()
    for mask in corpus.masks:
        mask[:] = 0
    corpus.write(tmp_path / "store")
    with pytest.raises(BadInput, match="two supervised tokens"):
        train(config(tmp_path / "store", tmp_path / "run"))
