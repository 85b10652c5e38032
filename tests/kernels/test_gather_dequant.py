"""Gather and dequantise: packed by numpy as the formulas say, decoded by both implementations."""

import numpy as np
import pytest
import torch

from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.quantize import decode_states, encode_states
from dflash_offline.kernels.coded_states import CodedStates, coded_states, hadamard
from dflash_offline.kernels.gather_dequant import gather_dequant, gather_linear

LEVELS = np.float32([-2.15625, -1.34375, -0.7578125, -0.2451171875])
LEVELS = np.concatenate([LEVELS, -LEVELS[::-1]])
CODECS = ["raw", "int8", "int4", "int3"]


def pack_int4(codes):
    """Codes -7 to 7 [..., H] to bytes [..., H / 2], the even channel in the low nibble."""
    stored = (codes + 8).astype(np.uint8)
    return stored[..., 0::2] | stored[..., 1::2] << 4


def pack_int3(codes):
    """Indices 0 to 7 [..., H] to bytes [..., 3 H / 8]: three bit planes for each 64 channels."""
    groups = codes.reshape(*codes.shape[:-1], -1, 64).astype(np.uint8)
    planes = [np.packbits(groups >> p & 1, axis=-1, bitorder="little") for p in range(3)]
    return np.stack(planes, axis=-2).reshape(*codes.shape[:-1], -1)


def coded(codec, *, layers=2, tokens=9, hidden=192, seed=0, exact=True, device="cpu"):
    """Random codes and what they stand for, decoded in float64: (states, [K, T, H])."""
    rng = np.random.default_rng(seed)
    shape = (layers, tokens, hidden)
    if codec == "raw":
        values = torch.from_numpy(rng.normal(size=shape)).bfloat16()
        states = CodedStates(codec="raw", values=values.view(torch.uint16).to(device))
        return states, values.double()
    groups = hidden // 64 if codec == "int4" else 1
    scales = rng.uniform(0.5, 2, size=(layers, tokens, groups)).astype(np.float32)
    mean = rng.normal(size=(layers, hidden)).astype(np.float32)
    gain = (rng.choice([-1, 1], size=(layers, hidden)) * rng.uniform(0.5, 3)).astype(np.float32)
    if codec == "int8":
        codes = rng.integers(-127, 128, size=shape).astype(np.int8)
        packed, y = codes, codes
    elif codec == "int4":
        codes = rng.integers(-7, 8, size=shape)
        packed, y = pack_int4(codes), codes
    else:
        codes = rng.integers(0, 8, size=shape)
        packed, y = pack_int3(codes), LEVELS[codes].reshape(*shape[:2], -1, 64)
        y = y @ hadamard(dtype=torch.float64).numpy()
    y = y.reshape(*shape[:2], groups, -1).astype(np.float64) * scales[..., None]
    x = mean[:, None] + gain[:, None] * y.reshape(shape)
    slot = np.full((layers, tokens), -1, np.int32)
    rows = torch.from_numpy(rng.normal(size=(3, hidden)) * 1000).bfloat16()
    if exact:
        slot[0, 0], slot[-1, 0], slot[0, tokens - 1] = 0, 1, 2
        for k, t in zip(*np.nonzero(slot >= 0), strict=True):
            x[k, t] = rows[slot[k, t]].double().numpy()
    states = CodedStates(
        codec=codec,
        values=torch.from_numpy(packed),
        scales=torch.from_numpy(scales),
        mean=torch.from_numpy(mean),
        gain=torch.from_numpy(gain),
        codebook=torch.from_numpy(LEVELS) if codec == "int3" else None,
        exact_slot=torch.from_numpy(slot) if exact else None,
        exact=rows if exact else None,
    )
    return states.to(device), torch.from_numpy(x)


def token_major(x, rows=None):
    x = x if rows is None else x[:, rows]
    return x.transpose(0, 1).reshape(x.shape[1], -1)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("indexed", [False, True], ids=["all rows", "by index"])
@pytest.mark.parametrize("codec", CODECS)
def test_gather_dequant(codec, indexed, implementation):
    # 320 channels: more than one tile of channels, and the last one not full.
    states, x = coded(codec, hidden=320)
    rows = torch.tensor([8, 0, 0, 5, 3, 8, 1]) if indexed else None
    out = gather_dequant(states, rows, dtype=torch.float32, implementation=implementation)
    # Three float32 roundings of values up to a few hundred.
    torch.testing.assert_close(out.double(), token_major(x, rows), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["one weight", "a weight a layer"])
@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_gather_norm(codec, per_layer, implementation):
    states, x = coded(codec, hidden=320)
    weight = torch.rand((2, 320) if per_layer else 320) + 0.5
    out = gather_dequant(
        states, norm_weight=weight, eps=1e-5, dtype=torch.float32, implementation=implementation
    )
    weight = weight.double().expand(2, -1)[:, None]
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(out.double(), token_major(wanted), rtol=1e-5, atol=1e-5)


