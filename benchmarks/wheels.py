"""Carry what a machine without a network lacks: collect wheels here, use them there.

    python -m benchmarks.wheels collect FOLDER
    python -m benchmarks.wheels build FOLDER [--arch 9.0] [--jobs 10]

``collect`` downloads the packages below for Python 3.12 on 64-bit Linux into one folder. ``use`` unpacks,
on the other machine, those that are missing there or older than pyproject.toml asks for into a folder
for PYTHONPATH; nothing is installed, and what the machine has stays as it is. ``build`` makes a wheel of
mamba-ssm's kernel from the source in the folder; it needs nvcc, ninja and wheel, but no GPU, and the
versions of Python and torch that will use it.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MB = 60
MAMBA_SSM = "mamba-ssm==2.3.2.post1"
# Beside torch, torchvision, triton, numpy and scipy, which are too large to carry, and numba, which is
# needed on CPUs only: what the models, the trainer and the tests need. The needs of each are listed by name.
PACKAGES = (
    "timm>=1.0.31",
    "einops",
    "tyro",
    *("docstring-parser", "typeguard", "typing-extensions"),  # of tyro
    "webdataset",
    "braceexpand",  # of webdataset
    "pyyaml",
    "rich",
    *("markdown-it-py", "mdurl", "pygments"),  # of rich
    "safetensors",
    "packaging",
    "pytest",
    *("iniconfig", "pluggy"),  # of pytest
    "pytest-xdist",
    "execnet",  # of pytest-xdist
    "ninja",  # builds mamba-ssm
    "fla-core",
)
REQUIRED = ("timm>=1.0.31",)  # the rest in whichever version there is
_PLATFORMS = tuple(f"manylinux{v}_x86_64" for v in ("_2_28", "_2_27", "_2_24", "_2_17", "2014"))


def canonical(name: str) -> str:
    """Return a package's name as indices spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Wheel:
    """A wheel and what it says of itself."""

    path: Path
    name: str
    version: str
    needs: tuple[str, ...]
    """Requirements that hold without extras."""


