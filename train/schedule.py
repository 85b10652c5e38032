"""The learning rate over a run, as a factor of its peak: a pure function of progress.

And how often something is done, in steps or in minutes.
"""

import math
import re
from dataclasses import dataclass

from dflash_offline.common.errors import BadInput

COSINE, WSD, CONSTANT = "cosine", "wsd", "constant"
SCHEDULES = (COSINE, WSD, CONSTANT)
# Last part of a warm-up-stable-decay run that decays.
_WSD_DECAY_FRAC = 0.2


def lr_factor(begin: float, end: float, *, warmup_frac: float, kind: str = COSINE) -> float:
    """Return the factor of one step.

    The rate rises with the end of steps and falls with their begin: neither the first step nor the
    last one is lost.

    Args:
        begin, end: shares of the run that are over before the step and after it, in [0, 1].
        warmup_frac: share over which the rate rises linearly from 0.
        kind: `cosine` to 0, `wsd` (flat, then linear to 0 over the last fifth) or `constant`.

    Returns:
        A factor in [0, 1].
    """
    if end < warmup_frac:
        return end / warmup_frac
    if kind == CONSTANT:
        return 1.0
    left = min(1.0, max(0.0, 1.0 - begin))
    falling = max(1e-12, 1.0 - warmup_frac)
    if kind == WSD:
        return min(1.0, left / min(_WSD_DECAY_FRAC, falling))
    assert kind == COSINE, f"schedule is {kind}"
    return 0.5 * (1.0 - math.cos(math.pi * min(1.0, left / falling)))


@dataclass(frozen=True)
class Every:
    """An interval: in steps, or else in seconds."""

    steps: int | None
    seconds: float = math.inf


def parse_every(text: str) -> Every:
    """Return what `--checkpoint-every` says: `500` steps, or `30m` minutes.

    Raises:
        BadInput: neither, or nothing above zero.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", text)
    if found and float(found[1]) > 0:
        if found[2]:
            return Every(None, 60 * float(found[1]))
        if found[1].isdecimal():
            return Every(int(found[1]))
    raise BadInput(
        f"--checkpoint-every {text} is no interval; give a number of steps, such as 500, or of "
        "minutes, such as 30m"
    )
