"""The rooms (layers) of the repository: which room may import which, and no import cycles."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From bottom to top: a room imports only itself and the rooms before it.
ROOMS = (
    "vil.kernels",
    "vil",
    "vil.weights",
    "vil.training",
    "scripts",
    "examples",
    "downstream",
    "lab.benchmarks",
    "lab.experiments",
    "lab",
    "tests",
)
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
BACKENDS = ("vil.kernels.cpu", "vil.kernels.triton")


def name_of(path: Path) -> str:
    """Return the module name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    name_of(path): path
    for folder in (
        "vil",
        "examples",
        "downstream",
        "lab",
        "tests",
    )
    for path in (ROOT / folder).rglob("*.py")
} | {path.stem: path for path in ROOT.glob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere in it; the caller keeps this repository's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module


IMPORTS = {name: {n for n in imported(path) if n in FILES} for name, path in FILES.items()}


def room_of(name: str) -> str:
    """Return the innermost room that a file is in."""
    if name in SCRIPTS:
        return "scripts"
    if name == "vil":  # its __init__ names what all rooms but the trainer's offer
        return "vil.weights"
    return max((r for r in ROOMS if f"{name}.".startswith(f"{r}.")), key=len)


def test_every_file_is_found() -> None:
    assert {"vil.kernels.ops", "vil.kernels.triton.backend", "train_imagenet"} <= set(IMPORTS)
    assert "vil.kernels.reference" in IMPORTS["vil.kernels.ops"]
    assert "vil.training.loader" in IMPORTS["vil.training.train"]
    assert {room_of(name) for name in IMPORTS} == set(ROOMS)


def test_nothing_imports_upwards() -> None:
    floor = {name: ROOMS.index(room_of(name)) for name in IMPORTS}
    for name, others in IMPORTS.items():
        # Whoever imports a file of vil also runs vil/__init__.py.
        assert not [other for other in others - {"vil"} if floor[other] > floor[name]], name


def test_there_is_no_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_knows_no_other_and_is_chosen_in_one_place(backend: str) -> None:
    shared = ("interface", "plan", "reference", "workspace")
    allowed = (backend, *(f"vil.kernels.{name}" for name in shared))
    for name, others in IMPORTS.items():
        if name.startswith(backend):
            assert all(n.startswith(allowed) for n in others), name
        elif name != "vil.kernels.backends" and room_of(name) == "vil.kernels":
            assert not any(n.startswith(backend) for n in others), name
