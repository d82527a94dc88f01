"""Killed runs resume and end like an undisturbed run; lab/faults/kills.py tests for longer."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.faults.kills import kill_case, left_alone
from lab.faults.runs import CASES, Case, differing, fork_server, make_images
from lab.faults.torchrun import EPOCHS, disturb


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with images while a server runs that processes are forked from."""
    folder = tmp_path_factory.mktemp("kills")
    make_images(folder)
    with fork_server():
        yield folder


@pytest.mark.ci
def test_killed_process_continues(root: Path) -> None:
    """Four kills do not change the result, and neither do data-loading workers."""
    tally = kill_case(root, Case("folder", 0, 1), kills=4, seed=0)
    assert tally.kills == 4
    assert not tally.problems
    assert not differing(tally.reference, left_alone(root, Case("folder", 2, 1)).reference)


@pytest.mark.ci
def test_continues_after_one_of_two_processes_is_killed(root: Path) -> None:
    """The other rank then fails, and both are started again."""
    tally = kill_case(root, Case("wds", 0, 2), kills=2, seed=0)
    assert tally.kills == 2
    assert not tally.problems


@pytest.mark.nightly
@pytest.mark.parametrize("case", [CASES[3], CASES[6], CASES[8]], ids=lambda case: case.slug)
def test_killed_runs_of_other_kinds_continue(root: Path, case: Case) -> None:
    """Cover folders and shards, data-loading workers, and up to four ranks."""
    tally = kill_case(root, case, kills=2, seed=1)
    assert tally.kills == 2
    assert not tally.problems


@pytest.mark.nightly
def test_torchrun_continues(root: Path) -> None:
    """torchrun restarts a run after a worker is killed; after SIGTERM, a new start resumes it."""
    case = Case("wds", 0, 2)
    alone = left_alone(root, case, EPOCHS)
    for kill in (True, False):
        assert disturb(root, case, alone, 0, random.Random(0), kill) == (True, None)
