"""The learning rate over a run."""

import math

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.train.schedule import SCHEDULES, Every, lr_factor, parse_every


def factors(num_steps: int, *, warmup: float = 0.04, kind: str = "cosine") -> list[float]:
    return [
        lr_factor(k / num_steps, (k + 1) / num_steps, warmup_frac=warmup, kind=kind)
        for k in range(num_steps)
    ]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warm_up_is_linear(kind):
    assert factors(100, kind=kind)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine():
    # As transformers has it: from the begin of the step, after warm-up.
    expected = [0.5 * (1 + math.cos(math.pi * (k - 4) / 96)) for k in range(4, 100)]
    assert factors(100)[4:] == pytest.approx(expected)


def test_wsd_is_flat_and_then_falls():
    given = factors(100, kind="wsd")
    assert given[4:81] == pytest.approx([1.0] * 77)
    assert given[80:] == pytest.approx([k / 20 for k in range(20, 0, -1)])


@pytest.mark.parametrize("warmup", [0.81, 0.9, 0.99, 1.0])
def test_wsd_falls_from_where_a_long_warm_up_ends(warmup):
    given = factors(1000, warmup=warmup, kind="wsd")
    top = given.index(max(given))
    assert given[top] == pytest.approx(1.0, abs=0.002)
    assert given[:top] == sorted(given[:top])
    assert given[top:] == sorted(given[top:], reverse=True)


def test_constant():
    assert factors(3, warmup=0.0, kind="constant") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5, 1.0])
def test_every_step_learns(kind, warmup):
    for num_steps in (1, 2, 7, 300):
        assert min(factors(num_steps, warmup=warmup, kind=kind)) > 0.0
    assert factors(1, warmup=warmup, kind=kind) == [1.0]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_beyond_the_end_stays_in_range(kind):
    for warmup in (0.0, 1.0):
        for progress in (0.0, 1e-9, 1.0, 1.5):
            assert 0.0 <= lr_factor(progress, progress, warmup_frac=warmup, kind=kind) <= 1.0


def test_intervals():
    assert parse_every("500") == Every(500)
    assert parse_every("0.5m") == Every(None, 30.0)
    for text in ("0", "0m", "1.5", "m", "10 m", "-3", "1h"):
        with pytest.raises(BadInput, match=f"--checkpoint-every {text} is no interval"):
            parse_every(text)
