"""Choosing learning rates: the same grid and as many trials for all contestants, and no choice at an edge.

All try the rates of a common grid. As long as the best of anybody is the lowest or the highest that was
tried, all get one trial more: who is at an edge, the rate beyond it; the others, the rate between their
best and the better of its neighbours. A trial is one run for each of some seeds that are not reported,
and its score the mean of theirs.
"""

import math
from collections.abc import Mapping, Sequence

FACTOR = 2.0  # from an edge to the rate beyond it
MORE = 4  # trials at most on top of the grid

Score = tuple[float, ...]  # lower is better; what follows the first decides between equals


def best_rate(scores: Mapping[float, Score]) -> float:
    """Return the rate with the lowest score, of equals the lowest rate."""
    return min(sorted(scores), key=lambda rate: scores[rate])


def at_edge(scores: Mapping[float, Score]) -> bool:
    """Tell whether the best rate is the lowest or the highest that was tried."""
    return best_rate(scores) in (min(scores), max(scores))


def next_rate(scores: Mapping[float, Score]) -> float:
    """Return the rate of a further trial: beyond the edge, or beside a best that is inside."""
    rates, best = sorted(scores), best_rate(scores)
    if at_edge(scores):
        return _round(best / FACTOR if best == rates[0] else best * FACTOR)
    i = rates.index(best)
    beside = min(rates[i - 1], rates[i + 1], key=lambda rate: scores[rate])
    return _round(math.sqrt(best * beside))


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")


def missing_trials(
    scores: Mapping[str, Mapping[float, Score]], grid: Sequence[float]
) -> dict[str, list[float]]:
    """Return the rates that contestants are to try next; none once all are tuned.

    Args:
        scores: Of each contestant's finished trials, by rate.
        grid: Rates that all try.

    Raises:
        ValueError: the best of somebody is at an edge after ``MORE`` trials on top of the grid.
    """
    first = {name: [rate for rate in grid if rate not in own] for name, own in scores.items()}
    if any(first.values()):
        return {name: rates for name, rates in first.items() if rates}
    most = max(len(own) for own in scores.values())
    behind = [name for name, own in scores.items() if len(own) < most]
    if behind:  # within a round
        return {name: [next_rate(scores[name])] for name in behind}
    edges = [name for name, own in scores.items() if at_edge(own)]
    if not edges:
        return {}
    if most == len(grid) + MORE:
        raise ValueError(
            f"after {most} trials the best rate of {', '.join(edges)} is still the lowest or the "
            f"highest tried: begin with another grid than {tuple(grid)}"
        )
    return {name: [next_rate(own)] for name, own in scores.items()}
