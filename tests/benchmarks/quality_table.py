"""Ratios to `raw` over paired seeds, with their intervals, against the project's bars."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

RAW = "raw"
# Least mean ratio to raw that the project asks for; int8's interval must hold 1.
BARS = {"int4": 0.99, "int3": 0.98}
MOST_HALF_WIDTH, LEAST_SEEDS, LEAST_PROMPTS = 0.015, 10, 300
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Ratios to raw of one variant, over the seeds that both have."""

    ratios: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ratios)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean."""
        n = len(self.ratios)
        if n < 2:
            return math.nan
        return T_975[min(n - 1, len(T_975)) - 1] * statistics.stdev(self.ratios) / math.sqrt(n)

    def verdict(self, variant: str) -> str:
        """Return how the bars are met."""
        words = []
        if variant == "int8":
            words.append("holds 1" if abs(1 - self.mean) <= self.half_width else "MISSES 1")
        if bar := BARS.get(variant):
            words.append(f"{'meets' if self.mean >= bar else 'MISSES'} {bar}")
        if not self.half_width <= MOST_HALF_WIDTH:
            words.append(f"WIDER than {100 * MOST_HALF_WIDTH:g} %")
        if len(self.ratios) < LEAST_SEEDS:
            words.append(f"FEWER than {LEAST_SEEDS} seeds")
        return ", ".join(words) or "narrow enough"


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table for each of the two measures."""
    first = records[0]
    few = f" (FEWER than {LEAST_PROMPTS})" if first["prompts"] < LEAST_PROMPTS else ""
    yield f"{first['prompts']} held-out prompts{few}; {first['recipe']}"
    yield f"Mean over all {first['blocks']:,} blocks:"
    yield from _one_measure(records, "acceptance")
    yield "Mean over the blocks at which decoding would stand:"
    yield from _one_measure(records, "walked")


def _one_measure(records: Sequence[dict[str, Any]], name: str) -> Iterator[str]:
    found: dict[str, dict[int, float]] = {}
    for record in records:
        found.setdefault(record["variant"], {})[record["seed"]] = record[name]
    yield "| variant | seeds | acceptance, its deviation | ratio to raw, 95 % interval | bars |"
    yield "|---|---|---|---|---|"
    for variant in sorted(found, key=lambda each: (each != RAW, each)):
        by_seed = found[variant]
        values = list(by_seed.values())
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        cells = [variant, str(len(values)), f"{statistics.fmean(values):.4f}, {spread:.4f}"]
        common = sorted(by_seed.keys() & found.get(RAW, {}).keys())
        if variant == RAW or not common:
            yield f"| {' | '.join(cells)} | | |"
            continue
        paired = Paired(ratios=[by_seed[seed] / found[RAW][seed] for seed in common])
        low, high = paired.mean - paired.half_width, paired.mean + paired.half_width
        cells.append(f"{paired.mean:.4f} ({low:.4f} to {high:.4f}), {len(common)} pairs")
        yield f"| {' | '.join([*cells, paired.verdict(variant)])} |"
