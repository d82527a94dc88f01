"""Differences between two groups of runs, and which of them exceed the noise of their seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import permutation_test, ttest_1samp, ttest_ind_from_stats, ttest_rel

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


class Paired(Comparison):
    """A figure of runs that share their seed, and with it what a seed draws, with one of the others."""

    @property
    def by_seed(self) -> list[float]:
        """The first's less the second's figure of each seed."""
        return [a - b for a, b in zip(self.a, self.b, strict=True)]

    @property
    def p(self) -> float:
        """Probability of as large a mean difference where there is none, by the paired t-test."""
        if len(set(self.by_seed)) == 1:  # no spread at all
            return 1.0 if self.by_seed[0] == 0 else 0.0
        return float(ttest_rel(self.a, self.b).pvalue)


class SignFlip(Paired):
    """As ``Paired``, judged by what it would be if the two of a seed could have been exchanged."""

    @property
    def p(self) -> float:
        """Probability of as large a mean difference if either sign were as likely for each seed's.

        Of all 2^n signs for up to 14 seeds, of 19,999 drawn ones beyond.
        """
        found = permutation_test(
            (self.a, self.b),
            lambda a, b, axis: (a - b).mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=19_999,
            rng=0,
        )
        return float(found.pvalue)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the mean difference is with 95 % confidence, by the t distribution."""
        found = ttest_1samp(self.by_seed, 0).confidence_interval(0.95)
        return float(found.low), float(found.high)


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided probability of a difference of means as large, by Welch's t-test.

    Args:
        a: A figure of independent runs, at least 2.
        b: The same of other runs.
    """
    if len(set(a)) == len(set(b)) == 1:  # no spread at all
        return 1.0 if a[0] == b[0] else 0.0
    moments = [(statistics.fmean(x), statistics.stdev(x), len(x)) for x in (a, b)]
    return float(ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False).pvalue)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which differences are significant when they are judged together (Holm, 1979).

    Args:
        p_values: Of all differences that are judged.
        level: Probability of one or more false findings among them.
    """
    significant = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if math.isnan(p_values[i]) or p_values[i] > level / (len(p_values) - rank):
            break
        significant[i] = True
    return significant


def beyond_noise(comparisons: Sequence[Comparison]) -> list[bool]:
    """Return which differences are significant at 5 % when all are judged together (Holm)."""
    return holm([comparison.p for comparison in comparisons])


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
