"""python -m vil.data: what it counts, finds and draws, over folders made to have a bit of everything."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.strategies import encoded
from vil.data import main
from vil.training.errors import run_script


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes in two splits: a transparent image, a damaged one, a large one, and one that is in both splits."""
    root = tmp_path / "photos"
    for split, count in (("train", 12), ("val", 3)):
        for name in ("ash\x1b[1m", "oak $x$"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.effect_noise((20 + number, 10), 50)
                image.save(root / split / name / f"{number}.png")
    Image.new("RGBA", (8, 8)).save(root / "train" / "oak $x$" / "clear.png")
    (root / "train" / "oak $x$" / "broken.jpg").write_bytes(b"x" * 50)
    (root / "train" / "oak $x$" / "large.png").write_bytes(
        encoded(Image.new("1", (300, 300)), "PNG")
    )
    twin = (root / "train" / "oak $x$" / "3.png").read_bytes()
    (root / "val" / "ash\x1b[1m" / "twin.png").write_bytes(twin)
    return root


def looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["vil.data", *arguments])
    code = run_script(main)
    told = capsys.readouterr()
    return code, told.out + told.err


def test_figures_and_picture(photos, tmp_path, monkeypatch, capsys, caplog) -> None:
    picture = tmp_path / "data.png"
    arguments = (str(photos), "--output", str(picture), "--max-pixels", "50000")
    code, told = looked(monkeypatch, capsys, *arguments)
    told += caplog.text  # where the logger of another test may write
    assert code == 0
    assert "2 classes; images of each in train, val:" in told
    assert f"{12:>9}{4:>9}  ash\\x1b[1m\n{15:>9}{3:>9}  oak $x$\n{27:>9}{7:>9}  in all\n" in told
    assert "smallest 8 x 8, median" in told
    assert "largest 31 x 10 px" in told
    assert "modes        L 31, RGBA 1" in told
    assert "transparent  1 images may be; see --data.background" in told
    assert "unusable     2 images" in told
    assert "broken.jpg: cannot identify image file" in told
    assert "large.png: it has 90,000 pixels, more than 50,000" in told
    assert "in two       1 images" in told
    assert "twin.png is" in told
    assert "\x1b" not in told
    with Image.open(picture) as image:
        assert image.width > 300
    assert Image.MAX_IMAGE_PIXELS is not None


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["train"], 0, "images of each in all"),
        (["train", "--val-fraction", "0.5"], 0, "images of each in train, val"),
        (["train/oak $x$"], 3, "/<class>/<image>"),
        (["nowhere"], 3, "nowhere is not a folder"),
        (["train", "--output", "x.jpg"], 2, "output must end with .png, got x.jpg"),
    ],
)
def test_folders_of_each_kind(
    photos, arguments, code, told, monkeypatch, capsys, caplog, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = looked(monkeypatch, capsys, f"photos/{arguments[0]}", *arguments[1:])
    assert found[0] == code
    assert told in found[1] + caplog.text
    assert (tmp_path / "data.png").exists() == (code == 0)
