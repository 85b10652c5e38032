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
        ("length", "is no condition"),
        ("3", "is no condition"),
        ('length < "a"', "compares a text with a number"),
        ("source is 3", "comparisons are"),
        # numpy has an answer to each of these, or an error of its own.
        ('"test" in source', "a list stands behind in"),
        ('source in "test"', "a list stands behind in"),
        ("length in 5", "a list stands behind in"),
        ("length == [40, 70]", "a list stands behind in"),
        ("length in [[40]]", "is not understood"),
        ("length in [held_out]", "is not understood"),
        ('length == "40"', "compares a text with a number"),
        ("source != 5", "compares a text with a number"),
        ('length in [40, "a"]', "compares a text with a number"),
        ("1 < 2", "has no field"),
        ('not "a"', "is no condition"),
        ('id == "a" and "b"', "is no condition"),
        ("length and held_out", "is no condition"),
    ],
)
def test_bad_condition(corpus_maker, condition, message):
    with pytest.raises(BadInput, match=message):
        select(corpus_maker().plan, condition)
