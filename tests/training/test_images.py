"""Which files are images, in which order, and how every kind of image is decoded."""

import dataclasses
import io
import os
import random
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin, features
from timm.data import create_dataset

from tests.strategies import damaged, encoded, transparent
from tests.training.run_files import train_data, val_data
from vil.preprocess import ImageSpec
from vil.training.errors import DataError
from vil.training.images import FolderSource
from vil.training.listing import list_images
from vil.training.settings import DataConfig

ROOT = Path(__file__).parents[2]
KINDS = ["BMP", "GIF", "jfif", "Jpeg", "jp2", "pgm", "PNG", "tga", "tif", "tiff", "webp"]
if features.check("avif"):
    KINDS.append("avif")
NO_IMAGES = ["bufr", "eps", "grib", "h5", "heic", "json", "mp4", "mpg", "pdf", "ps", "svg", "wmf"]


def fill(folder: Path, *names: str) -> Path:
    """Put files that are never opened into a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def decode(content: bytes, mode: str, **options: Any) -> Image.Image | torch.Tensor:
    return ImageSpec.of({}, in_chans=1 if mode == "L" else 3, **options).decode(content)


def pixels(content: bytes, mode: str = "L", **arguments: Any) -> np.ndarray:
    """Decode an image; uint8, (H, W) or (H, W, 3)."""
    image = decode(content, mode, **arguments)
    assert image.mode == mode
    return np.asarray(image)


# Which files are images


def test_every_kind_that_pillow_reads_is_an_image(tmp_path) -> None:
    folder = fill(tmp_path / "train", "b/1.jpg", *(f"b/1.{kind}" for kind in NO_IMAGES))
    (folder / "a").mkdir()
    for number, kind in enumerate(KINDS):
        Image.new("L", (16, 16), 20 * number).save(folder / "a" / f"{number}.{kind}")
    source = FolderSource(DataConfig(path=str(tmp_path)), training=True)
    assert source.labels.tolist() == [0] * len(KINDS) + [1]
    for number in range(len(KINDS)):
        assert source.name(number).endswith(f"a/{number}.{KINDS[number]}")
        assert abs(int(pixels(source.read(number))[8, 8]) - 20 * number) <= 2


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["b.jpg", "a.png"], "a.png"),
        (["cat/wild/1.jpg", "cat/tame/3.jpg"], "cat/tame/3.jpg"),
        (["cat/wild/young/1.webp", "cat/wild/1.txt"], "cat/wild/young/1.webp"),
    ],
)
def test_image_at_another_depth_is_an_error(tmp_path, names, first) -> None:
    fill(tmp_path, "cat/1.jpg", "dog/1.jpg", *names)
    with pytest.raises(DataError) as error:
        list_images(tmp_path)
    assert str(error.value) == f"image {tmp_path / first} must lie at {tmp_path}/<class>/<image>"


def test_files_of_other_formats_are_counted(tmp_path, caplog) -> None:
    fill(tmp_path, "cat/1.heic", "cat/2.HEIC", "dog/1.heic", "dog/notes", "dog/Thumbs.db", "a.csv")
    told = f"5 files left out of {tmp_path} (3 .heic, 1 .csv, 1 without an extension)"
    with pytest.raises(DataError, match=re.escape(f"no images in the sub-folders of {tmp_path}; {told}")):
        list_images(tmp_path)
    fill(tmp_path, "cat/1.jpg", "dog/1.jpg", "dog/2.jpg")
    split = DataConfig(path=str(tmp_path.parent), train_split=tmp_path.name)
    parts = DataConfig(path=str(tmp_path), val_fraction=0.001)
    for data in (split, parts):
        FolderSource(data, training=True)
    FolderSource(parts, training=False)  # reads the same folder again
    assert [record.message.partition(", because")[0] for record in caplog.records] == [told] * 2


def test_images_are_found_and_read_in_any_locale(tmp_path) -> None:
    """Without UTF-8, Python decodes names of files in another way."""
    fill(tmp_path, "val/\u732b/1.jpg", "val/\u72ac/\u00e9.jpg")
    program = (
        "import sys; from vil.training.images import DataConfig, FolderSource\n"
        "source = FolderSource(DataConfig(path=sys.argv[1]), training=False)\n"
        "print(sys.getfilesystemencoding(), source.listing, *map(source.read, range(2)))"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    source = FolderSource(DataConfig(path=str(tmp_path)), training=False)
    assert run.stdout.split() == ["ascii", source.listing, "b'x'", "b'x'"], run.stderr


def test_contents_of_many_images_are_compared_up_to_the_last(tmp_path) -> None:
    """Those of 256 images: more would take too long at the start of a run."""
    fill(tmp_path, *(f"train/cat/{number}.jpg" for number in range(300)))
    data, found = DataConfig(path=str(tmp_path)), []
    for name in (None, "0.jpg", "299.jpg"):
        if name is not None:
            (tmp_path / "train" / "cat" / name).write_bytes(b"y")
        found.append(FolderSource(data, training=True).fingerprint)
    assert len({*found}) == 3


# A fraction held out


def sides_of(data: DataConfig) -> list[set[str]]:
    """Return the names of the images to train on and of those held out."""
    sources = [FolderSource(data, training) for training in (True, False)]
    for source in sources:
        named = [Path(source.name(i)).parent.name for i in range(source.num_images)]
        assert named == [source.classes[label] for label in source.labels]
    return [{s.name(i) for i in range(s.num_images)} for s in sources]


def test_fraction_is_held_out_and_stays_held_out(tmp_path) -> None:
    data = DataConfig(path=str(tmp_path), val_fraction=0.25)
    fill(tmp_path, *(f"{name}/{n}.jpg" for name in ("oak", "ash") for n in range(200)))
    training, held_out = sides_of(data)
    assert not training & held_out
    assert len(training | held_out) == 400
    assert 60 < len(held_out) < 140
    # New images move none, and a larger fraction only adds.
    assert held_out < sides_of(dataclasses.replace(data, val_fraction=0.5))[1]
    fill(tmp_path, *(f"{n}/{name}.jpg" for n in range(100) for name in ("same", *range(n, n + 9))))
    assert held_out <= sides_of(data)[1]
    # Files of one name are chosen for each class.
    assert 10 < len([path for path in sides_of(data)[1] if path.endswith("same.jpg")]) < 45
    ash = {path for path in held_out if "ash" in path}
    assert {path.replace("oak", "ash") for path in held_out - ash} != ash
    fill(tmp_path, "fir/3.jpg")
    lacking = dataclasses.replace(data, val_fraction=0.999)
    with pytest.raises(DataError, match=r"val_fraction 0\.999 leaves class \w+ no image"):
        FolderSource(lacking, training=True)


# Their order


def test_order_is_that_of_timm(tmp_path) -> None:
    classes = ["n10", "n9", "N09b", "cat", "cat-1", "cat 2", "Cats", "1", "1a", "20", "é", "ca.t"]
    images = ["10.jpg", "9.jpg", "x9y10.JPEG", "x10y9.png", "A.jpg", "b.jpg", "a b.jpg", "a-1.jpg"]
    fill(tmp_path, *(f"{name}/{image}" for name in classes for image in images))
    reader = create_dataset("", root=str(tmp_path), search_split=False).reader
    _, paths, classes, labels = list_images(tmp_path)
    found = [(str(tmp_path / path), label) for path, label in zip(paths, labels, strict=True)]
    assert (found, classes) == (reader.samples, tuple(reader.class_to_idx))


# How they are decoded

GREY = np.linspace(0, 65535, 12).astype(np.uint16).reshape(3, 4)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_16_bits_are_scaled(form) -> None:
    content = encoded(Image.fromarray(GREY), form)
    assert np.array_equal(pixels(content), GREY >> 8)
    assert np.array_equal(pixels(content, "RGB"), np.stack([GREY >> 8] * 3, axis=2))


@pytest.mark.parametrize("seed", range(5))
def test_background_shows_through_transparent_pixels(seed: int) -> None:
    for number, (content, colours, alpha) in enumerate(transparent(seed)):
        share = alpha[..., None] / 255
        for background, value in (("white", 255), ("black", 0)):
            expected = colours * share + value * (1 - share)
            found = pixels(content, "RGB", background=background)
            assert np.abs(found - expected).max() <= 1, (number, background)
        stored = np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))[..., :3]
        found = pixels(content, "RGB")  # like timm: the stored colours
        assert np.array_equal(found[alpha > 0], stored[alpha > 0]), number


def png(bits: int, colour_type: int, row: bytes, level: bytes, size: tuple[int, int] = (2, 1)) -> bytes:
    """Return a PNG with a row of pixels and a transparent level; Pillow writes no such files."""
    header = struct.pack(">IIBBBBB", *size, bits, colour_type, 0, 0, 0)
    chunks = {b"IHDR": header, b"tRNS": level, b"IDAT": zlib.compress(b"\0" + row), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


@pytest.mark.parametrize(
    ("content", "stored"),
    [
        (png(1, 0, b"\x80", b"\0\1"), [255, 0]),
        (png(2, 0, b"\x70", b"\0\1"), [85, 255]),
        (png(4, 0, b"\x3a", b"\0\3"), [51, 170]),
        (png(8, 0, b"\x03\xc8", b"\0\3"), [3, 200]),
        (png(16, 0, struct.pack(">HH", 1000, 1001), struct.pack(">H", 1000)), [3, 3]),
        (png(8, 2, bytes([9, 9, 9, 0, 0, 0]), struct.pack(">HHH", 9, 9, 9)), [9, 0]),
        (png(16, 2, struct.pack(">6H", *[1000] * 3, *[256] * 3), b"\3\xe8" * 3), [3, 1]),
    ],
    ids=["1 bit", "2 bits", "4 bits", "8 bits", "16 bits", "RGB", "RGB of 16 bits"],
)
def test_a_transparent_level(content: bytes, stored: list[int]) -> None:
    assert pixels(content).tolist() == [stored]
    assert pixels(content, background="white").tolist() == [[255, stored[1]]]
    assert pixels(content, "RGB", background="white").tolist() == [[[255] * 3, [stored[1]] * 3]]


PALETTE = Image.new("P", (2, 1))
PALETTE.putpalette([255, 0, 0, 0, 255, 0])
PALETTE.putpixel((1, 0), 1)


@pytest.mark.parametrize(
    ("content", "colours"),
    [
        (encoded(PALETTE, "PNG", transparency=b"\0\x80"), [[255, 0, 0], [0, 255, 0]]),
        (encoded(PALETTE, "GIF", transparency=1), [[255, 0, 0], [0, 255, 0]]),
        (encoded(Image.new("CMYK", (2, 1), (0, 0, 0, 0)), "JPEG"), [[255] * 3] * 2),
        (encoded(Image.new("CMYK", (2, 1), (0, 255, 0, 0)), "TIFF"), [[255, 0, 255]] * 2),
        (encoded(Image.new("LA", (2, 1), (200, 0)), "PNG"), [[200] * 3] * 2),
        (encoded(Image.new("RGBA", (2, 1), (10, 200, 30, 0)), "PNG"), [[10, 200, 30]] * 2),
        (encoded(Image.new("1", (2, 1), 1), "PNG"), [[255] * 3] * 2),
    ],
    ids=["transparent palette", "GIF", "JPEG of CMYK", "CMYK", "LA", "RGBA", "1 bit"],
)
def test_colours_are_those_of_timm(content, colours) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pixels(content, "RGB")
        grey = pixels(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    assert found.tolist() == [colours]
    luminance = np.array(colours) @ [0.299, 0.587, 0.114]
    assert np.abs(grey[0] - luminance).max() < 1


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_an_image_or_an_error(kind) -> None:
    drawing = Image.effect_mandelbrot((24, 16), (-2, -1, 1, 1), 50)
    whole = encoded(drawing, Image.registered_extensions()[f".{kind.lower()}"])
    draw, limit, read, told = random.Random(kind), 1 << 20, [], []
    for _ in range(100):
        turn, background = draw.random() < 0.5, draw.choice(["none", "white", "black"])
        content = damaged(whole, draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
            try:
                options = {"exif_rotation": turn, "background": background}
                read.append(decode(content, "RGB", **options, max_pixels=limit))
            except ValueError as error:
                told.append(str(error))
    assert read
    assert all(image.mode == "RGB" and image.width * image.height <= limit for image in read)
    assert told
    assert all(0 < len(message) < 500 and "\n" not in message for message in told)


def jpegs() -> dict[str, bytes]:
    """Return JPEG files of every kind that cameras and programs write."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8)).resize((61, 45))
    sideways = Image.Exif()
    sideways[274] = 6
    upright = Image.Exif()
    upright[274], upright[271] = 1, "a camera"
    return {
        "RGB": encoded(image, "JPEG"),
        "no subsampling": encoded(image, "JPEG", subsampling=0, quality=97),
        "progressive": encoded(image, "JPEG", progressive=True, optimize=True),
        "restarts": encoded(image, "JPEG", restart_marker_rows=1),
        "upright": encoded(image, "JPEG", exif=upright, comment=b"fine"),
        "sideways": encoded(image, "JPEG", exif=sideways),
        "grey": encoded(image.convert("L"), "JPEG"),
        "CMYK": encoded(image.convert("CMYK"), "JPEG"),
        "two pictures": encoded(image, "MPO", save_all=True, append_images=[image]),
        "in another format": encoded(image, "PNG"),
    }


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_torchvision_decodes_plain_jpegs_to_the_same_pixels(mode, turn) -> None:
    taken = set()
    for name, content in jpegs().items():
        expected = np.asarray(decode(content, mode, exif_rotation=turn))
        found = decode(content, mode, exif_rotation=turn, decoder="torchvision")
        if isinstance(found, torch.Tensor):
            taken.add(name)
            found = found.permute(1, 2, 0).numpy().reshape(expected.shape)
        assert np.array_equal(np.asarray(found), expected), name
    colours = {"RGB", "no subsampling", "progressive", "restarts", "upright", "sideways"}
    assert taken == {"grey"} | (colours if mode == "RGB" else set()) - ({"sideways"} if turn else set())


