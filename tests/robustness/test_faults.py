"""Every fault of docs/faults.md, injected: nothing may be lost."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness import faults
from tests.robustness.fault_cases import FAULTS, Fault
from tests.robustness.fault_runs import Laboratory
from tests.robustness.kills_runs import fork_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Images, and processes to train in."""
    with fork_server():
        yield Laboratory(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_lost(fault: Fault, lab: Laboratory) -> None:
    verdict = fault(lab)
    assert verdict.nothing_lost, verdict


def test_every_fault_has_a_row() -> None:
    names = [faults.name_of(fault) for fault in FAULTS]
    assert len(set(names)) == len(names) >= 30
    assert all("\n" not in name for name in names)


def test_the_page_counts_the_points_of_the_disk_sweep() -> None:
    assert re.fullmatch(
        r"\[disk_faults.*has \d{4,} more .* 0 of them with a loss\.\n", faults.of_disks()
    )
    assert (ROOT / "docs" / "faults.md").read_text().endswith(f"\n\n{faults.of_disks()}")


@pytest.mark.slow
def test_a_loss_is_seen(lab: Laboratory) -> None:
    """A run that ends with other weights is not called equal."""
    other = lab.run(None, "--run.seed", "1")
    verdict = lab.same(other, "exit 0")
    assert not verdict.nothing_lost
    assert "state_dict" in verdict.lost
