"""Two nodes, each of which has its own copy of the images under the same path, and one copy is wrong.

A function's docstring is the fault's name in the table.
"""

import re
import shutil
from pathlib import Path

from tools.faults.fault_runs import Laboratory, Verdict, refused


def image_missing_on_a_node(lab: Laboratory) -> Verdict:
    """one of 2 nodes has an image less than the other"""
    copy = lab.copy("folder")
    (copy / "train" / "ash" / "3.jpg").unlink()
    return _refused_by_all(lab, copy, "number of training images is 63 instead of 64")


def classes_swapped_on_a_node(lab: Laboratory) -> Verdict:
    """the contents of two classes are swapped on one of 2 nodes"""
    copy = lab.copy("folder")
    for one, other in (("ash", "aside"), ("birch", "ash"), ("aside", "birch")):
        (copy / "train" / one).rename(copy / "train" / other)
    return _refused_by_all(lab, copy, "Differences (1): fingerprint of the training images")


def class_renamed_on_a_node(lab: Laboratory) -> Verdict:
    """a class has another name on one of 2 nodes, which shifts the labels"""
    copy = lab.copy("folder")
    for split in ("train", "val"):
        (copy / split / "ash").rename(copy / split / "yew")
    return _refused_by_all(lab, copy, "training class 0 is birch instead of ash")


def class_missing_on_a_node(lab: Laboratory) -> Verdict:
    """one of 2 nodes has a class less than the other"""
    copy = lab.copy("folder")
    for split in ("train", "val"):
        shutil.rmtree(copy / split / "birch")
    message = "model.num_classes is 3 instead of 4"
    return _refused_by_all(lab, copy, message, "--model.num-classes", "None")


def label_changed_on_a_node(lab: Laboratory) -> Verdict:
    """a label in a shard is another one on one of 2 nodes"""
    copy = lab.copy("wds")
    shard = copy / "train-000003.tar"
    content = bytearray(shard.read_bytes())
    name = re.search(rb"[\w.]+\.cls", content)
    content[name.start() + 512] ^= 1  # what follows the header
    shard.write_bytes(content)
    for index in copy.glob("*.idx.json"):
        index.unlink()
    return _refused_by_all(lab, copy, "fingerprint of the training images", dataset="wds")


def _refused_by_all(
    lab: Laboratory, copy: Path, message: str, *arguments: str, dataset: str = "folder"
) -> Verdict:
    """Train on healthy images and on a copy of them that is not: both processes must say that."""
    copies = (getattr(lab, dataset), copy)
    result = lab.run(None, *arguments, dataset=dataset, copies=copies)
    if result.codes != (3, 3):
        return Verdict(f"exit {result.codes}: {result.printed[-300:]}", "the code of a process")
    lines = result.printed.splitlines()
    told = {line.partition("error: ")[2] for line in lines if "error: " in line}
    if len(told) != 1:
        return Verdict(str(told), "the same error of both")
    return refused(result, 3, f"rank 1 on node .* does not match rank 0 .*{re.escape(message)}")