def test_strided_rows_and_weights():
    states, x = coded("int8", hidden=64)
    rows = torch.arange(9)[::2]
    for norm_weight in (
        torch.rand(64, 2)[:, 0],
        torch.rand(64, 2).t(),
        torch.rand(64).expand(2, 64),
    ):
        triton, plain = (
            gather_dequant(
                states, rows, norm_weight=norm_weight, dtype=torch.float32, implementation=each
            )
            for each in ("triton", "reference")
        )
        torch.testing.assert_close(triton, plain)
    out = gather_dequant(states, rows, dtype=torch.float32, implementation="triton")
    torch.testing.assert_close(out.double(), token_major(x, rows), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("name", ["values", "scales", "gain", "exact_slot", "exact"])
def test_buffers_with_gaps_are_refused(name):
    states, _ = coded("int8")
    whole = vars(states)[name]
    given = torch.stack([whole, whole], -1)[..., 0]
    with pytest.raises(ValueError, match=rf"states\.{name} must be contiguous"):
        gather_dequant(CodedStates(**(vars(states) | {name: given})), implementation="triton")


@pytest.mark.parametrize("codec", CODECS)
def test_no_rows(codec):
    states, _ = coded(codec)
    for implementation in ("reference", "triton"):
        out = gather_dequant(
            states, torch.zeros(0, dtype=torch.int64), implementation=implementation
        )
        assert out.shape == (0, 384)


def test_no_exact_rows_at_all():
    states, x = coded("int8", exact=False)
    empty = torch.zeros(0, 192, dtype=torch.bfloat16)
    slots = torch.full((2, 9), -1, dtype=torch.int32)
    with_empty = CodedStates(**(vars(states) | {"exact": empty, "exact_slot": slots}))
    for given in (states, with_empty):
        for implementation in ("reference", "triton"):
            out = gather_dequant(given, dtype=torch.float32, implementation=implementation)
            torch.testing.assert_close(out.double(), token_major(x), rtol=1e-6, atol=1e-4)


def stored_and_decoded(codec, *, hidden=192, device="cpu"):
    """What the store's encoder writes, for the kernels, and what its reader makes of it."""
    features = torch.randn(3, 12, hidden, generator=torch.Generator().manual_seed(0)) * 5 + 1
    rows = CalibrationRows()
    rows.add(features.bfloat16())
    calibration = rows.fit(codec)
    is_first = torch.arange(12) % 7 == 0
    encoded = encode_states(features.bfloat16(), None, is_first, calibration)
    expected, _ = decode_states(encoded, calibration)
    states = coded_states(encoded.to(device), calibration.to(device), range(3))
    return states, token_major(expected)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("codec", CODECS[1:])
def test_stores_codes_give_the_same_bits(codec, implementation):
    states, expected = stored_and_decoded(codec)
    # Triton's interpreter cuts bfloat16 off where devices round.
    out = gather_dequant(states, dtype=torch.float32, implementation=implementation)
    assert torch.equal(out.bfloat16(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 320, 5120])
@pytest.mark.parametrize("codec", CODECS[1:])
def test_stores_codes_give_the_same_bits_on_a_gpu(codec, hidden):
    states, expected = stored_and_decoded(codec, hidden=hidden, device="cuda")
    assert torch.equal(gather_dequant(states).cpu(), expected)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_gather_linear(implementation):
    states, x = coded("int4")
    rows = torch.tensor([2, 2, 7])
    weight = torch.randn(5, 384, requires_grad=True)
    out = gather_linear(states, weight, rows, implementation=implementation)
    wanted = token_major(x, rows).float() @ weight.t()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-3)
    upstream = torch.randn_like(out)
    got, want = (torch.autograd.grad(y, weight, upstream)[0] for y in (out, wanted))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_bad_states():
    states, _ = coded("int4")
    good = vars(states)
    for change, message in [
        ({"codec": "int5"}, "must be one of"),
        ({"scales": None}, "needs scales"),
        ({"scales": states.scales[..., :1]}, "scales have shape"),
        ({"values": states.values[..., :-1]}, "codes have shape"),
        ({"codebook": torch.zeros(8)}, "codebook"),
        ({"exact": None}, "together"),
    ]:
        with pytest.raises(ValueError, match=message):
            CodedStates(**(good | change))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_gather_dequant_in_bfloat16(codec):
    """At a width and with rows beyond 2 ** 31 elements from the start of the output."""
    states, x = coded(codec, layers=3, tokens=70, hidden=5120, device="cuda")
    rows = torch.randint(0, 70, (150_000,), device="cuda")
    out = gather_dequant(states, rows)
    wanted = token_major(x.bfloat16())[rows[-64:].cpu()]
    error = (out[-64:].cpu().double() - wanted.double()).abs()
    # One rounding to 8 bits, and a last-bit difference in float32 before it.
    assert (error <= 2**-7 * wanted.double().abs() + 1e-3).all()
    assert out.numel() > 2**31
