"""Fractals: the seed determines the images, and a repeated command writes only what is missing."""

from pathlib import Path

from examples import fractals


def written(folder: Path, **settings: int) -> dict[str, bytes]:
    fractals.write(folder, 2, {"train": 2, "val": 1}, size=16, **settings)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*/*")}


def test_the_seed_determines_the_images(tmp_path: Path) -> None:
    first, same = written(tmp_path / "first"), written(tmp_path / "same", jobs=2)
    assert first == same
    assert len(first) == len({*first.values(), *written(tmp_path / "other", seed=1).values()}) / 2 == 6
    (tmp_path / "first/train/1/0.png").unlink()
    (tmp_path / "first/val/0/0.png").write_bytes(b"kept")
    assert written(tmp_path / "first") == first | {"val/0/0.png": b"kept"}
