"""The wheel and source distribution, built, and installed as by a user with only torch and timm."""

import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("twine")

ROOT = Path(__file__).parent.parent
# Packages that a user may lack, and entries that would import this checkout instead of the wheel.
LEFT_OUT = ("numba", "llvmlite", "triton", "vision_longhorn", "__editable__")
USE = """
import pathlib, timm, torch, vil
from vil.kernels import ops
assert pathlib.Path(vil.__file__).is_relative_to({environment!r}), vil.__file__
model = timm.create_model("vil_tiny", img_size=32, num_classes=10).eval()
assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
try:
    with ops.use_backend("cpu"):
        model(torch.randn(2, 3, 32, 32))
except RuntimeError as error:
    assert 'use_backend = "cpu" needs numba: numba is not installed' in str(error), error
    print("refused")
"""
SLOW = "scans run through plain PyTorch, which is slow (numba is not installed)"

pytestmark = pytest.mark.ci


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the source distribution and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel and all installed packages but LEFT_OUT.

    The packages are links into this environment, because installing torch takes minutes.
    """
    folder = tmp_path_factory.mktemp("user") / "environment"
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for source in map(Path, site.getsitepackages()):
        for entry in source.iterdir():
            link = packages / entry.name
            if not entry.name.startswith(LEFT_OUT) and not link.exists():
                link.symlink_to(entry)
    (wheel,) = built.glob("*.whl")
    run(folder / "bin" / "python", "-m", "pip", "install", "--no-deps", wheel, cwd=folder)
    return folder / "bin" / "python"


def test_metadata_is_what_an_index_takes(built: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_both_have_all_modules_and_no_test(built: Path) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vil").rglob("*.py")}
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert modules | {"LICENSE", "README.md", "pyproject.toml"} <= names
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules | {"vil/py.typed"} <= names
    assert all(name.startswith(("vil/", "vision_longhorn-")) for name in names)


def test_a_wheel_works_unpacked_beside_other_projects(built: Path, tmp_path: Path) -> None:
    """In a folder that has another project's files, also of the names that a checkout has."""
    (wheel,) = built.glob("*.whl")
    project = tmp_path / "project"
    (project / "kernels").mkdir(parents=True)
    for name in ("pyproject.toml", "kernels/ops.py", "kernels/__init__.py"):
        (project / name).touch()
    zipfile.ZipFile(wheel).extractall(project)
    code = (
        "import sys; sys.meta_path = [m for m in sys.meta_path if 'editable' not in repr(m)]\n"
        "sys.path.insert(0, sys.argv[1]); import timm, torch, vil\n"
        "model = timm.create_model('vil_tiny', img_size=32, depth=1, embed_dim=32).eval()\n"
        "model(torch.randn(1, 3, 32, 32)); print(vil.kernels.ops.__file__)"
    )
    file = run(sys.executable, "-c", code, project, cwd=tmp_path).strip()
    assert file == f"{project}/vil/kernels/ops.py"


def test_it_works_without_numba_and_triton_and_says_once(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-c", USE.format(environment=str(python.parents[1]))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert done.stderr.count(SLOW) == 1


def test_selfcheck_says_what_is_missing(python: Path, tmp_path: Path) -> None:
    """Without a second backend there is nothing to compare, so the check must fail."""
    command = [str(python), "-m", "vil.selfcheck"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "only the reference backend is available; pip install numba" in done.stdout
