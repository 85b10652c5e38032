"""The int codecs' arithmetic: against numpy of its own, at its edges, and the page's decoder."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common.calibration import CalibrationRows, calibration_batches
from dflash_offline.common.codec_report import codec_report, relative_error
from dflash_offline.common.codecs import INT_CODECS
from dflash_offline.common.pack_arrays import bits_of
from dflash_offline.common.quantize import (
    LEVELS,
    THRESHOLDS,
    Calibration,
    EncodedStates,
    decode_states,
    encode_states,
    hadamard,
    rotate,
)
from dflash_offline.common.store import Plan, Sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "store-format.md"
f32 = np.float32


def page_decoder() -> dict:
    """The decoder of docs/store-format.md, as it stands there."""
    (code,) = re.findall(r"^```python decode\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict = {}
    exec(code, names)
    return names


def states_of(hidden: int, tokens: int = 90, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers and a final state with unequal, shifted channels, massive rows and odd values."""
    rng = torch.Generator().manual_seed(seed)
    loud = torch.rand(3, 1, hidden, generator=rng) * 4 + 0.1
    x = torch.randn(3, tokens, hidden, generator=rng) * loud
    x += torch.randn(3, 1, hidden, generator=rng) * 3
    x = x.to(torch.bfloat16)
    x[1, 0, 3] = 24960.0  # a massive activation at position 0
    x[0, 70, 5] = -9000.0  # and one elsewhere
    x[:, 20] = 0.0
    x[:, 21] = 1e-40  # subnormal in bfloat16 too
    return x[:2], x[2]


def encoded_states(codec: str, hidden: int, device: str = "cpu"):
    features, final = states_of(hidden)
    is_first = torch.zeros(features.shape[1], dtype=torch.bool)
    is_first[[0, 40]] = True
    rows = CalibrationRows()
    rows.add(features[:, :40], final[:40])
    rows.add(features[:, 40:], final[40:])
    calibration = rows.fit(codec)
    moved = [each.to(device) for each in (features, final, is_first)]
    return features, final, calibration, encode_states(*moved, calibration.to(device))


