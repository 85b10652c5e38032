"""What `--loss` says: how slots are weighed, and what is minimised at each of them.

`decay=7,kl=0.9,ce=0.1` is a list of NAME or NAME=NUMBER: one of `decay` (number: its constant in
slots) and `dpace` (number: its smoothing), and any of the terms `ce`, `kl`, `rkl`, `tv` (number:
its factor, 1 by default). Weights default to `decay`, terms to `ce`. No torch here: the command
line reads it before anything heavy is imported.
"""

from dataclasses import dataclass

from dflash_offline.common.errors import BadInput

DECAY, DPACE = "decay", "dpace"
DPACE_ALPHA = 0.5
TERMS = ("ce", "kl", "rkl", "tv")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Factors of what a slot minimises; p is the drafter's distribution, q the target's."""

    ce: float = 0.0  # -log p(label)
    kl: float = 0.0  # KL(q, p)
    rkl: float = 0.0  # KL(p, q)
    tv: float = 0.0  # half the sum of |p - q|

    @property
    def need_teacher(self) -> bool:
        """Whether the target's distribution takes part."""
        return bool(self.kl or self.rkl or self.tv)


CROSS_ENTROPY = Terms(ce=1.0)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A parsed `--loss`."""

    weights: str = DECAY
    gamma: float | None = None  # of decay, in slots; None: by block size
    alpha: float = DPACE_ALPHA  # of dpace
    terms: Terms = CROSS_ENTROPY


def parse_loss(text: str) -> LossSpec:
    """Return what a `--loss` says.

    Raises:
        BadInput: an unknown or repeated name, or a number out of range.
    """
    given: dict[str, float | None] = {}
    for part in text.split(","):
        name, equals, number = (each.strip() for each in part.partition("="))
        if name not in (DECAY, DPACE, *TERMS):
            raise _bad(text, f"{name or 'nothing'} is no part of a loss")
        if name in given:
            raise _bad(text, f"{name} stands twice")
        given[name] = _number(text, name, number) if equals else None
    if DECAY in given and DPACE in given:
        raise _bad(text, "slots are weighed by decay or by dpace, not both")
    factors = {
        name: 1.0 if number is None else number for name, number in given.items() if name in TERMS
    }
    alpha = given.get(DPACE)
    return LossSpec(
        weights=DPACE if DPACE in given else DECAY,
        gamma=given.get(DECAY),
        alpha=DPACE_ALPHA if alpha is None else alpha,
        terms=Terms(**factors) if factors else CROSS_ENTROPY,
    )


def _number(text: str, name: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise _bad(text, f"{name} is given {number!r}, which is no number") from None
    if name == DPACE and not 0 <= value <= 1:
        raise _bad(text, f"dpace is given {number}, and its smoothing lies in 0 to 1")
    # Written so that NaN fails too.
    if not 0 <= value < float("inf") or (value == 0 and name != DPACE):
        raise _bad(text, f"{name} is given {number}, and its number is above 0")
    return value


def _bad(text: str, why: str) -> BadInput:
    return BadInput(
        f"--loss {text}: {why}; give decay or dpace and any of {', '.join(TERMS)}, such as "
        "decay=7,kl=0.9,ce=0.1"
    )
