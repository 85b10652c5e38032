"""The learning rate over a run."""

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.train.schedule import SCHEDULES, Every, lr_factor, parse_every


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warm_up_is_linear(kind):
    assert lr_factor(0.01, warmup_frac=0.04, kind=kind) == pytest.approx(0.25)
    assert lr_factor(0.04, warmup_frac=0.04, kind=kind) == pytest.approx(1.0)


def test_cosine():
    assert lr_factor(0.52, warmup_frac=0.04) == pytest.approx(0.5)
    assert lr_factor(1.0, warmup_frac=0.04) == pytest.approx(0.0)
    factors = [lr_factor(x / 100, warmup_frac=0.04) for x in range(4, 101)]
    assert factors == sorted(factors, reverse=True)


def test_wsd_is_flat_and_then_falls():
    assert lr_factor(0.79, warmup_frac=0.04, kind="wsd") == 1.0
    assert lr_factor(0.9, warmup_frac=0.04, kind="wsd") == pytest.approx(0.5)
    assert lr_factor(1.0, warmup_frac=0.04, kind="wsd") == 0.0


def test_constant():
    assert lr_factor(1.0, warmup_frac=0.0, kind="constant") == 1.0


@pytest.mark.parametrize("kind", SCHEDULES)
def test_beyond_the_end_stays_in_range(kind):
    for progress in (0.0, 1e-9, 1.5):
        assert 0.0 <= lr_factor(progress, warmup_frac=0.0, kind=kind) <= 1.0
    assert 0.0 <= lr_factor(1.5, warmup_frac=1.0, kind=kind) <= 1.0


def test_intervals():
    assert parse_every("500") == Every(500)
    assert parse_every("0.5m") == Every(None, 30.0)
    for text in ("0", "0m", "1.5", "m", "10 m", "-3", "1h"):
        with pytest.raises(BadInput, match=f"--checkpoint-every {text} is no interval"):
            parse_every(text)