def test_a_damaged_jpeg_is_what_pillow_makes_of_it() -> None:
    """2,000 files: the same error, or the same pixels but for roundings of another version of libjpeg."""
    draw, kinds, results = random.Random(0), list(jpegs().values()), Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
        for number in range(2000):
            content, made = damaged(kinds[number % len(kinds)], draw), []
            for decoder in ("pillow", "torchvision"):
                try:
                    options = {"exif_rotation": True, "max_pixels": 1 << 20, "decoder": decoder}
                    image = decode(content, "RGB", **options)
                except ValueError as error:
                    made.append(str(error))
                    continue
                by_torchvision = isinstance(image, torch.Tensor)
                results[by_torchvision] += 1
                image = image.permute(1, 2, 0).numpy() if by_torchvision else image
                made.append(np.asarray(image).astype(int))
            one, other = made
            if isinstance(one, str) or isinstance(other, str):
                assert one == other, number
            else:
                assert one.shape == other.shape, number
                assert np.abs(one - other).max() <= 8, number
    assert results[True] > 200


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_truncated_file_is_an_error(form) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), form)
    with pytest.raises(ValueError, match=r"\w"):
        decode(content[: len(content) // 2], "RGB")


def long_comment() -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", LONG, zip=True)
    return info


LONG = " " * (3 << 20)
SMALL = Image.new("L", (8, 8))
REFUSED = {
    "EPS": (encoded(SMALL, "EPS"), "cannot identify image file"),
    "32 bits": (
        encoded(SMALL.convert("I"), "TIFF"),
        "TIFF has pixels of mode I, which has no defined range; expected 8 or 16 bits",
    ),
    "float": (encoded(SMALL.convert("F"), "TIFF"), "TIFF has pixels of mode F, which has no"),
    "many pixels": (
        png(8, 0, b"", b"\0\1", (13_000, 13_000)),  # as the header says
        "it has 169,000,000 pixels, which exceeds max_pixels 89,478,485",
    ),
    "long text": (encoded(SMALL, "PNG", pnginfo=long_comment()), "Decompressed data too large"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(content, "L")


def test_an_image_with_more_pixels_than_the_option_is_named(config) -> None:
    few = config.changed("data", max_pixels=479)
    with pytest.raises(DataError, match=r"cannot be read.*ash/0\.jpg: it has 480 pixels"):
        val_data(few).verify()


# Pillow's limits, which are globals of the whole process


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "JPEG2000", "BMP"])
def test_decoding_neither_follows_nor_changes_the_limit_of_pillow(form, monkeypatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    content = encoded(Image.fromarray(pixels), form)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(np.asarray(decode(content, "RGB")), expected)
    with pytest.raises(ValueError, match=r"it has 1,536 pixels, which exceeds max_pixels 1,0"):
        decode(content, "RGB", max_pixels=1000)
    assert Image.MAX_IMAGE_PIXELS == 100


def long_texts() -> dict[str, tuple[bytes, bool]]:
    """Return images with more metadata than pixels, and whether it says that they are held sideways."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 8, 3), np.uint8))
    exif = Image.Exif()
    exif[274], exif[270] = 6, LONG
    xmp = b'<rdf:Description tiff:Orientation="6"/>' + LONG.encode()
    jpeg, comment = encoded(image, "JPEG"), b"\xff\xfe\xff\xff" + b"x" * 0xFFFD
    return {
        "PNG": (encoded(image, "PNG", exif=exif), True),
        "JPEG": (jpeg[:2] + 60 * comment + jpeg[2:], False),
        "WEBP": (encoded(image, "WEBP", lossless=True, xmp=xmp), True),
        "TIFF": (encoded(image, "TIFF", exif=exif, icc_profile=LONG.encode()), True),
    }


def test_an_image_may_have_any_amount_of_text() -> None:
    for name, (content, sideways) in long_texts().items():
        found = decode(content, "RGB", exif_rotation=True).size
        assert found == ((16, 8) if sideways else (8, 16)), name
        with pytest.raises(ValueError, match="it has 128 pixels"):
            decode(content, "RGB", max_pixels=127)


# Rotated photographs


def with_exif(form: str, value: int) -> bytes:
    """Return a white 16 x 8 image with a black upper left quarter and an EXIF orientation."""
    image = Image.new("L", (16, 8), 255)
    image.paste(0, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[274] = value
    return encoded(image, form, exif=exif)


UPRIGHT = pixels(with_exif("PNG", 1))
TURNED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,
    6: UPRIGHT.T[:, ::-1],
    7: UPRIGHT.T[::-1, ::-1],
    8: UPRIGHT.T[::-1],
    9: UPRIGHT,  # no orientation
}


@pytest.mark.parametrize("value", TURNED)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_photographs_are_turned_if_asked(form, value) -> None:
    content = with_exif(form, value)
    assert np.abs(pixels(content).astype(int) - UPRIGHT).max() <= 8
    turned = pixels(content, exif_rotation=True)
    assert np.abs(turned.astype(int) - TURNED[value]).max() <= 8


@pytest.mark.ci
def test_setting_turns_images_of_training(config, image_folder) -> None:
    for path in image_folder.glob("*/*/*.jpg"):
        path.write_bytes(with_exif("JPEG", 6))
    whole = {"scale": (1.0, 1.0), "ratio": (0.5, 2.0)}
    config, dark = config.changed("augment", aa=None, hflip=0.0, **whole), []
    for turned in (False, True):
        data = train_data(config.changed("data", exif_rotation=turned))
        images = torch.cat([step.micro_batches[0][0] for step in data.steps(8)])
        dark.append({bool(image[0, 2, 2] < image[0, 2, 13]) for image in images})
    assert dark == [{True}, {False}]