def numpy_codes(x: np.ndarray, calibration: Calibration, slot: int, codec: str):
    """Integer levels [T, H] and scales [T, G] of rows by the page's words, in numpy."""
    mean, reciprocal = calibration.mean[slot].numpy(), calibration.reciprocal[slot].numpy()
    z = (x - mean) * reciprocal
    if codec == "int3":
        y = numpy_rotate(z)
        v = np.pad(y * y, ((0, 0), (0, (1 << (y.shape[1] - 1).bit_length()) - y.shape[1])))
        while v.shape[1] > 1:
            v = v[:, : v.shape[1] // 2] + v[:, v.shape[1] // 2 :]
        scale = np.maximum(np.sqrt(v[:, 0] / f32(y.shape[1])), f32(2**-64))
        scale = round_bfloat16(scale)
        u = y / scale[:, None]
        above = sum((np.abs(u) > f32(each)).astype(int) for each in THRESHOLDS)
        return np.where(u < 0, 3 - above, 4 + above), scale[:, None]
    largest, size = (7, 64) if codec == "int4" else (127, x.shape[1])
    groups = z.reshape(len(z), -1, size)
    scale = np.maximum(np.abs(groups).max(-1) / f32(largest), f32(2**-64))
    scale = ((scale.view(np.uint32) + 0xFFFF) >> 16 << 16).astype(np.uint32).view(np.float32)
    levels = np.clip(np.rint(groups / scale[..., None]), -largest, largest)
    return levels.reshape(z.shape).astype(int), scale


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def numpy_rotate(z: np.ndarray) -> np.ndarray:
    """The page's matrix in double precision: what the butterflies must come close to."""
    matrix = page_decoder()["hadamard"]().astype(np.float64)
    return (z.reshape(len(z), -1, 64).astype(np.float64) @ matrix).reshape(z.shape).astype(f32)


def levels_of(encoded: EncodedStates, layer: int, codec: str) -> np.ndarray:
    """Integer levels [T, H] of one layer, unpacked as the page says."""
    codes = encoded.codes[layer].numpy()
    if codec == "int8":
        return codes.astype(int)
    if codec == "int4":
        halves = np.stack([codes & 15, codes >> 4], axis=2)
        return halves.reshape(len(codes), -1).astype(int) - 8
    planes = np.unpackbits(codes.reshape(len(codes), -1, 3, 8), axis=3, bitorder="little")
    return (planes.astype(int) << np.arange(3)[:, None]).sum(2).reshape(len(codes), -1)


@pytest.mark.parametrize("hidden", [64, 192, 1088])  # a power of two, not one, and a wide odd one
@pytest.mark.parametrize("codec", INT_CODECS)
def test_encode_states(codec, hidden):
    features, _, calibration, encoded = encoded_states(codec, hidden)
    kept = np.ones((2, features.shape[1]), bool)
    slot, token = encoded.exact_rows[encoded.exact_rows[:, 0] < 2].numpy().T
    kept[slot, token] = False
    assert kept.sum() > 160
    for layer in range(2):
        levels, scales = numpy_codes(features[layer].float().numpy(), calibration, layer, codec)
        got = levels_of(encoded, layer, codec)[kept[layer]]
        difference = np.abs(got - levels[kept[layer]])
        # The definition of int3 rotates in double precision here, so values on a threshold move.
        assert difference.max() <= (codec == "int3")
        assert difference.mean() <= 1e-4
        np.testing.assert_array_equal(
            encoded.scales[layer].float().numpy()[kept[layer]], scales[kept[layer]]
        )


@pytest.mark.parametrize("hidden", [64, 192, 1088])
@pytest.mark.parametrize("codec", INT_CODECS)
def test_decode_states_equals_the_page(codec, hidden):
    features, final, calibration, encoded = encoded_states(codec, hidden)
    decoded, decoded_final = decode_states(encoded, calibration)
    page = page_decoder()
    assert (page["LEVELS"][4:] == np.array(LEVELS, np.float32)).all()
    slots = [
        (codec, encoded.codes[0], encoded.scales[0], decoded[0]),
        (codec, encoded.codes[1], encoded.scales[1], decoded[1]),
        ("int8", encoded.final_codes, encoded.final_scales, decoded_final),
    ]
    for slot, (name, codes, scales, got) in enumerate(slots):
        scale, mean = calibration.scale[slot].numpy(), calibration.mean[slot].numpy()
        expected = page["decode"](name, codes.numpy(), bits_of(scales), scale, mean)
        exact = encoded.exact_rows[:, 0] == slot
        expected[encoded.exact_rows[exact, 1]] = bits_of(encoded.exact[exact])
        np.testing.assert_array_equal(bits_of(got), expected)
    # Rows stored exactly are what they were: position 0 of both samples, and the massive row.
    assert {(0, 0), (1, 0), (2, 0), (0, 40), (1, 40), (2, 40), (0, 70)} <= {
        (int(s), int(t)) for s, t in encoded.exact_rows
    }
    assert torch.equal(decoded[1, 0], features[1, 0])
    assert torch.equal(decoded[0, 70], features[0, 70])
    bound = {"int8": 0.02, "int4": 0.13, "int3": 0.22}[codec]
    assert relative_error(decoded[0], features[0])["median"] < bound
    assert relative_error(decoded_final, final)["median"] < 0.02


def unit_calibration(codec: str, hidden: int) -> Calibration:
    ones = torch.ones(1, hidden)
    return Calibration(
        codec=codec,
        mean=torch.zeros(1, hidden),
        reciprocal=ones,
        scale=ones,
        exact_bound=1e4,
        num_tokens=1,
        num_samples=1,
    )


def encode_row(values: list[float], codec: str, hidden: int = 64) -> EncodedStates:
    x = torch.zeros(1, 1, hidden)
    x[0, 0, : len(values)] = torch.tensor(values)
    first = torch.zeros(1, dtype=torch.bool)
    return encode_states(x.to(torch.bfloat16), None, first, unit_calibration(codec, hidden))


def test_ties_go_to_even():
    codes = encode_row([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0], "int8").codes[0, 0, :8]
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2, -127]
    codes = encode_row([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7.0], "int4").codes[0, 0, :4]
    levels = [half - 8 for c in codes.tolist() for half in (c & 15, c >> 4)]
    assert levels == [7, 0, 2, 2, 0, -2, -2, -7]