def read(path: Path) -> Wheel:
    """Read a wheel's metadata."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        content = BytesParser().parsebytes(archive.read(name))
    needs = [need for need in content.get_all("Requires-Dist") or () if "extra ==" not in need]
    return Wheel(path, canonical(content["Name"]), content["Version"], tuple(needs))


def collect(folder: Path, python: str = "3.12") -> list[Path]:
    """Download all packages, and the source of mamba-ssm's kernel, which is built on the machine.

    Args:
        folder: Destination; what is in it already is not downloaded again.
        python: Version of Python on the other machine.

    Returns:
        The files.

    Raises:
        SystemExit: a download failed, or all are larger than ``LIMIT_MB``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for platform in _PLATFORMS:
        target += ["--platform", platform]
    run = subprocess.run([*pip, *target, *PACKAGES], check=False)
    if run.returncode:
        sys.exit(f"pip could not download all of {', '.join(PACKAGES)}")
    # Its setup.py imports torch to tell what it needs.
    source = ["--no-binary=:all:", "--no-build-isolation", MAMBA_SSM]
    skip = os.environ | {"MAMBA_SKIP_CUDA_BUILD": "TRUE"}
    if subprocess.run([*pip, *source], env=skip, check=False).returncode:
        print(f"{MAMBA_SSM} could not be downloaded: ratios will be to our own Mamba kernel")
    files = sorted(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    size = sum(path.stat().st_size for path in files) / 1e6
    if size > LIMIT_MB:
        sys.exit(f"{folder} holds {size:.0f} MB, more than the {LIMIT_MB} MB that can be carried")
    return files


def installed() -> dict[str, str]:
    """Return the version of every package of this machine by its name."""
    found = importlib.metadata.distributions()
    return {canonical(d.metadata["Name"]): d.version for d in found if d.metadata["Name"]}


def _requirement(text: str) -> Any:
    try:
        from packaging.requirements import Requirement
    except ImportError:  # pip has it always
        from pip._vendor.packaging.requirements import Requirement
    return Requirement(text)


def lacking(wheels: list[Wheel], present: dict[str, str]) -> list[Wheel]:
    """Return the wheels that a machine needs: of packages it has not, or in too old a version.

    Args:
        wheels: What was carried.
        present: Versions by name, of what the machine has.
    """
    required = {canonical(need.name): need for need in map(_requirement, REQUIRED)}

    def serves(name: str) -> bool:
        need = required.get(name, _requirement(name))
        return name in present and need.specifier.contains(present[name], prereleases=True)

    return [wheel for wheel in wheels if not serves(wheel.name)]


def unmet(wheels: list[Wheel], present: dict[str, str]) -> list[str]:
    """Return what wheels need and neither they nor the machine have, as messages."""
    have = present | {wheel.name: wheel.version for wheel in wheels}
    messages = []
    for wheel in wheels:
        if wheel.name == "mamba-ssm":  # only its compiled module is imported, by itself
            continue
        for need in map(_requirement, wheel.needs):
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = have.get(canonical(need.name))
            if version is None or not need.specifier.contains(version, prereleases=True):
                messages.append(f"{wheel.name} {wheel.version} needs {need}, there is {version}")
    return messages


def use(folder: Path, site: Path) -> list[str]:
    """Unpack the wheels that this machine lacks.

    Args:
        folder: As ``collect`` filled it; need not exist.
        site: Receives the packages; replaced if it exists. To be put on PYTHONPATH.

    Returns:
        What was unpacked, as "name version".
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    wheels = [read(path) for path in sorted(folder.glob("*.whl"))] if folder.is_dir() else []
    chosen = lacking(wheels, installed())
    if not chosen:
        return []
    for message in unmet(chosen, installed()):
        print(f"carried wheels: {message}", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    paths = [str(wheel.path) for wheel in chosen]
    subprocess.run([*pip, "--upgrade", "--target", str(site), *paths], check=True)
    return [f"{wheel.name} {wheel.version}" for wheel in chosen]


def build(folder: Path, arch: str, jobs: int) -> None:
    """Make a wheel of mamba-ssm's kernel for one architecture and put it beside its source.

    Args:
        folder: As ``collect`` filled it.
        arch: As in "9.0".
        jobs: Compilers at a time.

    Raises:
        SystemExit: the source is not there, or it cannot be built.
    """
    sources = sorted(folder.glob("mamba_ssm-*.tar.gz"))
    if not sources:
        sys.exit(f"{folder} has no source of mamba-ssm, mamba_ssm-*.tar.gz")
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(sources[-1]) as archive:
            archive.extractall(temporary, filter="data")
        (source,) = Path(temporary).iterdir()
        setup = source / "setup.py"
        setup.write_text(_patched(setup.read_text(), importlib.metadata.version("torch")))
        environment = os.environ | {
            "MAMBA_FORCE_BUILD": "TRUE",  # or it looks for a wheel on the network
            "MAMBA_KEEP_CUDA_BUILD": "TRUE",  # or nothing is built, from this version on
            "TORCH_CUDA_ARCH_LIST": arch,
            "MAX_JOBS": str(jobs),
        }
        pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
        command = [*pip, "--no-build-isolation", "-w", temporary, str(source)]
        if subprocess.run(command, env=environment, check=False).returncode:
            sys.exit(f"{sources[-1].name} could not be built")
        for wheel in Path(temporary).glob("*.whl"):
            shutil.copyfile(wheel, folder / f".{wheel.name}")
            os.replace(folder / f".{wheel.name}", folder / wheel.name)


def _patched(setup: str, torch: str) -> str:
    """Return mamba-ssm's setup.py as it has to be.

    It compiles for nine architectures, whatever TORCH_CUDA_ARCH_LIST says, and in C++17, which the
    headers of torch are not in any more from 2.13 on.
    """
    setup = re.sub(r'^.*append\("-gencode"\).*\n', "", setup, flags=re.M)
    setup = re.sub(r'cc_flag\.append\("arch=.*\)', "pass", setup)
    major, minor = (int(number) for number in torch.split(".")[:2])
    return setup.replace("c++17", "c++20") if (major, minor) >= (2, 13) else setup


def main() -> None:
    """Collect or build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("collect", "build"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="9.0", help="compute capability to build for")
    parser.add_argument("--jobs", type=int, default=10, help="compilers at a time")
    args = parser.parse_args()
    if args.what == "build":
        build(args.folder, args.arch, args.jobs)
        return
    for path in collect(args.folder):
        print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.name}")


if __name__ == "__main__":
    main()
