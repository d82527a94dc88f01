"""Where the time goes: operators, the CPU backend's loops among them."""

from benchmarks.cpu_operators import ALL, REST, milliseconds, table


def test_times_name_the_loops() -> None:
    found = milliseconds("vil_tiny", "inference", 64, 1, 1)
    assert {"loops::scan_blocks", "loops::conv_blocks"} <= set(found)
    assert list(found)[-1] == REST
    assert min(found.values()) > 0


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
