"""Tables of docs/records.md equal their records, and statistics agree with hand calculations."""

import pytest

from lab.experiments import tables
from lab.experiments.statistics import difference, sign_flip, spread


def test_tables_of_the_page_are_what_their_commands_print() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- python -m lab.experiments.tables") == len(tables.BLOCK.findall(page))
    assert tables.rewrite(page) == page, "run python -m lab.experiments.tables --write"


def test_sign_flips_by_hand() -> None:
    """Two of 16 sign patterns of four numbers are as far from 0; a zero takes either sign."""
    assert sign_flip([1.0, 2, 3, 4]) == pytest.approx(2 / 16)
    assert sign_flip([1.0, 2, 3, 0]) == pytest.approx(4 / 16)
    assert sign_flip([0.0, 0]) == 1.0
    assert sign_flip([1.0] * 30) == sign_flip([1.0] * 30) == 1e-4


def test_difference_by_hand() -> None:
    """Mean 2, standard error 1 / sqrt(3), t 4.303 at 95 % with 2 degrees of freedom; t = 3.464 has p 0.0742."""
    few = difference([1.0, 3, 5], [0.0, 1, 2])
    assert few.mean == 2
    assert (few.low, few.high, few.p) == pytest.approx((2 - 2.484, 2 + 2.484, 0.0742), abs=1e-3)
    numbers = [float(i) for i in range(1, 9)]
    assert difference(numbers, [0.0] * 8).p == pytest.approx(2 / 2**8)
    assert spread([1.0, 3.0], 2) == "2.00 ± 1.41"
