"""Every fault of tools/faults/FAULTS.md, injected: nothing may be lost."""

from collections.abc import Iterator

import pytest

from tools.faults.fault_cases import FAULTS, Fault
from tools.faults.fault_runs import Laboratory
from tools.faults.kills_runs import fork_server

# What takes real processes, two ranks or a disk. The others have a faster twin in tests/training.
IN_CI = (
    "killed_while_saving",
    "killed_within_an_epoch",
    "killed_between_epochs",
    "terminated_with_loader_processes",
    "hanging_loader_processes",
    "hanging_loader_processes_of_one",
    "killed_loader_process",
    "killed_training_process",
    "images_gone_from_one",
    "validation_images_gone_from_one",
    "data_away",
    "no_memory",
    "full_output",
    "little_shared_memory",
    "full_disk_for_a_while",
    "second_run_in_the_folder",
    "disk_without_locks",
    "fewer_shards_than_processes",
)


def is_quick(fault: Fault) -> bool:
    return fault.__name__ in IN_CI


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Images, and processes to train in."""
    with fork_server():
        yield Laboratory(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.ci if is_quick(fault) else pytest.mark.nightly)
        for fault in FAULTS
    ],
    ids=lambda fault: fault.__name__,
)
def test_nothing_is_lost(fault: Fault, lab: Laboratory) -> None:
    verdict = fault(lab)
    assert verdict.nothing_lost, verdict


@pytest.mark.ci
def test_a_loss_is_seen(lab: Laboratory) -> None:
    """A run that ends with other weights is not called equal."""
    other = lab.run(None, "--run.seed", "1")
    verdict = lab.same(other, "exit 0")
    assert not verdict.nothing_lost
    assert "state_dict" in verdict.lost
