"""Conditions on samples."""

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.common.where import select


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("length < 65", [1, 0, 1, 1, 0, 1]),
        ("length >= 64 and not held_out == 1", [0, 1, 0, 1, 1, 0]),
        ('source == "test" or length == 1', [1] * 6),
        ('source != "test"', [0] * 6),
        ("30 < length <= 64", [1, 0, 0, 1, 0, 1]),
        ("length in [25, 90]", [0, 0, 1, 0, 1, 0]),
        ('id not in ("test:0", "test:5")', [0, 1, 1, 1, 1, 0]),
        ("held_out == True", [0, 0, 0, 0, 0, 1]),
        ("(supervised > 50 or length < 30) and length < 80", [0, 1, 1, 1, 0, 0]),
    ],
)
def test_select(corpus_maker, condition, expected):
    assert select(corpus_maker().plan, condition).astype(int).tolist() == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("length <", "invalid syntax"),
        ("size < 3", "there is no field size"),
        ("__import__('os')", "is not understood"),
        ("length + 1 > 3", "is not understood"),
        ("length", "it is no condition"),
        ("3", "it is no condition"),
        ('length < "a"', "compares a text with a number"),
        ("source is 3", "comparisons are"),
    ],
)
def test_bad_condition(corpus_maker, condition, message):
    with pytest.raises(BadInput, match=message):
        select(corpus_maker().plan, condition)
