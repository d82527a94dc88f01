"""Fonts and photographs to draw data sets with, from Debian packages of fixed versions.

`fonts` and `photographs` return files, and download them on first use (220 MB). They need apt-get with
the package lists of Debian 12 (`apt-get update`). Nothing is installed: the files are kept in
output/glyphs/sources. No font family and no photograph is in both splits.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFont, __version__

CACHE = Path(__file__).resolve().parent.parent / "output" / "glyphs"
LETTERS = "ABCDEFGHKMNPQRST"
"""The classes."""

PACKAGES = Path(__file__).with_name("glyph_packages.txt").read_text().split()
"""Packages and their versions."""

_NATURE = "Aqua Blinds Dune FreshFlower Garden GreenMeadow LadyBird RainDrops Storm TwoWings Wood"
_WALLPAPERS = "BytheWater ColdRipple ColorfulCups EveningGlow FallenLeaf Grey Kite OneStandsOut"
_BACKGROUNDS = """
Bridge_by_Sander_Klootwijk Dragonfly_by_Bolly Kleiber_by_Lukas_Baubkus Picture_0B_by_freespace
Picture_1A_by_freespace Wine_by_Jakkub_Mede aitzgorri_by_Aitzol_Berasategi free_by_Peter_Nerlich
friends_by_Aitzol_Berasategi greentock_by_Peter_Nerlich life_by_Aitzol_Berasategi
picosdeeuropa_by_Aitzol_Berasategi seeding_by_Clements_Engelhardt sunset_by_Aitzol_Berasategi
"""
PHOTOGRAPHS = {
    **{name: f"backgrounds/{name}.jpg" for name in _BACKGROUNDS.split()},
    **{name: f"backgrounds/mate/nature/{name}.jpg" for name in _NATURE.split()},
    **{name: f"wallpapers/{name}/contents/images/2560x1600.jpg" for name in _WALLPAPERS.split()},
}
"""Files below usr/share. The packages also hold drawings, which are left out."""

_MATCHES = 10  # letters, of 16, that must look more like the mean of their class than of any other
_ALIKE = 0.92  # correlation above which two fonts are one family: clones have other names


class Font(NamedTuple):
    """A font that has all letters."""

    path: Path
    name: str
    """First word of the family's name, so that "Noto Sans" and "Noto Serif" are one family."""
    shapes: np.ndarray
    """Letters scaled to squares, each with mean 0 and norm 1, (letters, pixels)."""


# ---------------------------------------------------------------------------- fonts and photographs


def fonts(training: bool) -> list[Path]:
    """Return the font files of a split, in a folder per family; download them if necessary."""
    return sorted((_sources() / "fonts" / _split(training)).glob("*/*"))


def photographs(training: bool) -> list[Path]:
    """Return the photographs of a split; download them if necessary."""
    return sorted((_sources() / "photographs" / _split(training)).iterdir())


def make_sources(folder: Path, font_files: Sequence[Path], pictures: dict[str, Path]) -> None:
    """Copy usable fonts and photographs into a folder, a quarter of each held out for validation.

    Args:
        folder: New folder, in a folder that exists.
        font_files: Fonts to choose from.
        pictures: Photographs by name.
    """
    found = usable_fonts(font_files)
    families = family_names(found)
    with whole(folder, about_sources()) as part:
        held_out = _held_out(families)
        for number, (font, family) in enumerate(zip(found, families, strict=True)):
            place = part / "fonts" / _split(family not in held_out) / family
            _copy(font.path, place / f"{number:04d}-{font.path.name}")
        held_out = _held_out(pictures)
        for name, path in pictures.items():
            place = part / "photographs" / _split(name not in held_out)
            _copy(path, place / f"{name}{path.suffix}")


def usable_fonts(paths: Sequence[Path]) -> list[Font]:
    """Return the fonts that have all letters, and draw most of them as other fonts do."""
    found = [font for path in paths if (font := _read_font(path))]
    shapes = np.stack([font.shapes for font in found])
    means = shapes.mean(0)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    nearest = (shapes @ means.T).argmax(2)
    right = (nearest == np.arange(len(LETTERS))).sum(1)
    return [font for font, count in zip(found, right, strict=True) if count >= _MATCHES]


def family_names(found: Sequence[Font]) -> list[str]:
    """Return the family of each font; families that share their first word or shapes are merged."""
    names = [font.name for font in found]
    shapes = np.stack([font.shapes.ravel() for font in found]) / len(LETTERS) ** 0.5
    for i, j in np.argwhere(np.triu(shapes @ shapes.T > _ALIKE, 1)):
        if names[i] != names[j]:
            kept, merged = sorted((names[i], names[j]))
            names = [kept if name == merged else name for name in names]
    return names


