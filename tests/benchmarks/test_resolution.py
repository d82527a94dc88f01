"""Time and memory by resolution: cells in processes of their own, and how rounds are summed up."""

import pytest

from benchmarks.resolution import BASE, in_process, rows_of, table


@pytest.mark.slow
def test_a_cell_has_time_and_memory() -> None:
    figures = in_process(["vil_tiny", "96", "training", "1", "cpu"], threads=1)
    assert figures["seconds"] > 0
    assert figures["bytes"] > 4 * 6_853_096  # gradients at least


@pytest.mark.slow
def test_a_cell_that_fails_says_why() -> None:
    assert (
        "Unknown model (no_such)"
        in in_process(["no_such", "96", "training", "1", "cpu"], 1)["error"]
    )


def test_ratios_are_those_of_a_round() -> None:
    times = ((1.0, 3.0), (2.0, 4.0), (4.0, 4.0))
    rounds = [
        {BASE: {"seconds": a, "bytes": 2**20}, "x": {"seconds": b, "bytes": 2**21}}
        for a, b in times
    ]
    base, other = rows_of(rounds)
    assert (base["seconds"], base["seconds_ratio"]) == (2.0, 1.0)
    assert (other["seconds"], other["seconds_ratio"], other["bytes_ratio"]) == (4.0, 2.0, 2.0)
    line = table([{"size": 512, "pass": "training", **other}]).splitlines()[2]
    assert line == "| 512 | training | x | 4 | 2.00 | 2 | 2.00 |"


def test_a_model_that_failed_in_a_round_has_no_figures() -> None:
    figures = {"seconds": 1.0, "bytes": 1.0}
    _, row = rows_of([{BASE: figures, "x": figures}, {BASE: figures, "x": {"error": "no memory"}}])
    assert (row["seconds"], row["error"]) == (None, "no memory")
    assert "| no memory |" in table([{"size": 512, "pass": "training", **row}])
