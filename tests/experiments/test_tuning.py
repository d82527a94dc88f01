"""Learning rates: as many trials for all, and nobody's choice at an edge."""

import math

import pytest

from experiments.tuning import MORE, at_edge, best_rate, missing_trials, next_rate

GRID = (1.0, 2.0, 4.0)


def tuned(optima: dict[str, float]) -> dict[str, dict[float, tuple[float]]]:
    """Tune contestants whose score grows with the distance to an optimum."""
    scores: dict[str, dict[float, tuple[float]]] = {name: {} for name in optima}
    while missing := missing_trials(scores, GRID):
        for name, rates in missing.items():
            for rate in rates:
                assert rate not in scores[name]
                scores[name][rate] = (abs(math.log(rate / optima[name])),)
    return scores


def test_all_try_the_grid_and_no_more_where_all_are_inside() -> None:
    scores = tuned({"a": 2.0, "b": 2.1})
    assert [sorted(own) for own in scores.values()] == [[1, 2, 4], [1, 2, 4]]


def test_who_is_at_an_edge_goes_on_and_the_others_get_as_many_trials() -> None:
    scores = tuned({"low": 0.3, "inside": 2.3, "high": 10.0})
    assert {len(own) for own in scores.values()} == {6}
    assert sorted(scores["low"]) == [0.125, 0.25, 0.5, 1, 2, 4]
    assert sorted(scores["high"]) == [1, 2, 4, 8, 11.3, 16]
    assert best_rate(scores["high"]) == pytest.approx(10, rel=0.2)
    assert best_rate(scores["inside"]) == pytest.approx(2.3, rel=0.1)
    assert not any(at_edge(own) for own in scores.values())


def test_a_round_that_was_interrupted_is_finished() -> None:
    scores = tuned({"a": 2.0, "b": 6.0})
    whole = {name: dict(own) for name, own in scores.items()}
    last = list(scores["a"])[-1]
    del scores["a"][last]
    assert missing_trials(scores, GRID) == {"a": [last]}
    del scores["b"][2.0]
    assert missing_trials(scores, GRID) == {"b": [2.0]}
    assert missing_trials(whole, GRID) == {}


def test_the_first_part_of_a_score_decides_and_then_the_next() -> None:
    scores = {1.0: (3.0, 0.5), 2.0: (3.0, 0.4), 4.0: (9.0, 0.1)}
    assert best_rate(scores) == 2.0
    assert next_rate(scores) == 1.41
    assert best_rate({2.0: (1.0,), 1.0: (1.0,)}) == 1.0


def test_an_edge_without_end_is_named() -> None:
    with pytest.raises(ValueError, match=f"after {len(GRID) + MORE} trials .* endless is"):
        tuned({"endless": 1e9, "fine": 2.0})
