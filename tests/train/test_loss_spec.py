"""What `--loss` may say."""

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.train.loss_spec import LossSpec, Terms, parse_loss


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "decay": LossSpec(),
        "dpace": LossSpec(weights="dpace"),
        "decay=7.5": LossSpec(gamma=7.5),
        "dpace=0": LossSpec(weights="dpace", alpha=0.0),
        "kl": LossSpec(terms=Terms(kl=1.0)),
        "dpace=0.3, kl=0.9 ,ce=0.1": LossSpec(
            weights="dpace", alpha=0.3, terms=Terms(kl=0.9, ce=0.1)
        ),
        "rkl,tv=2": LossSpec(terms=Terms(rkl=1.0, tv=2.0)),
    }.items(),
)
def test_parse_loss(text, expected):
    assert parse_loss(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "": "nothing is no part",
        "mse": "mse is no part",
        "decay,dpace": "not both",
        "kl,kl=2": "kl stands twice",
        "kl=much": "'much', which is no number",
        "kl=0": "above 0",
        "ce=nan": "above 0",
        "decay=-1": "above 0",
        "dpace=1.5": "lies in 0 to 1",
    }.items(),
)
def test_what_is_refused(text, words):
    with pytest.raises(BadInput, match=f"--loss {text}: .*{words}"):
        parse_loss(text)
