"""The data set of letters, drawn with the fonts that matplotlib brings, on made-up photographs."""

import hashlib
import random
import subprocess
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from experiments import glyph_sources, glyphs

TTF = Path(matplotlib.get_data_path(), "fonts", "ttf")
COUNTS = {"train": 2, "val": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make fonts and photographs as they would be after a download."""
    folder = tmp_path_factory.mktemp("glyphs")
    pictures = {}
    for number in range(4):
        noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        pictures[f"photograph{number}"] = folder / f"{number}.png"
        Image.fromarray(noise).resize((160, 120)).save(folder / f"{number}.png")
    glyph_sources.make_sources(folder / "sources", sorted(TTF.glob("*.ttf")), pictures)
    return folder / "sources"


@pytest.fixture
def cached(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them found in the cache."""
    monkeypatch.setattr(glyph_sources, "CACHE", sources.parent)


def make(folder: Path, **arguments: int) -> Path:
    """Make a small data set."""
    splits = {"train": True, "val": False}
    font_files = {split: glyphs.fonts(training) for split, training in splits.items()}
    pictures = {split: glyphs.photographs(training) for split, training in splits.items()}
    glyphs.make_images(folder, font_files, pictures, COUNTS, **arguments)
    return folder


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.png")):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


@pytest.mark.usefixtures("cached")
def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again = make(tmp_path / "first"), make(tmp_path / "again")
    assert digest(first) == digest(again)
    assert digest(make(tmp_path / "other", seed=1)) != digest(first)


@pytest.mark.usefixtures("cached")
def test_classes_are_balanced(tmp_path: Path) -> None:
    folder = make(tmp_path / "images")
    for split, count in COUNTS.items():
        found = {path.name: len(list(path.glob("*.png"))) for path in (folder / split).iterdir()}
        assert found == dict.fromkeys(glyphs.LETTERS, count)
    assert Image.open(folder / "val" / "A" / "0000.png").size == (48, 48)


@pytest.mark.usefixtures("cached")
def test_splits_share_no_family_and_no_photograph() -> None:
    families = [{path.parent.name for path in glyphs.fonts(training)} for training in (True, False)]
    assert all(families)
    assert not families[0] & families[1]
    pictures = [{path.name for path in glyphs.photographs(training)} for training in (True, False)]
    assert [len(names) for names in pictures] == [3, 1]
    assert not pictures[0] & pictures[1]


@pytest.mark.usefixtures("cached")
def test_letters_are_brighter_than_any_photograph() -> None:
    white = Image.new("RGB", (160, 120), "white")
    for number, path in enumerate([*glyphs.fonts(True), *glyphs.fonts(False)]):
        drawn = np.asarray(glyphs.draw_image(random.Random(number), "B", path, white).convert("L"))
        assert drawn.min() == 255 // 4
        assert 0.02 < (drawn > 255 // 4 + 65).mean() < 0.8, path


def test_fonts_without_the_letters_are_skipped() -> None:
    names = {font.path.name for font in glyph_sources.usable_fonts(sorted(TTF.glob("*.ttf")))}
    assert {"DejaVuSans.ttf", "STIXGeneral.ttf", "cmr10.ttf"} <= names
    assert not names & {"STIXSizOneSymReg.ttf", "cmex10.ttf", "LastResortHE-Regular.ttf"}


def test_families_of_one_name_or_one_shape_are_one() -> None:
    found = glyph_sources.usable_fonts([TTF / f"DejaVuSans{kind}.ttf" for kind in ("", "Mono")])
    clone = found[0]._replace(name="clone")
    other = found[0]._replace(name="other", shapes=-found[0].shapes)
    assert glyph_sources.family_names([*found, clone, other]) == [
        "clone",
        "clone",
        "clone",
        "other",
    ]


@pytest.mark.usefixtures("cached")
def test_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def interrupted(*arguments: object) -> Image.Image:
        drawn.append(arguments)
        if len(drawn) == 20:
            raise KeyboardInterrupt
        return Image.new("RGB", (48, 48))

    monkeypatch.setattr(glyphs, "draw_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "images")
    assert not list(tmp_path.iterdir())


def test_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    with glyph_sources.whole(tmp_path / "images", {"seed": 0}):
        pass
    assert glyph_sources.is_made(tmp_path / "images", {"seed": 0})
    assert not glyph_sources.is_made(tmp_path / "others", {"seed": 0})
    with pytest.raises(SystemExit, match="other settings or versions"):
        glyph_sources.is_made(tmp_path / "images", {"seed": 1})


def test_a_version_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "fonts-a | 2.0-1 | http://debian.example bookworm/main amd64 Packages\n"
    answer = subprocess.CompletedProcess([], 0, stdout=listed)
    monkeypatch.setattr(glyph_sources, "PACKAGES", ["fonts-a=1.0-1", "fonts-b=1:3"])
    monkeypatch.setattr(glyph_sources.shutil, "which", lambda name: name)
    monkeypatch.setattr(glyph_sources.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(
        SystemExit, match=r"fonts-a 1.0-1 \(apt offers 2.0-1\); fonts-b 1:3 \(apt offers no"
    ):
        glyph_sources._unpack(tmp_path)