def _read_font(path: Path) -> Font | None:
    """Read a font; return None if a letter is missing or looks the same as another character."""
    try:
        font = ImageFont.truetype(path, 64, layout_engine=ImageFont.Layout.BASIC)
    except OSError:  # bitmap fonts have no such size
        return None
    absent = "\U0010fffe"  # no font has this character, so it is drawn as .notdef
    drawn = {text: draw_letter(font, text) for text in (*LETTERS, absent)}
    different = {image and (image.size, image.tobytes()) for image in drawn.values()}
    if len(different) < len(drawn) or any(drawn[letter] is None for letter in LETTERS):
        return None
    squares = [drawn[letter].resize((24, 24), Image.Resampling.BOX) for letter in LETTERS]
    shapes = np.stack([np.asarray(image, dtype=np.float64).ravel() for image in squares])
    shapes -= shapes.mean(1, keepdims=True)
    norms = np.linalg.norm(shapes, axis=1, keepdims=True)
    if not norms.all():  # a letter is a full rectangle
        return None
    family = font.getname()[0] or path.stem
    word = re.match(r"\W*([A-Z]*[a-z]*)", family).group(1) or family.split()[0]
    return Font(path, word.lower(), shapes / norms)


def draw_letter(font: ImageFont.FreeTypeFont, text: str) -> Image.Image | None:
    """Draw a character in white on black without margins; return None if nothing is drawn."""
    mask = font.getmask(text, mode="L")
    image = Image.frombytes("L", mask.size, bytes(mask))
    return image.crop(image.getbbox()) if image.getbbox() else None


def _held_out(names: Sequence[str]) -> set[str]:
    """Choose a quarter of the names, by hash, so that the choice looks random and never changes."""
    ordered = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(ordered[: max(len(ordered) // 4, 1)])


def _split(training: bool) -> str:
    return "train" if training else "val"


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)


# ----------------------------------------------------------------------------------------- packages


def _sources() -> Path:
    """Return the folder of fonts and photographs; make it if necessary."""
    folder = CACHE / "sources"
    if not is_made(folder, about_sources()):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            place = Path(name)
            _unpack(place)
            found = [path for path in sorted(place.rglob("*.[ot]tf")) if not path.is_symlink()]
            pictures = {
                name: next(place.glob(f"*/usr/share/{path}")) for name, path in PHOTOGRAPHS.items()
            }
            make_sources(folder, found, pictures)
    return folder


def _unpack(folder: Path) -> None:
    """Download the packages, and unpack each into its own folder.

    Raises:
        SystemExit: apt-get is missing, or does not offer the version of a package.
    """
    if not shutil.which("apt-get"):
        raise SystemExit("apt-get is missing. Run this command on Debian 12.")
    wanted = dict(package.split("=") for package in PACKAGES)
    command = ["apt-cache", "madison", *wanted]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    offered = defaultdict(set)
    for line in listed.splitlines():
        name, version, _ = (field.strip() for field in line.split("|"))
        offered[name].add(version)
    gone = [
        f"{name} {version} (apt offers {', '.join(sorted(offered[name])) or 'no version'})"
        for name, version in wanted.items()
        if version not in offered[name]
    ]
    if gone:
        raise SystemExit(
            f"{len(gone)} packages are not available: {'; '.join(gone)}. "
            f"Run `apt-get update` on Debian 12 and try again."
        )
    # As root, apt would warn that its own user cannot write into this folder.
    command = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        target = folder / package.name.partition("_")[0]
        subprocess.run(["dpkg", "-x", package, target], check=True)


def about_sources() -> dict[str, Any]:
    """Return what the fonts and photographs follow from."""
    return {"packages": PACKAGES, "photographs": list(PHOTOGRAPHS), "pillow": __version__}


@contextmanager
def whole(folder: Path, about: dict[str, Any]) -> Iterator[Path]:
    """Make a folder that is whole or absent: yield a temporary one, and rename it at the end.

    Args:
        folder: New folder, in a folder that exists.
        about: Settings to write into its about.json.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        part = Path(name) / "part"
        part.mkdir()
        yield part
        (part / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        part.rename(folder)


def is_made(folder: Path, about: dict[str, Any]) -> bool:
    """Return whether a folder was made already.

    Args:
        folder: The folder.
        about: Settings that its about.json must have.

    Raises:
        SystemExit: The folder was made with other settings.
    """
    if not folder.exists():
        return False
    if json.loads((folder / "about.json").read_text()) != about:
        raise SystemExit(
            f"{folder} was made with other settings or versions. Delete it and try again."
        )
    return True
