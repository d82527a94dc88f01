"""The documents: no link of theirs is dead, and what they show runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Sphinx warns of links without a target, and of pages that no other leads to."""
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
    assert 'href="training.html"' in front


@pytest.mark.parametrize("page", ["choosing", "maps", "questions"])
def test_the_python_of_a_page_runs(page: str) -> None:
    """From its beginning to its end, as if typed into one session."""
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    session: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), session)
