"""Codecs inside a store: what bytes hold, what is read back, how damage shows, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.calibration import CalibrationRows, calibration_batches
from dflash_offline.common.calibration_file import read_codec_report
from dflash_offline.common.codec_report import codec_report
from dflash_offline.common.codecs import CODEC_NAMES, INT_CODECS, codec_named
from dflash_offline.common.errors import BadInput, DamagedStore
from dflash_offline.common.pack_arrays import as_bfloat16, bits_of
from dflash_offline.common.quantize import decode_states, encode_states
from dflash_offline.common.store import (
    CALIBRATION_KEY,
    CALIBRATION_MANIFEST_KEY,
    CODEC_REPORT_KEY,
    EXACT,
    EXACT_ROWS,
    FEATURES,
    FINAL,
    FINAL_SCALES,
    SCALES,
    Schema,
    shard_key,
)

LENGTHS = (40, 70, 25, 64, 90, 33)


def calibrate(store, corpus) -> None:
    """Fit on the corpus as an extraction does, and write the result."""
    rows = CalibrationRows()
    for batch in calibration_batches(store.plan, 0, batch_tokens=512):
        for index in batch:
            has_final = corpus.schema.teacher == "final"
            final = as_bfloat16(corpus.final[index]) if has_final else None
            rows.add(as_bfloat16(corpus.features[index]), final)
    calibration = rows.fit(corpus.schema.codec)
    store.write_calibration(calibration, codec_report(rows, calibration, layers=(1, 3)))


def int_store(url: Path, corpus) -> str:
    """Write a complete int store of a corpus."""
    with corpus.open(url) as store:
        assert store.needs_calibration
        calibrate(store, corpus)
        corpus.commit(store)
    return str(url)


def reference(corpus, calibration, index: int):
    """Encode and decode one sample on its own."""
    features = as_bfloat16(corpus.features[index])
    final = as_bfloat16(corpus.final[index]) if corpus.schema.teacher == "final" else None
    is_first = torch.arange(features.shape[1]) == 0
    return decode_states(encode_states(features, final, is_first, calibration), calibration)


@pytest.mark.parametrize("teacher", ["none", "final"])
@pytest.mark.parametrize("codec", INT_CODECS)
def test_round_trip(tmp_path, corpus_maker, codec, teacher, monkeypatch):
    # Samples lie across inner chunks.
    monkeypatch.setattr("dflash_offline.common.store._CHUNK_BYTES", 4096)
    corpus = corpus_maker(codec=codec, teacher=teacher, lengths=LENGTHS, pack_tokens=320)
    assert corpus.schema.chunk_tokens == (64 if codec == "int8" else 128)
    url = int_store(tmp_path / "s", corpus)
    cache = open_cache(url)
    for document in cache.read_many(cache.samples):
        features, final = reference(corpus, cache.calibration, document.index)
        np.testing.assert_array_equal(document.features, bits_of(features))
        np.testing.assert_array_equal(document.tokens, corpus.tokens[document.index])
        if final is not None:
            np.testing.assert_array_equal(document.final, bits_of(final))
        np.testing.assert_array_equal(
            document.features[:, 0], corpus.features[document.index][:, 0]
        )
    one = cache.read(3, layers=(3,))
    np.testing.assert_array_equal(one.features[0], cache.read(3).features[1])


@pytest.mark.parametrize("codec", INT_CODECS)
def test_read_codes(tmp_path, corpus_maker, codec):
    corpus = corpus_maker(codec=codec, teacher="final", lengths=LENGTHS, pack_tokens=320)
    cache = open_cache(int_store(tmp_path / "s", corpus))
    for layers in (None, (3,), (3, 1)):
        coded = cache.read_codes([3, 1, 5], layers)
        for document, decoded in zip(coded, cache.read_many([3, 1, 5], layers), strict=True):
            features, final = decode_states(document.states, cache.calibration, document.slots)
            np.testing.assert_array_equal(bits_of(features), decoded.features)
            np.testing.assert_array_equal(bits_of(final), decoded.final)
            assert document.id == decoded.id
            np.testing.assert_array_equal(document.loss_mask, decoded.loss_mask)


def test_encoded_on_the_device_writes_the_same_bytes(tmp_path, corpus_maker):
    corpus = corpus_maker(codec="int4", teacher="final")
    int_store(tmp_path / "a", corpus)
    with corpus.open(tmp_path / "b") as store:
        calibrate(store, corpus)
        for pack in range(corpus.plan.num_packs):
            members = store.pack_samples(pack)
            features = np.concatenate([corpus.features[i] for i in members], axis=1)
            final = np.concatenate([corpus.final[i] for i in members])
            is_first = torch.from_numpy(store.first_rows(pack))
            states = as_bfloat16(features), as_bfloat16(final), is_first
            store.commit_pack(pack, encode_states(*states, store.calibration))
    for name in corpus.schema.state_arrays:
        for pack in range(corpus.plan.num_packs):
            key = shard_key(name, pack)
            assert (tmp_path / "a" / key).read_bytes() == (tmp_path / "b" / key).read_bytes(), key


@pytest.mark.parametrize("codec", INT_CODECS)
@pytest.mark.filterwarnings("ignore")  # zarr-python warns about its own future defaults
def test_other_readers_see_codes(tmp_path, corpus_maker, codec):
    zarr = pytest.importorskip("zarr")
    tensorstore = pytest.importorskip("tensorstore")
    corpus = corpus_maker(codec=codec, teacher="final")
    cache = open_cache(int_store(tmp_path / "s", corpus))
    group = zarr.open_group(tmp_path / "s", mode="r")
    for document in cache.read_codes(cache.samples):
        sample = cache.plan.samples[document.index]
        rows = slice(sample.start, sample.start + sample.length)
        theirs = {
            FEATURES: document.states.codes.numpy(),
            SCALES: bits_of(document.states.scales),
            FINAL: document.states.final_codes.numpy(),
            FINAL_SCALES: bits_of(document.states.final_scales),
        }
        for name, values in theirs.items():
            place = (sample.pack, *[slice(None)] * (values.ndim - 2), rows)
            np.testing.assert_array_equal(group[name][place], values)
            path = f"{tmp_path}/s/{name}/"
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
            opened = tensorstore.open(spec, read=True).result()
            np.testing.assert_array_equal(opened[place].read().result(), values)
        # The index of exact rows, read as the page says.
        index = group[EXACT_ROWS][sample.pack]
        slot, token = np.divmod(index[index > 0] - 1, corpus.schema.pack_tokens)
        first = np.flatnonzero((slot == 1) & (token == sample.start))
        np.testing.assert_array_equal(
            group[EXACT][sample.pack, first[0]], corpus.features[document.index][1, 0]
        )
    np.testing.assert_array_equal(group["calibration"][:, 2], cache.calibration.scale.numpy())


def test_calibration_is_written_once_and_survives(tmp_path, corpus_maker):
    corpus = corpus_maker(codec="int8")
    with corpus.open(tmp_path / "s") as store:
        with pytest.raises(AssertionError, match="write_calibration comes before"):
            corpus.commit(store, [0])
        # What a run that died in the middle leaves.
        (tmp_path / "s" / CALIBRATION_KEY).parent.mkdir(parents=True)
        (tmp_path / "s" / CALIBRATION_KEY).write_bytes(b"half")
    with corpus.open(tmp_path / "s") as store:
        calibrate(store, corpus)
        written = store.calibration
        corpus.commit(store, [0])
        with pytest.raises(AssertionError, match="or the store has it"):
            store.write_calibration(written)
    with corpus.open(tmp_path / "s") as store:
        assert not store.needs_calibration
        assert torch.equal(store.calibration.mean, written.mean)
        corpus.commit(store, [1, 2, 3])
    report = read_codec_report(open_cache(str(tmp_path / "s")).blobs)
    assert report["codec"] == "int8"
    assert [each["layer"] for each in report["layers"]] == [1, 3]


def read_report_and_sample(url: str) -> None:
    cache = open_cache(url)
    read_codec_report(cache.blobs)
    cache.read(0)


@pytest.mark.parametrize("key", [CALIBRATION_KEY, CODEC_REPORT_KEY, CALIBRATION_MANIFEST_KEY])
def test_damaged_calibration_is_found(run, tmp_path, corpus_maker, key):
    corpus = corpus_maker(codec="int4")
    url = int_store(tmp_path / "s", corpus)
    path = tmp_path / "s" / key
    good = path.read_bytes()
    for place in range(0, len(good), max(1, len(good) // 7)):
        bad = bytearray(good)
        bad[place] ^= 4
        path.write_bytes(bad)
        with pytest.raises(DamagedStore, match="calibration/"):
            read_report_and_sample(url)
    path.unlink()
    with pytest.raises(DamagedStore, match="calibration/.* is missing"):
        read_report_and_sample(url)
    assert run("verify", url) == 1


def test_damaged_codes_are_found(tmp_path, corpus_maker):
    corpus = corpus_maker(codec="int3", teacher="final")
    url = int_store(tmp_path / "s", corpus)
    for name in corpus.schema.state_arrays:
        path = tmp_path / "s" / shard_key(name, 0)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[0] ^= 1
        path.write_bytes(bad)
        with pytest.raises(DamagedStore, match=f"pack 0, array {name} "):
            open_cache(url).read(0)
        path.write_bytes(good)


def test_quarantined_sample_of_codes(tmp_path, corpus_maker):
    corpus = corpus_maker(codec="int8")
    with corpus.open(tmp_path / "s") as store:
        calibrate(store, corpus)
        corpus.features[1][:] = 0
        corpus.commit(store, [0], quarantined={1: "layer 3, position 7: not finite"})
        corpus.commit(store, [1, 2, 3])
    cache = open_cache(str(tmp_path / "s"))
    assert 1 not in cache.samples
    assert cache.read(0).features.any()


@pytest.mark.parametrize("codec", ["int8", "int4", "int3"])
def test_rm_leaves_the_codes_of_others(run, tmp_path, corpus_maker, codec):
    corpus = corpus_maker(codec=codec, teacher="final")
    with corpus.open(tmp_path / "s") as store:
        calibrate(store, corpus)
        corpus.commit(store)
    before = open_cache(str(tmp_path / "s")).read_many([0, 2, 3, 4, 5])
    assert run("rm", tmp_path / "s", "--yes", "--where", 'id == "test:1"') == 0
    cache = open_cache(str(tmp_path / "s"))
    assert cache.samples == [0, 2, 3, 4, 5]
    for old, new in zip(before, cache.read_many(cache.samples), strict=True):
        np.testing.assert_array_equal(new.features, old.features)
        np.testing.assert_array_equal(new.final, old.final)
    assert run("verify", "--deep", tmp_path / "s") == 0


def test_appended_packs_use_the_same_calibration(tmp_path, corpus_maker):
    first, second = corpus_maker(codec="int8"), corpus_maker(codec="int8", seed=1, source="b")
    int_store(tmp_path / "s", first)
    with second.open(tmp_path / "s", append=True) as store:
        assert not store.needs_calibration
        second.commit(store, first_pack=4)
    cache = open_cache(str(tmp_path / "s"))
    features, _ = reference(second, cache.calibration, 2)
    np.testing.assert_array_equal(cache.read(8).features, bits_of(features))


def test_unknown_codec_and_width_are_refused():
    arguments = {"layers": (1,), "vocab_size": 9, "pack_tokens": 64}
    with pytest.raises(BadInput, match="--codec zip is not available; choose one of raw, lossless"):
        Schema(hidden=64, codec="zip", **arguments)
    for codec in ("int4", "int3"):
        with pytest.raises(BadInput, match="multiple of 64, but the target's is 72; use int8"):
            Schema(hidden=72, codec=codec, **arguments)
    assert Schema(hidden=72, codec="int8", **arguments).arrays[FEATURES].shard == (1, 64, 72)
    assert CODEC_NAMES == ("raw", "lossless", "int8", "int4", "int3")


def test_lossless_bytes_are_standard_blosc():
    """The frame says zstd, byte shuffle, typesize 2, blocks of 1 MiB, whoever reads it."""
    chunk = np.arange(1 << 20, dtype=np.uint16).reshape(-1, 64)
    stored = codec_named("lossless").encode(chunk)
    flags, typesize = stored[2], stored[3]
    assert (typesize, flags & 1, flags >> 5) == (2, 1, 4), "typesize, byte shuffle, zstd"
    assert int.from_bytes(stored[8:12], "little") == 1 << 20
    out = np.zeros_like(chunk)
    codec_named("lossless").decode(memoryview(stored), out)
    np.testing.assert_array_equal(out, chunk)
    with pytest.raises(ValueError, match="destination buffer too small"):
        codec_named("lossless").decode(memoryview(stored), out[:5])


def test_sizes_of_codes():
    """Bytes a token of a wide target: the share that codes, scales and the final state take."""
    for codec, most in (("int8", 0.501), ("int4", 0.305), ("int3", 0.241)):
        schema = Schema(
            layers=(1, 2, 3, 4, 5),
            hidden=5120,
            vocab_size=9,
            pack_tokens=16384,
            codec=codec,
            teacher="final",
        )
        names = (FEATURES, FINAL, SCALES, FINAL_SCALES)
        specs = [schema.arrays[name] for name in names]
        stored = sum(np.prod(s.shard) * np.dtype(s.dtype).itemsize for s in specs)
        assert stored / schema.pack_tokens / schema.bytes_per_token() < most
    assert json.dumps(schema.array_json(EXACT, 3))


def test_copy_between_codecs(run, tmp_path, corpus_maker, capsys):
    def copied(source: str, name: str, *arguments: str) -> Cache:
        assert run("copy", tmp_path / source, tmp_path / name, *arguments) == 0
        return open_cache(str(tmp_path / name))

    corpus = corpus_maker(codec="raw", teacher="final")
    corpus.write(tmp_path / "raw")
    coded = copied("raw", "int4", "--codec", "int4")
    for index in coded.samples:
        features, final = reference(corpus, coded.calibration, index)
        np.testing.assert_array_equal(coded.read(index).features, bits_of(features))
        np.testing.assert_array_equal(coded.read(index).final, bits_of(final))
    assert read_codec_report(coded.blobs)["final"]["kl"] < 0.1
    assert run("info", tmp_path / "int4") == 0
    shown = capsys.readouterr().out
    assert "Error of int4 on" in shown
    assert all(name in shown for name in ("layer 1", "layer 3", "final state"))
    # The same codec again keeps the codes; none at all keeps the bytes.
    fewer = copied("int4", "fewer", "--layers", "3")
    whole = copied("int4", "whole")
    back = copied("int4", "back", "--codec", "raw")
    for index in coded.samples:
        expected = coded.read(index)
        np.testing.assert_array_equal(fewer.read(index).features[0], expected.features[1])
        np.testing.assert_array_equal(fewer.read(index).final, expected.final)
        for other in (whole, back):
            np.testing.assert_array_equal(other.read(index).features, expected.features)
    assert [each["layer"] for each in read_codec_report(fewer.blobs)["layers"]] == [3]


@pytest.mark.parametrize(
    "scaling", [{}, {"logit_scale": 0.05}, {"text_config": {"final_logit_softcapping": 0.05}}]
)
def test_report_of_a_copy_is_about_the_target_s_own_logits(run, tmp_path, corpus_maker, scaling):
    corpus = corpus_maker(codec="raw", teacher="final")
    config = json.loads(corpus.target_files["config.json"])
    corpus.target_files["config.json"] = json.dumps(config | scaling).encode()
    corpus.write(tmp_path / "raw")
    assert run("copy", tmp_path / "raw", tmp_path / "int4", "--codec", "int4") == 0
    error = read_codec_report(open_cache(str(tmp_path / "int4")).blobs)["final"]["kl"]
    # The divergence goes with the square of the logits.
    assert 0 < error < 1e-5 if scaling else error > 1e-4
