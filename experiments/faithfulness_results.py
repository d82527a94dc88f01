"""What ``faithfulness.py`` makes of its runs: areas by map, and which maps are better than brightness alone."""

from collections.abc import Sequence

from experiments.comparisons import Paired, beyond_noise
from experiments.faithfulness import BRIGHTNESS
from experiments.records import Row, spread

SIGNS = {"deletion": -1, "insertion": 1}  # of what is better


def names(rows: Sequence[Row]) -> list[str]:
    """Return the maps in the order of the record."""
    return list(rows[0]["deletion"]) if rows else []


def differences(rows: Sequence[Row]) -> list[Paired]:
    """Compare every map with brightness by each measure, seed by seed."""
    found = []
    for measure in SIGNS:
        base = [row[measure][BRIGHTNESS] for row in rows]
        for name in names(rows):
            if name != BRIGHTNESS:
                own = [row[measure][name] for row in rows]
                found.append(Paired(measure, name, BRIGHTNESS, own, base))
    return found


def better(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return by map the measures by which it is better than brightness beyond the noise."""
    compared = differences(rows)
    found: dict[str, list[str]] = {name: [] for name in names(rows) if name != BRIGHTNESS}
    for pair, exceeds in zip(compared, beyond_noise(compared), strict=True):
        if exceeds and SIGNS[pair.what] * pair.difference > 0:
            found[pair.first].append(pair.what)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the areas by map, mean ± deviation over seeds, and by what each is better than brightness."""
    beats = better(rows)
    lines = ["| map | deletion | insertion | better than brightness in |", "|---|---|---|---|"]
    for name in names(rows):
        cells = [spread([row[measure][name] for row in rows], 3) for measure in SIGNS]
        verdict = "" if name == BRIGHTNESS else " and ".join(beats[name]) or "neither"
        lines.append(f"| {name} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def recommended(groups: Sequence[Sequence[Row]]) -> str:
    """Tell which maps are better than brightness in all groups that were run, and by which measures.

    Args:
        groups: Rows of each, all with one fill.
    """
    won = [better(rows) for rows in groups if rows]
    parts = []
    for measures in (list(SIGNS), *([measure] for measure in SIGNS)):
        kept = [name for name in (won[0] if won else ()) if _common(won, name) == measures]
        named = " and ".join(measures) if len(measures) > 1 else f"{measures[0]} alone"
        parts += [f"{', '.join(f'`{name}`' for name in kept)} in {named}"] if kept else []
    return ", ".join(parts) or "none"


def _common(won: Sequence[dict[str, list[str]]], name: str) -> list[str]:
    """Return the measures by which a map won in all groups."""
    return [measure for measure in SIGNS if all(measure in found[name] for found in won)]