def test_zeros_and_thresholds_of_int3():
    """A zero counts as positive, a value on a threshold as below it."""
    u = torch.zeros(64)
    edges = torch.tensor(THRESHOLDS)
    u[:6] = torch.cat((edges, -edges))
    u[6:12] = u[:6] * (1 + 2.0**-9)
    u[63] = torch.tensor(64.0 - float(u.square().sum())).sqrt()
    u[63] = torch.round(u[63] * 512) / 512
    # The row's scale is 1, and its mean carries what bfloat16 could not.
    calibration = replace(unit_calibration("int3", 64), mean=-rotate(u[None]))
    x = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    encoded = encode_states(x, None, torch.zeros(1, dtype=torch.bool), calibration)
    assert encoded.scales.item() == 1.0
    assert torch.equal(rotate(rotate(u[None]))[0, :6], u[:6]), "exact here"
    levels = levels_of(encoded, 0, "int3")[0]
    assert levels[:6].tolist() == [4, 5, 6, 3, 2, 1]
    assert levels[6:12].tolist() == [5, 6, 7, 2, 1, 0]
    assert set(levels[12:63]) == {4}


@pytest.mark.parametrize(("value", "exact"), [(8192.0, []), (8256.0, [[0, 0]])])
def test_row_at_the_bound_is_coded_and_the_next_is_not(value, exact):
    x = torch.full((1, 1, 64), value).to(torch.bfloat16)
    calibration = replace(unit_calibration("int8", 64), exact_bound=8192.0)
    encoded = encode_states(x, None, torch.zeros(1, dtype=torch.bool), calibration)
    assert encoded.exact_rows.tolist() == exact
    assert bool(encoded.codes.any()) == (not exact)


@pytest.mark.parametrize("codec", INT_CODECS)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30, 3e38])
def test_zeros_subnormals_and_huge_values(codec, value):
    encoded = encode_row([value] * 64, codec)
    decoded, _ = decode_states(encoded, unit_calibration(codec, 64))
    assert torch.isfinite(decoded.float()).all()
    if value == 3e38:
        assert encoded.exact_rows.tolist() == [[0, 0]], "beyond the bound"
    expected = torch.full((64,), value).to(torch.bfloat16).float()
    # What is below the least scale, 2^-64, becomes a zero or as small.
    assert (decoded.float() - expected).abs().max() <= (0 if value > 1 else 2.0**-60)


def test_not_a_number_is_kept_as_it_is():
    encoded = encode_row([1.0, float("nan")], "int4")
    assert encoded.exact_rows.tolist() == [[0, 0]]
    assert encoded.exact[0, 1].isnan()
    assert encoded.codes.count_nonzero() == 0


@pytest.mark.parametrize("hidden", [64, 192, 576])
def test_rotate(hidden):
    z = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0))
    y = rotate(z)
    torch.testing.assert_close(y, torch.from_numpy(numpy_rotate(z.numpy())), atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate(y), z, atol=2e-6, rtol=0)
    assert (hadamard().numpy() == page_decoder()["hadamard"]()).all()


def test_levels_rotate_back_exactly():
    """Any order of summation gives the same, so that matrix units may do it."""
    table = np.array([-551, -344, -194, -63, 63, 194, 344, 551])
    assert (table[4:] == np.array(LEVELS) * 256).all()
    assert 64 * table.max() * 8 < 1 << 24, "sums of 64 are integers that fp32 holds"


def test_rows_and_joined():
    _, _, _, encoded = encoded_states("int4", 64)
    parts = [encoded.rows(0, 40), encoded.rows(40, 71), encoded.rows(71, 90)]
    assert parts[1].exact_rows.tolist()[:2] == [[0, 0], [0, 30]]
    joined = EncodedStates.joined(parts)
    for name in ("codes", "scales", "final_codes", "final_scales", "exact_rows", "exact"):
        assert torch.equal(getattr(joined, name), getattr(encoded, name)), name


def test_fit_is_not_moved_by_massive_rows():
    features, final = states_of(64)
    rows = CalibrationRows()
    rows.add(features, final)
    calibration = rows.fit("int8")
    usual = torch.ones(90, dtype=torch.bool)
    usual[[0, 70]] = False
    expected = features[:, usual].double()
    torch.testing.assert_close(calibration.mean[0], expected[0].mean(0).float())
    torch.testing.assert_close(calibration.scale[0], expected[0].std(0, correction=0).float())
    torch.testing.assert_close(calibration.reciprocal, 1.0 / calibration.scale)


