"""The version, what `import vil` loads, and the name `kernels` left free for another package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vil

ROOT = Path(__file__).parent.parent


def test_version_is_the_same_wherever_it_is_said() -> None:
    assert f"\nversion: {vil.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(vil.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.mark.parametrize("folder", ["kernels", "kernels/cpu", "kernels/triton", "tests/kernels"])
def test_kernels_is_no_package_of_its_own(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.ci
def test_import_needs_neither_numba_nor_the_training_packages() -> None:
    """Users of a backbone import torch and timm, but none of the packages below."""
    forbidden = ("numba", "webdataset", "tyro", "rich", "sklearn", "matplotlib")
    code = (
        "import sys, vil, timm, torch; model = timm.create_model('vil_tiny', device='meta');"
        f"print([name for name in {forbidden} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
