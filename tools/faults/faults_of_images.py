"""Faults of images and of the folders they are in.

A function's docstring is the fault's name in the table.
"""

import os
import shutil

from PIL import Image

from tools.faults.fault_runs import (
    TOLERANT,
    Injury,
    Laboratory,
    Verdict,
    halve,
    refused,
    skipped,
)


def truncated_jpegs(lab: Laboratory) -> Verdict:
    """4 training JPEGs cut in half"""
    data = lab.copy("folder")
    names = [
        halve(data / "train" / name / "3.jpg") for name in ("ash", "birch", "cedar", "dogwood")
    ]
    return skipped(lab.run(data, *TOLERANT), 4, *names)


def too_many_truncated_jpegs(lab: Laboratory) -> Verdict:
    """the same, but more than data.max_bad_images allows"""
    data = lab.copy("folder")
    halve(data / "train" / "ash" / "3.jpg")
    result = lab.run(data, "--data.max-bad-images", "0.01")
    if result.code != 3 or "ash/3.jpg" not in result.error:
        return Verdict(result.printed[-300:], "no word of the fault")
    return Verdict(f"exit 3: {result.error}", "nothing: stopped, told which image and why")


def zero_byte_and_text_files(lab: Laboratory) -> Verdict:
    """a zero-byte file and a text file named .jpg"""
    data = lab.copy("folder")
    (data / "train" / "ash" / "3.jpg").write_bytes(b"")
    (data / "train" / "birch" / "3.jpg").write_text("404 not found")
    return skipped(lab.run(data, *TOLERANT), 2, "ash/3.jpg", "birch/3.jpg")


def vast_image(lab: Laboratory) -> Verdict:
    """a training image of a few kB and 169 million pixels"""
    data = lab.copy("folder")
    Image.new("1", (13_000, 13_000)).save(data / "train" / "ash" / "3.jpg", "PNG")
    return skipped(lab.run(data, *TOLERANT), 1, "ash/3.jpg", "169,000,000 pixels")


def vast_validation_image(lab: Laboratory) -> Verdict:
    """the same in validation"""
    data = lab.copy("folder")
    Image.new("1", (13_000, 13_000)).save(data / "val" / "ash" / "1.jpg", "PNG")
    return refused(lab.run(data), 3, r"image .*val/ash/1\.jpg cannot be read: it has 169,000,000")


def png_named_jpeg(lab: Laboratory) -> Verdict:
    """a PNG named .jpg"""
    return _decodes(lab, "PNG", "RGB")


def cmyk_jpeg(lab: Laboratory) -> Verdict:
    """a CMYK JPEG"""
    return _decodes(lab, "JPEG", "CMYK")


def bad_validation_images(lab: Laboratory) -> Verdict:
    """a truncated validation JPEG"""
    data = lab.copy("folder")
    halve(data / "val" / "cedar" / "1.jpg")
    return refused(lab.run(data), 3, r"image .*val/cedar/1\.jpg cannot be read: ")


def extra_validation_class(lab: Laboratory) -> Verdict:
    """a class folder in validation only"""
    data = lab.copy("folder")
    shutil.copytree(data / "val" / "ash", data / "val" / "elm")
    return refused(lab.run(data), 3, "class .* is in the validation data only")


def renamed_validation_class(lab: Laboratory) -> Verdict:
    """a class with another name in validation"""
    data = lab.copy("folder")
    (data / "val" / "ash").rename(data / "val" / "elm")
    return refused(lab.run(data), 3, "class ash is in the training data only")


def empty_class(lab: Laboratory) -> Verdict:
    """a class folder without images, which would shift the labels"""
    data = lab.copy("folder")
    (data / "train" / "aspen").mkdir()
    return refused(lab.run(data), 3, r"class folder .*train/aspen has no images")


def empty_validation(lab: Laboratory) -> Verdict:
    """an empty validation set"""
    data = lab.copy("folder")
    for path in data.glob("val/*/*.jpg"):
        path.unlink()
    return refused(lab.run(data), 3, r"no images in the sub-folders of .*val")


def data_away(lab: Laboratory) -> Verdict:
    """the data's folder away for a second, as a network's disk can be"""
    return lab.same(lab.run(lab.copy("folder"), injury=Injury("away", 12)), "exit 0")


def pipe_for_an_image(lab: Laboratory) -> Verdict:
    """a pipe named .jpg, which would be waited for"""
    data = lab.copy("folder")
    (data / "train" / "ash" / "3.jpg").unlink()
    os.mkfifo(data / "train" / "ash" / "3.jpg")
    return refused(lab.run(data), 3, r"image .*train/ash/3\.jpg cannot be read: .*regular file")


def line_break_in_a_name(lab: Laboratory) -> Verdict:
    """a line break in the name of a validation image that is none"""
    data = lab.copy("folder")
    (data / "val" / "ash" / "3\n4.jpg").write_text("404 not found")
    return refused(lab.run(data), 3, r"image .*/val/ash/3\\n4\.jpg cannot be read: cannot identify")


def data_smaller_than_batch(lab: Laboratory) -> Verdict:
    """fewer images than a batch"""
    return refused(lab.run(None, "--data.batch-size", "96"), 3, "64 training images, fewer than")


def _decodes(lab: Laboratory, form: str, mode: str) -> Verdict:
    """Train with one file of another form or colour: it must be read."""
    data = lab.copy("folder")
    path = data / "train" / "ash" / "3.jpg"
    Image.open(path).convert(mode).save(path, form)
    result = lab.run(data, "--data.max-bad-images", "0")
    if result.code != 0 or "skipped  0 images" not in result.printed:
        return Verdict(result.printed[-300:], "the image")
    return Verdict("exit 0, decoded by content and converted", "nothing: the image is trained on")
