"""Show which tests notice small defects: apply each mutation below to a copy of the checkout and run its tests.

    python tools/mutations.py [--jobs 2] [--checkout FOLDER] [--only TEXT]

Prints for each mutation the test that noticed it first. Exits with 1 if a mutation went unnoticed, or if it no longer
applies because the code has changed: then find a place in the new code where the same defect would do the same harm.
Only the tests of the mutation's own folder run. All of them take about an hour of CPU time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

REST = (
    "tests/kernels/test_ops.py tests/kernels/test_reference.py tests/kernels/test_grid.py "
    "tests/kernels/test_fused_mixer.py tests/kernels/test_transforms.py "
    "tests/kernels/test_exportable.py tests/kernels/test_workspace.py"
)

# File, text that stands in it once, what replaces the text, and the tests to run. Comments say what goes wrong.
MUTATIONS = [
    # Validation always crops at timm's 0.875, whatever data.crop_pct says.
    (
        "vil/training/data/augment.py",
        "            crop_pct=data.crop_pct,\n",
        "",
        "tests/training/data",
    ),
    # All groups of mix_size in a micro-batch are erased and mixed by the same draws.
    (
        "vil/training/data/augment.py",
        'key("augment", self.seed, step, place + start)',
        'key("augment", self.seed, step, place)',
        "tests/training/data",
    ),
    # With repeated augmentation an epoch is no longer rounded down to a multiple of 256 images.
    (
        "vil/training/data/draws.py",
        "return num_images // _REPEAT_ROUND * _REPEAT_ROUND",
        "return num_images",
        "tests/training/data",
    ),
    # The image that replaces an unreadable one gets the label of the unreadable one.
    (
        "vil/training/data/batches.py",
        "return image, int(self.source.labels[index]), bad",
        "return image, int(self.source.labels[draw.index]), bad",
        "tests/training/data",
    ),
    # Repeated augmentation: all draws of an image in a row are augmented alike (easily missed).
    (
        "vil/training/data/batches.py",
        'key("image", self.seed, draw.epoch, draw.position)',
        'key("image", self.seed, draw.epoch, draw.index)',
        "tests/training/data",
    ),
    # After a loader process died, validation goes on too early and scores images twice.
    (
        "vil/training/data/batches.py",
        "share[first * self.batch_size :]",
        "share[first:]",
        "-m ci tests/training/data/test_data.py",
    ),
    # With data.images_per_class the first image is never trained on.
    (
        "vil/training/data/sources.py",
        "return drawn[drawn >= 0]",
        "return drawn[drawn > 0]",
        "tests/training/data",
    ),
    # A file that is missing for a moment is given up at once, and another image takes its place.
    (
        "vil/training/data/reading.py",
        "is_gone = number == _PAUSES_IF_GONE and _is_gone(error)",
        "is_gone = _is_gone(error)",
        "tests/training/data",
    ),
    # The checksum of an image in a shard is not verified.
    (
        "vil/training/data/shards.py",
        "if checksum not in (_NO_CHECKSUM, zlib.crc32(content)):",
        "if checksum not in (_NO_CHECKSUM, checksum):",
        "tests/training/data",
    ),
    # A shard replaced by another one of the same size is read by the old index: old labels.
    (
        "vil/training/data/shard_index.py",
        "if index.stamp == stamp:",
        "if index.stamp.size == stamp.size:",
        "tests/training/data",
    ),
    # Of two tars in one file the images of the second are missing, and nothing says so.
    (
        "vil/training/data/shard_scan.py",
        "    if any(rest):",
        "    if any(rest[: tarfile.BLOCKSIZE]):",
        "tests/training/data",
    ),
    # Verification of shards does not notice that a label is another one than was written.
    (
        "vil/training/data/shard_writer.py",
        "scan_shard(path) != index.scanned:",
        "len(scan_shard(path)) != len(index.scanned):",
        "tests/training/data",
    ),
    # The gradient is clipped at twice the norm that is set.
    (
        "vil/training/run/engine.py",
        "clip_grads_with_norm_(parameters, config.optim.clip_grad, norm)",
        "clip_grads_with_norm_(parameters, 2 * config.optim.clip_grad, norm)",
        "tests/training/run",
    ),
    # The averaged weights stay what they were at the start.
    (
        "vil/training/run/engine.py",
        "training.ema.update(training.model)",
        "pass",
        "tests/training/run",
    ),
    # An optimiser that is not a fused one, SGD say, makes the step of a NaN gradient.
    (
        "vil/training/run/engine.py",
        "    elif not bad:",
        "    else:",
        "tests/training/run",
    ),
    # From the second epoch on the model trains as in evaluation, without drop path.
    (
        "vil/training/run/loop.py",
        "    training.model.train()\n",
        "",
        "tests/training/run",
    ),
    # A checkpoint within the epoch after the best one becomes best.pt.
    (
        "vil/training/run/checkpoint.py",
        "state.best_is_last and state.loss_count == 0 and not",
        "state.best_is_last and not",
        "tests/training/run",
    ),
    # On resuming the average starts anew from the weights.
    (
        "vil/training/run/resume.py",
        'averaged = checkpoint.get("state_dict_ema", weights)',
        "averaged = weights",
        "tests/training/run",
    ),
    # --run.allow-changes: a new weight decay, say, is recorded and has no effect.
    (
        "vil/training/run/optimizer_state.py",
        "groups.append(kept | changed |",
        "groups.append(changed | kept |",
        "tests/training/run",
    ),
    # Vectors and what model.no_weight_decay() names are decayed, too.
    (
        "vil/training/run/setup.py",
        "layer_decay=config.layer_decay,",
        "layer_decay=config.layer_decay, filter_bias_and_bn=False,",
        "tests/training/test_config.py",
    ),
    # A signal that only another process than the main one receives is swallowed.
    (
        "vil/training/run/stopping.py",
        "return self.received, int(due), int(self.error is not None)",
        "return self.world.is_main * self.received, int(due), int(self.error is not None)",
        "-m ci tests/training/run/test_distributed.py",
    ),
    # Rows of steps.csv from after the checkpoint stay on resuming, and come again.
    (
        "vil/training/run/step_log.py",
        "if not last < step <= done:",
        "if not last < step:",
        "tests/training/run",
    ),
    # Processes whose images have other contents under the same names train together.
    (
        "vil/training/run/sameness.py",
        "= source.fingerprint",
        "= source.listing",
        "tests/training/run",
    ),
    # Mean, deviation, interpolation and crop of model.pretrained are passed over.
    (
        "vil/training/run/resolve.py",
        "value = described.get(key, default)",
        "value = default",
        "tests/training/run",
    ),
    # run.save_minutes has no effect: no checkpoint within an epoch, a crash costs all of it.
    (
        "vil/training/run/train.py",
        "Agreement(world, config.run.save_minutes)",
        "Agreement(world)",
        "tests/training/run",
    ),
    # --no-amp is passed over where the run had amp: scores are those of bfloat16.
    (
        "vil/training/run/evaluation.py",
        "amp = config.run.amp if options.amp is None else options.amp",
        "amp = options.amp or config.run.amp",
        "tests/training/run",
    ),
    # After a power loss the new file may be empty, and the old one is gone.
    (
        "vil/training/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/training",
    ),
    # optim.lr_base_size has no effect: a wrong learning rate where it is not 512.
    (
        "vil/training/config.py",
        "ratio = self.data.batch_size / self.optim.lr_base_size",
        "ratio = self.data.batch_size / 512",
        "tests/training",
    ),
    # Of a key that stands twice in a recipe the last is taken, without a word.
    (
        "vil/training/recipes.py",
        'yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)',
        'yaml.load(path.read_text(encoding="utf-8"), yaml.SafeLoader)',
        "tests/training",
    ),
    # The loss of another process ends in a traceback and code 1 instead of 6.
    (
        "vil/training/distributed.py",
        "if not _LOST.search(str(error)):",
        "if not _LOST.match(str(error)):",
        "-m ci tests/training/run/test_distributed.py -k lost",
    ),
    # ---- kernels/triton
    # Reads token r = live, one past the end, in a reverse scan whose last chunk is ragged.
    (
        "kernels/triton/sequential.py",
        "mask = alive_row(r, live, d, D, BLOCK_D)\n            x = load_row(",
        "mask = alive_row(r, live + 1, d, D, BLOCK_D)\n            x = load_row(",
        "tests/kernels/triton",
    ),
    # The load that is a token ahead goes on behind the last token of the segment.
    (
        "kernels/triton/sequential.py",
        "tl.where(i + 1 < count, sign, 0)",
        "tl.where(i < count, sign, 0)",
        "tests/kernels/triton",
    ),
    # A token that does not exist fades Mamba's state where a backward pass scans again: wrong
    # gradients of one reverse direction with an initial state and a ragged last chunk.
    (
        "kernels/triton/sequential_tokens.py",
        "return tl.where(mask, mamba.softplus(v), 0.0)\n    return",
        "return mamba.softplus(v)\n    return",
        "tests/kernels/triton",
    ),
    # Gradients of states are carried over segments in the direction of the scan, not against it.
    (
        "kernels/triton/sequential_segments.py",
        "back = (sequence // B if N == 2 else REVERSE) ^ ADJOINT",
        "back = sequence // B if N == 2 else REVERSE",
        "tests/kernels/triton",
    ),
    # The gradient of Mamba's step lacks ln 2, since the rates are A / ln 2.
    (
        "kernels/triton/mamba.py",
        "0.6931471805599453 * slope + x * recalled",
        "slope + x * recalled",
        "tests/kernels/triton",
    ),
    # Derivative of SiLU: s is half a sigmoid here.
    (
        "kernels/triton/longhorn_exact.py",
        "(1.0 + z * (1.0 - 2.0 * s))",
        "(1.0 + z * (1.0 - s))",
        "tests/kernels/triton",
    ),
    # key_norm on the products of two keys rather than on |k|^2: wrong where key_norm is not 1.
    (
        "kernels/triton/exact_keys.py",
        "key_norm * dgram, dgram)",
        "dgram, key_norm * dgram)",
        "tests/kernels/triton",
    ),
    # The first token of the next tile is counted twice in the bias's gradient.
    (
        "kernels/triton/conv.py",
        "if i < BLOCK_L:\n                dbias_0",
        "if i <= BLOCK_L:\n                dbias_0",
        "tests/kernels/triton",
    ),
    # ---- kernels/cpu
    # The backward pass of a single reverse scan goes the other way.
    (
        "kernels/cpu/loops.py",
        "backwards = reverse == 1 or i == 1\n        inputs",
        "backwards = i == 1\n        inputs",
        "tests/kernels/cpu",
    ),
    # One term of the exact form's gradient of keys is dropped.
    (
        "kernels/cpu/loops.py",
        "fold(correction * G - dx * load(at(before, j)))",
        "fold(correction * G)",
        "tests/kernels/cpu",
    ),
    # Every batch element is convolved in the order of the first.
    (
        "kernels/cpu/loops.py",
        "pointer(view[0] + 8 * b * view[2], like)",
        "pointer(view[0], like)",
        "tests/kernels/cpu",
    ),
    # Results in bfloat16 are cut instead of rounded to the nearest.
    (
        "kernels/cpu/loops.py",
        "rounded = builder.lshr(builder.add(bits, carry), all_of(16))",
        "rounded = upper",
        "-m ci tests/kernels/cpu",
    ),
    # The mixer's output lies in the memory that the next call uses.
    (
        "kernels/cpu/backend.py",
        "y = torch.empty((B, L, D), dtype=self.stored)",
        "y = workspace.empty((B, L, D), self.stored)",
        "tests/vil/test_recompute.py",
    ),
    # ---- the rest of kernels
    # Distances by columns use the phases of rows: wrong taps where the two differ.
    ("kernels/grid.py", "columns[1] * phases[1])", "columns[1] * phases[0])", REST),
    # The class token's part of the bias's gradient is dropped at another grid.
    (
        "kernels/grid_conv.py",
        "return dx, dweight, dbias + dv.sum(1).to(dbias.dtype)",
        "return dx, dweight, dbias",
        REST,
    ),
    # With fewer tokens than were trained the states can grow without bounds.
    ("kernels/step_area.py", "max(area, 1.0) ** (0.5", "area ** (0.5", REST),
    # The gradient of A at another grid is that of A / area.
    ("kernels/operators.py", "steps.undo_A(dA),", "dA,", REST),
    # At another grid, or with missing patches, the second direction is not in scan order.
    (
        "kernels/exportable.py",
        "torch.stack((ahead, back.flip(1)), 1)",
        "torch.stack((ahead, back), 1)",
        REST,
    ),
    # ---- vil
    # Where nothing is left, the norm's bias stands instead of zeros.
    (
        "vil/pyramid.py",
        "return self.norm(x.masked_fill(left_out, 0)).masked_fill(left_out, 0)",
        "return self.norm(x.masked_fill(left_out, 0))",
        "tests/vil",
    ),
    # Stochastic depth no longer keeps the mean.
    (
        "vil/backbone.py",
        "DropPath(drop_path) if",
        "DropPath(drop_path, scale_by_keep=False) if",
        "tests/vil",
    ),
    # Skip weights are decayed.
    ("vil/backbone.py", '("conv_bias", "dt_bias", "D")', '("conv_bias", "dt_bias")', "tests/vil"),
    # Of an odd number of patches, the patch behind the class token is handed out as the latter.
    (
        "vil/backbone.py",
        "middle = (x.shape[1] - 1) // 2",
        "middle = x.shape[1] // 2",
        "tests/vil",
    ),
    # With gradient checkpointing, stochastic depth drops others when blocks are computed again.
    (
        "vil/backbone.py",
        "checkpoint(block, x, grid) if recompute",
        "checkpoint(block, x, grid, preserve_rng_state=False) if recompute",
        "tests/vil",
    ),
    # Both directions of Mamba start with small steps; of Vision Mamba only the first does.
    ("vil/mixer.py", "self.dt_bias[0].copy_(", "self.dt_bias.copy_(", "tests/vil"),
    # The directions of an official checkpoint change places.
    (
        "vil/convert.py",
        '"dt_bias": ("dt_proj.bias", "dt_proj_b.bias")',
        '"dt_bias": ("dt_proj_b.bias", "dt_proj.bias")',
        "tests/vil",
    ),
    # Rows and columns of a checkpoint's grid change places where its positions are resampled.
    ("vil/state_dicts.py", "old_size=grid,", "old_size=grid[::-1],", "tests/vil"),
    # Code in a file of weights is executed.
    (
        "vil/weights.py",
        'content = torch.load(file, map_location="cpu", weights_only=True)',
        'content = torch.load(file, map_location="cpu", weights_only=False)',
        "tests/vil",
    ),
    # Patches that overlap belong to an image although some of their pixels are masked.
    (
        "vil/masks.py",
        "F.avg_pool2d(whole, patch, stride)[:, 0] == 1",
        "F.avg_pool2d(whole, patch, stride)[:, 0] > 0",
        "tests/vil",
    ),
    # Features of a model whose blocks are no multiple of four come a block early.
    (
        "vil/registry.py",
        "{-(-depth * quarter // 4) - 1 for",
        "{depth * quarter // 4 - 1 for",
        "tests/vil",
    ),
    # The product over blocks in the wrong order.
    ("vil/maps/scans.py", "else mixed @ total", "else total @ mixed", "tests/vil"),
]


def copy_of(checkout: Path, folder: Path) -> Path:
    """Copy the files that git knows, or would add, into a folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (checkout / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, folder / name)
    return folder


