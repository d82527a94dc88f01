"""What an installed copy contains, and the rule that keeps `kernels` importable for others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vil

ROOT = Path(__file__).parent.parent


def test_every_package_folder_is_listed() -> None:
    """``packages`` is a list by hand, since setuptools cannot find a package it has to rename."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.+)\]", text, re.M).group(1))
    folders = {p.parent for top in ("vil", "kernels") for p in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(listed) == {re.sub(r"^kernels", "vil.kernels", name) for name in names}


def test_type_checkers_are_told_of_the_annotations() -> None:
    """By PEP 561 of a file that an installed copy must have, and that setuptools takes only if listed."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^package-data = \{ "vil" = \["py\.typed"\] \}$', text, re.M)
    assert (ROOT / "vil" / "py.typed").read_bytes() == b""


def test_version_is_the_same_wherever_it_is_said() -> None:
    assert f"\nversion: {vil.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {re.escape(vil.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


@pytest.mark.parametrize("folder", ["kernels", "tests/kernels"])
def test_kernels_is_no_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_needs_neither_numba_nor_the_training_packages() -> None:
    """A backbone's users get no more than torch and timm imported."""
    forbidden = ("numba", "webdataset", "tyro", "rich", "sklearn", "matplotlib")
    code = (
        "import sys, vil, timm, torch; model = timm.create_model('vil_tiny', device='meta');"
        f"print([name for name in {forbidden} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
