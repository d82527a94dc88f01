"""The documentation site builds, and no link is dead."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.pages import ROOT


@pytest.mark.ci
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Sphinx warns of links without a target, and of pages that no other page links to."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="docs/training.html"' not in front
    assert 'href="training.html"' in front
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in (
        "vil.load",
        "vil.param_groups",
        "vil.kernels.ops.longhorn_scan",
        "vil.VisionLonghorn.forward_features",
    ):
        assert f'id="{name}"' in reference
    assert "Values, (B, L, D), float64" in reference