def noticed_by(folder: Path, mutation: tuple[str, str, str, str]) -> str | None:
    """Return the first test that fails with a mutation, or None.

    Raises:
        ValueError: The mutation or its tests do not apply.
    """
    name, old, new, tests = mutation
    path = folder / name
    original = path.read_text() if path.exists() else ""
    if original.count(old) != 1:
        raise ValueError(f"{name} has {original.count(old)} times {old!r}, not once")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_text(original.replace(old, new))
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        path.write_text(original)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise ValueError(f"pytest {tests} ends with {done.returncode}: {done.stdout}{done.stderr}")
    return failed[1]


def results(checkout: Path, chosen: list, jobs: int) -> Iterator[tuple[tuple, str | None]]:
    """Yield each mutation with what noticed it, in order."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(jobs):
            copies.put(copy_of(checkout, Path(name, str(job))))

        def try_out(mutation: tuple[str, str, str, str]) -> str | None:
            folder = copies.get()
            try:
                return noticed_by(folder, mutation)
            except ValueError as error:
                return f"DOES NOT APPLY: {error}"
            finally:
                copies.put(folder)

        yield from zip(chosen, pool.map(try_out, chosen), strict=True)


def main() -> int:
    """Print what notices each mutation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--only", default="", help="a text in the names of files to mutate")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation[0]]
    bad = 0
    for (name, old, new, _), test in results(args.checkout.resolve(), chosen, args.jobs):
        bad += test is None or test.startswith("DOES NOT")
        print(f"{name}: {old.strip()!r} -> {new.strip()!r}: {test or 'UNNOTICED'}", flush=True)
    print(f"{len(chosen)} mutations, {bad} unnoticed or no longer applicable")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
