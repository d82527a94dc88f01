"""Say where a figure was measured: the commit, the device and the versions.

Importing this module does not import torch, so commands that only start other commands start quickly.
"""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def revision() -> str:
    """Return the commit of the checkout, or "unknown"; "-dirty" is added if its files differ.

    Figures do not depend on records, so changed records do not make a checkout dirty. The variable
    VIL_COMMIT takes precedence, for copies that have no history.
    """
    if os.environ.get("VIL_COMMIT"):
        return os.environ["VIL_COMMIT"]
    folder = Path(__file__).parent
    try:
        found = subprocess.run(["git", "describe", "--always"], cwd=folder, capture_output=True, text=True, check=False)
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)*/results/*.json"],
            cwd=folder,
            capture_output=True,
            check=False,
        )
    except OSError:  # no git
        return "unknown"
    if not found.stdout:  # no history
        return "unknown"
    return found.stdout.strip() + ("-dirty" if changed.returncode else "")


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name"))
        return name.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Return the device, the versions and the commit that figures depend on."""
    import timm
    import torch

    import vil

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "vil": vil.__version__,
        "commit": revision(),
    }
