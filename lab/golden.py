"""Show that a change keeps results bit-identical: hash models and short training runs of checkouts.

    python lab/golden.py CHECKOUT [OTHER]

With one checkout, print a line for each case: its name and a hash. With two, print the cases whose hashes differ,
and exit with 1 if there are any.

- **Models**: logits, gradients and initial weights of three recurrences, with the trained grid, 1.5 and 2 times its
  side. All run in float32 and bfloat16, on the compiled CPU loops and on the reference.
- **Runs**: weights, optimiser state, averages and the log after two epochs. The runs use digits, a folder (workers,
  repeated augmentation), shards of the same images, gradient accumulation, and two processes.

Hashes depend on the processor and on the versions of PyTorch and numba, so none are stored: run both checkouts in one
environment. The script uses public names and commands only. It compares tensors as a set, without names and order,
so a change may rename or reorder them.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MODELS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
SIDES = {"trained": 32, "1.5 times": 48, "2 times": 64}
LOGGED = ("epoch", "step", "train_loss", "val_loss", "top1", "top5", "ema_top1", "lr")
SMALL = (
    *("--model.img-size", "16", "--model.patch-size", "8", "--model.embed-dim", "16"),
    *("--model.depth", "2", "--model.drop-path-rate", "0.2", "--data.batch-size", "8"),
    *("--optim.lr-base-size", "8", "--optim.model-ema-decay", "0.9", "--schedule.epochs", "2"),
    *("--schedule.warmup-epochs", "1", "--run.device", "cpu", "--run.num-threads", "1"),
    *("--augment.mix-size", "4"),
)
RECIPE = ("--config", "configs/vil_tiny.yaml", *SMALL)


def digest(parts: Iterable[bytes]) -> str:
    """Return one hash of several byte strings."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


def digest_of_set(tensors: Iterable[Any]) -> str:
    """Return one hash of the contents of tensors, independent of their order."""
    import torch

    plain = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors)
    return digest(sorted(t.numpy().tobytes() for t in plain))


def hash_models() -> None:
    """Print the hashes of models on the backend that VIL_BACKEND names."""
    import timm
    import torch

    import vil  # noqa: F401  registers the models

    torch.set_num_threads(1)
    backend = os.environ["VIL_BACKEND"]
    for name in MODELS:
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=32, patch_size=8, embed_dim=64, depth=2, num_classes=5)
        print(f"{name} initial weights | {digest_of_set(model.parameters())}")
        for kind, side in SIDES.items():
            for dtype in (torch.float32, torch.bfloat16):
                images = torch.randn(2, 3, side, side, requires_grad=True)
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    logits = model(images)
                model.zero_grad()
                logits.float().square().sum().backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                case = f"{name} {kind} {str(dtype).removeprefix('torch.')} {backend}"
                print(f"{case} logits | {digest_of_set([logits])}")
                print(f"{case} gradients | {digest_of_set([images.grad, *grads])}")


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the floating-point tensors with more than one element in nested containers."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel() > 1:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def make_images(folder: Path) -> None:
    """Write four classes of noise, 32 images to train on and 12 held out."""
    import numpy as np
    from PIL import Image

    for split, count in {"train": 8, "val": 3}.items():
        for label, name in enumerate(("ash", "birch", "cedar", "dogwood")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                draw = np.random.default_rng([label, number])
                pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def pack(images: Path, shards: Path) -> None:
    """Pack images in shards of 8, with timm's description."""
    import webdataset

    shards.mkdir()
    splits = {}
    for split, place in {"train": "train", "validation": "val"}.items():
        paths = sorted((images / place).glob("*/*.png"))
        classes = sorted({path.parent.name for path in paths})
        pattern = str(shards / f"{split}-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=8, verbose=0, mtime=0) as writer:
            for number, path in enumerate(paths):
                label = classes.index(path.parent.name)
                writer.write({"__key__": str(number), "png": path.read_bytes(), "cls": label})
        names = sorted(path.name for path in shards.glob(f"{split}-*"))
        splits[split] = {"filenames": names, "classes": classes}
    (shards / "_info.json").write_text(json.dumps({"splits": splits}))


def hash_runs(checkout: Path) -> Iterator[tuple[str, str]]:
    """Train briefly in a checkout; yield the name and the hash of each checkpoint and log."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "images")
        pack(folder / "images", folder / "shards")
        on_folder = ("--data.path", str(folder / "images"))
        on_shards = ("--data.dataset", "wds", "--data.path", str(folder / "shards"))
        two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        runs = {
            "digits": ("train_imagenet.py", "--schedule.epochs", "2"),
            "folder": ("train_imagenet.py", *RECIPE, *on_folder, "--data.num-workers", "2"),
            "shards": ("train_imagenet.py", *RECIPE, *on_shards, "--data.num-workers", "0"),
            "accumulation": (
                *("train_imagenet.py", *RECIPE, *on_folder, "--data.num-workers", "0"),
                *("--run.grad-accum-steps", "2", "--data.aug-repeats", "0"),
            ),
            "two processes": (*(*two, "train_imagenet.py", *RECIPE, *on_folder, "--data.num-workers", "1"),),
        }
        for run, arguments in runs.items():
            output = folder / "runs" / run.replace(" ", "_")
            command(checkout, *arguments, "--run.output", str(output))
            content = torch.load(output / "last.pt", map_location="cpu", weights_only=True)
            yield f"{run} checkpoint", digest_of_set(tensors_in(content))
            with open(output / "log.csv", newline="") as file:
                rows = [[row.get(key, "") for key in LOGGED] for row in csv.DictReader(file)]
            yield f"{run} log", digest([repr(rows).encode()])


def command(checkout: Path, *arguments: str, backend: str | None = None) -> str:
    """Run Python in a checkout and return its output."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    if backend is not None:
        environment["VIL_BACKEND"] = backend
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} failed in {checkout}:\n{done.stdout}{done.stderr}")
    return done.stdout


def hashes(checkout: Path) -> dict[str, str]:
    """Return all hashes of a checkout by the name of the case."""
    found = {}
    for backend in ("cpu", "reference"):
        lines = command(checkout, __file__, "--models", backend=backend).splitlines()
        found |= dict(line.split(" | ") for line in lines)
    found |= dict(hash_runs(checkout))
    return found


def main() -> int:
    """Print hashes, or the cases in which two checkouts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="one or two folders")
    parser.add_argument("--models", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.models:
        hash_models()
        return 0
    if not 1 <= len(args.checkouts) <= 2:
        parser.error(f"expected one or two checkouts, got {len(args.checkouts)}")
    first, *others = [hashes(path.resolve()) for path in args.checkouts]
    for name, value in first.items():
        if not others:
            print(f"{value}  {name}")
    if not others:
        return 0
    differing = [name for name in first | others[0] if first.get(name) != others[0].get(name)]
    for name in differing:
        print(f"differs: {name}")
    print(f"{len(first)} cases, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