def test_signs_of_int3_are_those_of_all_layers_and_of_no_final_state():
    rows = CalibrationRows()
    rows.add(*states_of(64))
    calibration = rows.fit("int3")
    signs = calibration.scale.sign()
    assert torch.equal(signs[0], signs[1])
    assert 16 < (signs[0] < 0).sum() < 48
    assert (signs[2] == 1).all()
    assert torch.equal(calibration.reciprocal.sign(), signs)


@pytest.mark.parametrize("tokens", [1, 2])
def test_fit_of_next_to_nothing(tokens):
    rows = CalibrationRows()
    rows.add(torch.full((2, tokens, 64), 3.0).to(torch.bfloat16))
    calibration = rows.fit("int8")
    assert torch.isfinite(calibration.reciprocal).all()
    assert (calibration.scale > 0).all()


def plan_of(lengths: list[int], sources: list[str], held_out: tuple[int, ...] = ()) -> Plan:
    samples = [
        Sample(
            id=str(i),
            source=source,
            licence="",
            content_hash="",
            length=length,
            supervised=1,
            pack=i,
            start=0,
            held_out=i in held_out,
        )
        for i, (length, source) in enumerate(zip(lengths, sources, strict=True))
    ]
    return Plan(
        samples=samples, batches=[], num_packs=len(samples), num_held_out_packs=0, unit_packs=1
    )


def test_calibration_batches():
    plan = plan_of([50 + i % 7 for i in range(400)], ["a"] * 390 + ["b"] * 10, held_out=(0, 395))
    batches = calibration_batches(plan, 3, batch_tokens=512)
    chosen = [index for batch in batches for index in batch]
    assert len(chosen) == len(set(chosen)) >= 64
    tokens = [plan.samples[i].length for i in chosen]
    assert 4096 <= sum(tokens) < 4096 + 60
    assert {i for i in chosen if i >= 390} == {*range(390, 400)} - {395}, "sources take turns"
    assert 0 not in chosen
    assert all(len(b) * max(plan.samples[i].length for i in b) <= 512 for b in batches)
    assert batches == calibration_batches(plan, 3, batch_tokens=512)
    assert batches != calibration_batches(plan, 4, batch_tokens=512)


def test_calibration_batches_of_a_small_plan():
    plan = plan_of([30, 9000, 20], ["a"] * 3, held_out=(2,))
    assert calibration_batches(plan, 0, batch_tokens=512) == [[0], [1]]
    assert calibration_batches(plan_of([5], ["a"], (0,)), 0, batch_tokens=9) == [[0]]


def test_codec_report():
    features, final = states_of(64)
    rows = CalibrationRows()
    rows.add(features, final)
    head = torch.randn(97, 64, generator=torch.Generator().manual_seed(1))
    report = codec_report(rows, rows.fit("int4"), layers=(1, 3), head=head)
    assert [each["layer"] for each in report["layers"]] == [1, 3]
    assert all(0.03 < each["median"] < min(0.1, each["p99"]) for each in report["layers"])
    assert report["final"]["median"] < 0.02
    assert report["final"]["top1_agreement"] > 0.95
    assert 0 < report["final"]["kl"] < 0.05
    assert 3 / 270 <= report["exact_frac"] < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden", [64, 192, 1088, 4096])
@pytest.mark.parametrize("codec", INT_CODECS)
def test_same_bits_on_a_gpu(codec, hidden):
    _, _, calibration, here = encoded_states(codec, hidden)
    _, _, _, there = encoded_states(codec, hidden, device="cuda")
    there = there.to("cpu")
    for name in ("scales", "final_codes", "final_scales", "exact_rows", "exact"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name
    difference = np.abs(levels_of(here, 0, codec) - levels_of(there, 0, codec))
    assert difference.max() <= (codec == "int3")
    assert difference.mean() <= (1e-4 if codec == "int3" else 0)
    on_gpu = decode_states(here.to("cuda"), calibration.to("cuda"))
    for a, b in zip(decode_states(here, calibration), on_gpu, strict=True):
        assert torch.equal(a, b.cpu())
