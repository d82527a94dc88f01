"""Where the time goes: shares of operators, the CPU backend's loops among them."""

import pytest

from benchmarks.cpu_operators import REST, shares, table


def test_shares_name_the_loops_and_add_up() -> None:
    found = shares("vil_tiny", "inference", 224, 1, 1)
    assert sum(found.values()) == pytest.approx(1)
    assert {"loops::scan_blocks", "loops::conv_blocks"} <= set(found)
    assert list(found)[-1] == REST
    assert min(found[key] for key in found if key != REST) >= 0.01


def test_a_table_has_a_column_for_each_model() -> None:
    rows = [
        {"pass": "inference", "model": "a", "shares": {"aten::mm": 0.75, REST: 0.25}},
        {"pass": "inference", "model": "b", "shares": {"loops::scan": 0.9, REST: 0.1}},
    ]
    assert table(rows).splitlines()[2:] == [
        "| mm | 75 % |  |",
        "| loops::scan |  | 90 % |",
        f"| {REST} | 25 % | 10 % |",
    ]
