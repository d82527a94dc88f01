"""Means, deviations, and differences seed by seed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import permutation_test, ttest_1samp

CHOICE_SEED = 100
"""Runs with this seed or a higher one chose learning rates, and are not reported."""
SIGN_FLIP_SEEDS = 8
"""Minimum number of pairs with which the sign-flip test can reach the levels that many questions need."""
_DRAWS = 19_999
_EXACT = 14  # numbers; their 2**14 sign patterns are fewer than the draws


def spread(numbers: Sequence[float], digits: int) -> str:
    """Return the mean ± the sample standard deviation as text, or the mean alone if all are equal."""
    mean = f"{statistics.fmean(numbers):,.{digits}f}"
    return mean if len(set(numbers)) == 1 else f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


@dataclass(frozen=True)
class Difference:
    """The mean difference of runs with equal seeds, its 95 % interval and its p."""

    mean: float
    low: float
    """Lower end of the 95 % interval by the t distribution."""
    high: float
    p: float
    """Two-sided: by ``sign_flip`` with ``SIGN_FLIP_SEEDS`` pairs or more, else by the paired t-test."""
    at_most: bool
    """Whether p is the smallest that the draws of ``sign_flip`` can show; the true p may be smaller."""

    @property
    def p_text(self) -> str:
        """Return p as text."""
        return f"{'≤ ' if self.at_most else ''}{self.p:.2g}"


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two groups of runs seed by seed.

    Args:
        first: One number for each seed, at least 2.
        second: Numbers of the other runs, with seeds in the same order.
    """
    pairs = [a - b for a, b in zip(first, second, strict=True)]
    found = ttest_1samp(pairs, 0)
    interval = found.confidence_interval(0.95)
    p = sign_flip(pairs) if len(pairs) >= SIGN_FLIP_SEEDS else float(found.pvalue)
    at_most = len(pairs) > _EXACT and p <= 2 / (_DRAWS + 1)
    return Difference(statistics.fmean(pairs), float(interval.low), float(interval.high), p, at_most)


def sign_flip(pairs: Sequence[float]) -> float:
    """Return the probability that random signs of the numbers give a mean at least as far from 0.

    It is exact for up to ``_EXACT`` numbers. For more, draws with a fixed seed estimate it.
    """
    found = permutation_test(
        (pairs, [0.0] * len(pairs)),
        lambda a, b, axis: (a - b).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_DRAWS,
        rng=0,
    )
    return float(found.pvalue)
