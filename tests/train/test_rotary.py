"""Rotary positions scaled to long contexts: read, written, and turned into frequencies."""

import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_offline.common.errors import BadInput
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.rotary import frequencies

# As z-lab's drafters for gpt-oss have it.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS = {"none": None, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3}
KINDS |= {"yarn": YARN, "yarn, rounded": YARN | {"truncate": True, "mscale": 1.0}}
POSITIONS = torch.tensor([0, 1, 77, 4095, 40_000])


@pytest.fixture
def released(config_maker):
    """A config.json as files of transformers 4 have it: scaling beside the base, said once."""

    def make(scaling: dict | None) -> dict:
        config = config_maker(head_dim=64, rope_theta=150_000.0).to_json()
        del config["rope_parameters"]
        return config | {"rope_scaling": scaling}

    return make


@pytest.mark.parametrize("scaling", KINDS.values(), ids=KINDS)
def test_angles_are_those_of_transformers(released, scaling):
    drafter = Drafter(DrafterConfig.from_json(released(scaling)))
    written = drafter.config.to_json()
    assert DrafterConfig.from_json(written) == drafter.config
    assert written["rope_scaling"] == scaling
    assert written["rope_parameters"] == {
        "rope_type": "default", "rope_theta": 150_000.0, **(scaling or {})
    }  # fmt: skip
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**written))
    cos, sin = theirs(torch.zeros(1), POSITIONS[None])
    wanted = torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=1)
    torch.testing.assert_close(drafter.places(POSITIONS), wanted, rtol=0, atol=1e-7)


def test_yarn_by_its_formula():
    """Peng et al. 2023: slow pairs are stretched, fast ones are not, with a ramp between."""
    got, scale = frequencies(64, 150_000.0, tuple(sorted(YARN.items())), torch.device("cpu"))
    plain = [150_000.0 ** (-2 * i / 64) for i in range(32)]
    pair_at = [
        64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150_000.0)) for turns in (32, 1)
    ]
    stretched = [min(max((i - pair_at[0]) / (pair_at[1] - pair_at[0]), 0), 1) for i in range(32)]
    wanted = [f * (1 - s) + f / 32 * s for f, s in zip(plain, stretched, strict=True)]
    torch.testing.assert_close(got.double(), torch.tensor(wanted).double(), rtol=1e-5, atol=0)
    assert stretched[0] == 0
    assert stretched[-1] == 1
    assert scale == pytest.approx(0.1 * math.log(32) + 1)


def test_angles_stay_in_float32(released):
    """Whatever a drafter is cast to, and whoever asks first: frequencies are no part of it."""
    frequencies.cache_clear()
    drafter = Drafter(DrafterConfig.from_json(released(YARN)))
    with torch.inference_mode():
        first = drafter.bfloat16().places(POSITIONS).clone()
    again = drafter.double().places(POSITIONS)
    assert first.dtype == again.dtype == torch.float32
    assert torch.equal(first, again)
    assert not again.is_inference()
    assert not any("freq" in name for name in drafter.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "linear, llama3, yarn and def"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "lack original_max_position_embedding"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "factor of the drafter's rope: '4' given; a nu"),
        ({"rope_scaling": YARN | {"factor": 0}}, "factor of the drafter's rope: 0 given; a number"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate .*: 1 given; true or false is needed"),
        ({"rope_scaling": YARN | {"finetuned": 1}}, "finetuned given, which yarn has not"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "drop one of them"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "full rotary"),
    ],
    ids=["kind", "missing", "text", "zero", "switch", "unknown", "two", "partial"],
)
def test_scaling_that_is_refused(released, change, words):
    with pytest.raises(BadInput, match=words):
        DrafterConfig.from_json(released(None) | change)
