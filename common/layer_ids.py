"""Layer ids: which decoder layers' outputs a drafter reads, as `--layers` spells them."""

import re

from dflash_offline.common.errors import BadInput


def resolve_layers(layers: str, num_layers: int) -> tuple[int, ...]:
    """Return the ids that `auto:K` or a comma-separated list means for `num_layers` layers.

    Id i is the output of decoder layer i. `auto:K` spreads K ids from layer 1 to N-3 (`N // 2` for
    K = 1).

    Raises:
        BadInput: unknown spelling, an id outside 0 … N-2, the last layer, or a repeated id.
    """
    allowed = f"allowed are distinct ids from 0 to {num_layers - 2}, or auto:K"
    automatic = re.fullmatch(r"auto:([0-9]+)", layers.strip())
    if automatic:
        count = int(automatic[1])
        ids = _spread(count, num_layers)
        if count < 1 or len(set(ids)) < count or min(ids) < 0 or max(ids) > num_layers - 2:
            raise BadInput(
                f"--layers {layers} gives no {count} distinct layers of this target's "
                f"{num_layers}; {allowed}; ask for fewer, or list them"
            )
        return ids
    if not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", layers.replace(" ", "")):
        raise BadInput(f"--layers {layers} is not a list of layer ids; {allowed}, as in 1,9,17")
    ids = tuple(int(each) for each in layers.split(","))
    if num_layers - 1 in ids:
        raise BadInput(
            f"--layers {layers} has {num_layers - 1}, the last layer, whose state serving engines "
            f"cannot capture; {allowed}; the final state is kept by --teacher final"
        )
    if outside := [each for each in ids if not 0 <= each <= num_layers - 2]:
        raise BadInput(
            f"--layers {layers} has {outside[0]}, which this target of {num_layers} layers does "
            f"not have; {allowed}"
        )
    if len(set(ids)) < len(ids):
        raise BadInput(f"--layers {layers} repeats an id; {allowed}; name each once")
    return ids


def _spread(count: int, num_layers: int) -> tuple[int, ...]:
    if count <= 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
