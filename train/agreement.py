"""Hold speculative decoding against the target's own greedy decoding, token by token.

In fp32 and fp64 every token must be equal. In a 16-bit dtype the two forwards (one token, or a
block) round differently, and the first difference of a prompt is allowed where the target's two
best logits are closer than that rounding, as measured in the same run where both chose the same.
A fault in the decoder would widen that measurement and excuse itself, so it is held in turn against
a forward over the whole text that shares nothing with the decoder's cache.

Letters: n compared tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The logits that could win are far fewer than these; the tail of the vocabulary only costs memory.
NUM_WATCHED = 64
# The decoder's rounding may exceed that of the whole-text forward by this factor. Both are maxima
# of the same kind of noise over the same positions; a wrong context moves logits far more.
MAX_ROUNDING_RATIO = 4.0


class LogitTrace:
    """The greatest logits of every token of a greedy answer; `watch` fits `decode_greedy`."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._values: list[Tensor] = []

    def watch(self, index: int, logits: Tensor) -> None:
        """Record the logits [1, V] that chose the answer's token `index`."""
        assert index == len(self._ids)
        best = logits[0].float().topk(min(NUM_WATCHED, logits.shape[-1]))
        self._ids.append(best.indices)
        self._values.append(best.values)

    def margin(self, index: int) -> float:
        """Return by how much the best logit beat the second at a token."""
        return float(self._values[index][0] - self._values[index][1])

    def distance(self, index: int, logits: Tensor) -> Tensor:
        """Return max |difference| to other logits [n, V] for tokens index ... index+n-1.

        [m] with m at most n: once two answers part, the other may be the longer one.
        """
        recorded = self._ids[index : index + len(logits)]
        if not recorded:
            return logits.new_empty(0)
        ids = torch.stack(recorded)
        values = torch.stack(self._values[index : index + len(logits)])
        return (logits[: len(ids)].float().gather(-1, ids) - values).abs().amax(dim=-1)

    def control(self, logits: Tensor) -> float:
        """Return the rounding between these logits and those of one forward over the whole text.

        At least the spacing of the dtype at the greatest logit, so that a short answer on which
        the two forwards happen to be equal does not make the next ulp look like a fault.

        Args:
            logits: [n, V] of the whole-text forward, one row for every token of the answer.
        """
        assert len(logits) == len(self._ids)
        spacing = torch.finfo(logits.dtype).eps * max(float(each.max()) for each in self._values)
        return max(float(self.distance(0, logits).max()), spacing)


class Comparison:
    """Compares one speculative answer with its greedy trace; `watch` fits the decoder."""

    def __init__(self, trace: LogitTrace) -> None:
        self._trace = trace
        self._distances: dict[int, float] = {}

    def watch(self, index: int, logits: Tensor) -> None:
        """Record how far the block's logits are from the greedy ones."""
        for offset, distance in enumerate(self._trace.distance(index, logits).tolist()):
            self._distances[index + offset] = distance

    def finish(self, greedy: Sequence[int], speculative: Sequence[int]) -> "PromptAgreement":
        """Return where the two answers part, and the rounding before that place."""
        common = min(len(greedy), len(speculative))
        parted = next((i for i in range(common) if greedy[i] != speculative[i]), common)
        is_equal = len(greedy) == len(speculative) == parted
        # At the parting itself the distance is at least the margin: it must not excuse itself.
        rounding = max((d for i, d in self._distances.items() if i < parted), default=0.0)
        return PromptAgreement(
            num_equal=parted,
            is_equal=is_equal,
            margin=None if is_equal or parted == common else self._trace.margin(parted),
            rounding=rounding,
        )


@dataclass(frozen=True, kw_only=True)
class PromptAgreement:
    """One prompt's comparison."""

    num_equal: int  # tokens before the first difference
    is_equal: bool
    margin: float | None  # between the two best logits at the first difference; None without one
    rounding: float  # greatest logit difference before it


@dataclass(kw_only=True)
class Agreement:
    """All prompts' comparisons, and the verdict."""

    exact: bool  # fp32 and fp64: nothing is excused
    control: float = 0.0  # rounding between the greedy forwards and one over the whole text
    prompts: list[PromptAgreement] = field(default_factory=list)

    @property
    def rounding(self) -> float:
        """Greatest logit difference between the two forwards where both chose the same token."""
        return max((each.rounding for each in self.prompts), default=0.0)

    @property
    def num_tokens_equal(self) -> int:
        """Tokens before the first difference, over all prompts."""
        return sum(each.num_equal for each in self.prompts)

    @property
    def num_different(self) -> int:
        """Prompts whose answers part somewhere."""
        return sum(not each.is_equal for each in self.prompts)

    def excused(self) -> list[PromptAgreement]:
        """Return the prompts that part where the margin is below the rounding."""
        if self.exact:
            return []
        return [
            each
            for each in self.prompts
            if not each.is_equal and each.margin is not None and each.margin < self.rounding
        ]

    def problem(self) -> str | None:
        """Return one sentence on what is wrong, or None."""
        unexcused = self.num_different - len(self.excused())
        if unexcused and self.exact:
            return (
                f"{unexcused} of {len(self.prompts)} answers differ from the target's own greedy "
                "ones, where every token must be equal"
            )
        if unexcused:
            return (
                f"{unexcused} of {len(self.prompts)} answers differ from the target's own greedy "
                f"ones where its two best logits are further apart than the rounding of this run "
                f"({self.rounding:.3g})"
            )
        if not self.exact and self.rounding > MAX_ROUNDING_RATIO * self.control:
            return (
                f"the logits of block and single-token forwards differ by {self.rounding:.3g}, "
                f"a forward over the whole text by {self.control:.3g}: that is not rounding"
            )
        return None
