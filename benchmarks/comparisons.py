"""Differences between two groups of runs, and which of them exceed the noise of their seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from records import holm, p_value

LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """A figure of two groups of runs that differ in one thing."""

    what: str
    """The figure and where it was measured."""
    first: str
    second: str
    a: Sequence[float]
    """The first's figures, one for each seed."""
    b: Sequence[float]

    @property
    def difference(self) -> float:
        """Mean of the first less mean of the second."""
        return statistics.fmean(self.a) - statistics.fmean(self.b)

    @property
    def p(self) -> float:
        """Probability of as large a difference between equal means, by Welch's t-test."""
        return p_value(self.a, self.b)


def beyond_noise(comparisons: Sequence[Comparison]) -> list[bool]:
    """Return which differences are significant at 5 % when all are judged together (Holm)."""
    return holm([comparison.p for comparison in comparisons], LEVEL)


def table(comparisons: Sequence[Comparison], digits: int = 1, only_found: bool = False) -> str:
    """Return comparisons as a Markdown table.

    Args:
        comparisons: Judged together.
        digits: Of the differences.
        only_found: Leave out what does not exceed the noise, and count it below.
    """
    found = beyond_noise(comparisons)
    lines = ["| what | difference | p | exceeds the noise |", "|---|---|---|---|"]
    for comparison, is_found in zip(comparisons, found, strict=True):
        if only_found and not is_found:
            continue
        names = f"{comparison.what}: {comparison.first} less {comparison.second}"
        verdict = "yes" if is_found else "no"
        lines.append(
            f"| {names} | {comparison.difference:+.{digits}f} | {comparison.p:.2g} | {verdict} |"
        )
    if only_found:
        rest = len(comparisons) - sum(found)
        lines += ["", f"{rest} of {len(comparisons)} differences do not exceed the noise."]
    return "\n".join(lines)
