"""What a run did so far: counted by each worker, summed by the first, shown in one line."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PROGRESS_FIELDS = ("packs", "tokens", "tok/s", "padded", "written", "queued", "splits", "bad")


@dataclass(kw_only=True)
class Tally:
    """Counts of one worker, or of all.

    Attributes:
        tokens: rows forwarded, without padding.
        padded_tokens: tokens forwarded, padding included.
        committed_packs, committed_tokens: what exists because of it.
        written_bytes: bytes of state shards.
        seconds: time in the hot loop.
        splits: batches that an out-of-memory error split.
        queued_packs: complete, and not committed yet.
        copying: batches on their way from the device to the packs.
        quarantined: sample index to reason.
    """

    tokens: int = 0
    padded_tokens: int = 0
    committed_packs: int = 0
    committed_tokens: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    splits: int = 0
    queued_packs: int = 0
    copying: int = 0
    quarantined: dict[int, str] = field(default_factory=dict)

    @property
    def padded_frac(self) -> float:
        """Share of forwarded tokens that was padding."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rows forwarded a second."""
        return self.tokens / max(self.seconds, 1e-9)

    def as_record(self) -> dict[str, Any]:
        """Return plain JSON data."""
        derived = {"padded_frac": self.padded_frac, "tokens_per_s": self.tokens_per_s}
        return asdict(self) | derived

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> "Tally":
        """Read what `as_record` returned, after a way through JSON."""
        plain = {name: data[name] for name in cls.__dataclass_fields__}
        bad = {int(index): reason for index, reason in data["quarantined"].items()}
        return cls(**plain | {"quarantined": bad})

    @classmethod
    def total(cls, parts: Iterable["Tally"]) -> "Tally":
        """Return the sum; seconds are those of the slowest."""
        total = cls()
        for part in parts:
            for name, value in asdict(part).items():
                if name == "seconds":
                    total.seconds = max(total.seconds, value)
                elif name == "quarantined":
                    total.quarantined |= value
                else:
                    setattr(total, name, getattr(total, name) + value)
        return total


def progress_values(
    parts: Mapping[int, Tally], *, num_packs: int, done_packs: int, done_tokens: int
) -> dict[str, str]:
    """Return the texts of the progress line.

    Args:
        parts: worker to its tally.
        num_packs: packs of the plan.
        done_packs, done_tokens: that earlier runs committed.
    """
    total = Tally.total(parts.values())
    speed = f"{sum(part.tokens_per_s for part in parts.values()):,.0f}"
    if len(parts) > 1:
        each = " ".join(f"{parts[rank].tokens_per_s:,.0f}" for rank in sorted(parts))
        speed += f" ({each})"
    gigabytes_per_s = total.written_bytes / max(total.seconds, 1e-9) / 1e9
    return {
        "packs": f"{done_packs + total.committed_packs}/{num_packs}",
        "tokens": f"{done_tokens + total.committed_tokens:,}",
        "tok/s": speed,
        "padded": f"{total.padded_frac:.0%}",
        "written": f"{total.written_bytes / 1e6:,.1f} MB, {gigabytes_per_s:.2f} GB/s",
        "queued": f"{total.copying}+{total.queued_packs}",
        "splits": str(total.splits),
        "bad": str(len(total.quarantined)),
    }
