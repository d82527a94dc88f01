"""The table of operators."""

from benchmarks.cpu_operators import ALL, REST, table


def test_a_table_is_in_percent_of_the_first_model() -> None:
    rows = [
        {"pass": "inference", "model": "a", "ms": {"aten::mm": 3.0, REST: 1.0}},
        {"pass": "inference", "model": "b", "ms": {"loops::scan": 4.0, REST: 2.0}},
    ]
    assert table(rows).splitlines()[2:] == [
        "| mm | 75 % |  |",
        "| loops::scan |  | 100 % |",
        f"| {REST} | 25 % | 50 % |",
        f"| {ALL} | 100 % | 150 % |",
    ]
