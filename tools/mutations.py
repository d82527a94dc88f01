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
    "tests/kernels/test_fused_mixer.py tests/kernels/test_functional.py "
    "tests/kernels/test_onnx.py tests/kernels/test_workspace.py"
)

# File, text that stands in it once, what replaces the text, and the tests to run. Comments say what goes wrong.
MUTATIONS = [
    # Validation always crops at timm's 0.875, whatever data.crop_pct says.
    (
        "vil/training/transforms.py",
        "        crop_pct=data.crop_pct,\n",
        "",
        "tests/training/test_recipes.py",
    ),
    # All groups of mix_size in a micro-batch are erased and mixed by the same draws.
    (
        "vil/training/transforms.py",
        'key("augment", self.seed, step, place + start)',
        'key("augment", self.seed, step, place)',
        "tests/training/test_transforms.py",
    ),
    # With repeated augmentation an epoch is no longer rounded down to a multiple of 256 images.
    (
        "vil/training/draws.py",
        "return num_images // _REPEAT_ROUND * _REPEAT_ROUND",
        "return num_images",
        "tests/training/test_draws.py",
    ),
    # The image that replaces an unreadable one gets the label of the unreadable one.
    (
        "vil/training/loader.py",
        "int(self.source.labels[index]), bad",
        "int(self.source.labels[draw.index]), bad",
        "tests/training/test_loader.py",
    ),
    # Repeated augmentation: all draws of an image in a row are augmented alike (easily missed).
    (
        "vil/training/loader.py",
        'key("image", seed, draw.epoch, draw.position)',
        'key("image", seed, draw.epoch, draw.index)',
        "tests/training/test_loader.py",
    ),
    # A loader process that dies is taken for a fault of a disk, and the run waits for it.
    (
        "vil/training/errors.py",
        'return "DataLoader" in str(error) and "Caught " not in str(error)',
        "return False",
        "tests/training/test_ways_out.py",
    ),
    # Training images in folders and validation images may have other classes.
    (
        "vil/training/loader.py",
        "    _check_classes(train, val)\n",
        "",
        "tests/training/test_loader.py",
    ),
    # With data.images_per_class the first image is never trained on.
    (
        "vil/training/images.py",
        "return drawn[drawn >= 0]",
        "return drawn[drawn > 0]",
        "tests/training/test_loader.py",
    ),
    # The checksum of an image in a shard is not verified.
    (
        "vil/training/shards.py",
        "if checksum not in (_NO_CHECKSUM, zlib.crc32(content)):",
        "if checksum not in (_NO_CHECKSUM, checksum):",
        "tests/training/test_shards.py",
    ),
    # A shard replaced by another one of the same size is read by the old index: old labels.
    (
        "vil/training/shards.py",
        "stamp == {key: index.get(key) for key in stamp}",
        'stamp["size"] == index["size"]',
        "tests/training/test_shards.py",
    ),
    # Of two tars in one file the images of the second are missing, and nothing says so.
    (
        "vil/training/shards.py",
        "or any(rest) or file.read(1):",
        "or any(rest[: tarfile.BLOCKSIZE]):",
        "tests/training/test_shards.py",
    ),
    # Verification of shards does not notice that a label is another one than was written.
    (
        "vil/training/make_shards.py",
        "scan(path) != [",
        "len(scan(path)) != len([",
        "tests/training/test_shards.py",
    ),
    # The gradient is clipped at twice the norm that is set.
    (
        "vil/training/engine.py",
        "clip_grads_with_norm_(parameters, config.optim.clip_grad, norm)",
        "clip_grads_with_norm_(parameters, 2 * config.optim.clip_grad, norm)",
        "tests/training/test_engine.py",
    ),
    # The averaged weights stay what they were at the start.
    (
        "vil/training/engine.py",
        "trainee.ema.update(trainee.model)",
        "pass",
        "tests/training/test_engine.py",
    ),
    # An optimiser that is not a fused one, SGD say, makes the step of a NaN gradient.
    (
        "vil/training/engine.py",
        "    elif not bad:",
        "    else:",
        "tests/training/test_engine.py",
    ),
    # From the second epoch on the model trains as in evaluation, without drop path.
    (
        "vil/training/train.py",
        "                trainee.model.train()\n",
        "",
        "tests/training/test_old_checkpoint.py tests/training/test_run.py tests/training/test_changes.py tests/training/test_engine.py",
    ),
    # A checkpoint within the epoch after the best one becomes best.pt.
    (
        "vil/training/checkpoint.py",
        " and self.loss_count == 0",
        "",
        "tests/training/test_checkpoint.py",
    ),
    # On resuming the average starts anew from the weights.
    (
        "vil/training/checkpoint.py",
        '_load(model, saved["state_dict_ema"])',
        '_load(model, saved["state_dict"])',
        "tests/training/test_run.py",
    ),
    # A run goes on with other settings than it had, such as the seed.
    (
        "vil/training/checkpoint.py",
        "refused = sorted(changed - allowed)",
        "refused = sorted(changed & allowed)",
        "tests/training/test_changes.py",
    ),
    # A run goes on with other images than it began with.
    (
        "vil/training/checkpoint.py",
        'if saved["data"].get(split) != fingerprint:',
        "if False:",
        "tests/training/test_run.py",
    ),
    # A damaged checkpoint is not put aside, and the next save makes it previous.pt.
    (
        "vil/training/checkpoint.py",
        "aside = bad.replace(bad.with_name",
        "aside = (bad.with_name",
        "tests/training/test_checkpoint.py",
    ),
    # Vectors and what model.no_weight_decay() names are decayed, too.
    (
        "vil/training/model.py",
        "layer_decay=config.layer_decay,",
        "layer_decay=config.layer_decay, filter_bias_and_bn=False,",
        "tests/training/test_recipes.py",
    ),
    # A signal that only another process than the main one receives is swallowed.
    (
        "vil/training/stopping.py",
        "torch.tensor([self.received, int(",
        "torch.tensor([self.world.is_main * self.received, int(",
        "-m ci tests/training/test_distributed.py -k signal",
    ),
    # Rows of steps.csv from after the checkpoint stay on resuming, and come again.
    (
        "vil/training/report.py",
        'not len(rows) < row["step"] <= self.state.step:',
        'not len(rows) < row["step"]:',
        "tests/training/test_watching.py",
    ),
    # A tracker that hangs is waited for after a signal as long as before.
    (
        "vil/training/report.py",
        "limit = _LIMIT_AT_SIGNAL if self.signals.received else _LIMIT",
        "limit = _LIMIT",
        "tests/training/test_watching.py -k tracker_that_hangs",
    ),
    # Processes whose images have other contents under the same names train together.
    (
        "vil/training/loader.py",
        "= source.fingerprint",
        "= source.listing",
        "tests/training/test_ranks.py",
    ),
    # Mean, deviation, interpolation and crop of model.pretrained are passed over.
    (
        "vil/training/resolve.py",
        "value = described.get(key, default)",
        "value = default",
        "tests/training/test_pretrained.py",
    ),
    # run.save_minutes has no effect: no checkpoint within an epoch, a crash costs all of it.
    (
        "vil/training/report.py",
        ">= 60 * self.config.run.save_minutes",
        ">= 1e9",
        "tests/training/test_run.py",
    ),
    # --no-amp is passed over where the run had amp: scores are those of bfloat16.
    (
        "vil/training/evaluation.py",
        "amp = config.run.amp if options.amp is None else options.amp",
        "amp = options.amp or config.run.amp",
        "tests/training/test_evaluation.py",
    ),
    # After a power loss the new file may be empty, and the old one is gone.
    (
        "vil/training/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/training/test_checkpoint.py",
    ),
    # optim.lr_base_size has no effect: a wrong learning rate where it is not 512.
    (
        "vil/training/settings.py",
        "ratio = self.data.batch_size / self.optim.lr_base_size",
        "ratio = self.data.batch_size / 512",
        "tests/training/test_run.py tests/training/test_finetuning.py",
    ),
    # A setting with a range takes any number.
    (
        "vil/training/settings.py",
        "Positive = Annotated[float, Field(gt=0)]",
        "Positive = Annotated[float, Field()]",
        "tests/training/test_settings.py",
    ),
    # Of a key that stands twice in a recipe the last is taken, without a word.
    (
        "vil/training/recipes.py",
        'yaml.load(path.read_text(encoding="utf-8"), _Loader)',
        'yaml.load(path.read_text(encoding="utf-8"), yaml.SafeLoader)',
        "tests/training/test_recipes.py",
    ),
    # The loss of another process ends in a traceback and code 1 instead of 6.
    (
        "vil/training/distributed.py",
        "if not _LOST.search(str(error))",
        "if not _LOST.match(str(error))",
        "-m ci tests/training/test_distributed.py -k lost",
    ),
    # ---- kernels/triton
    # Reads token r = live, one past the end, in a reverse scan whose last chunk is ragged.
    (
        "kernels/triton/recurrent.py",
        "mask = token_mask(r, num_valid, d, D, BLOCK_D)\n            x = load_row(",
        "mask = token_mask(r, num_valid + 1, d, D, BLOCK_D)\n            x = load_row(",
        "tests/kernels/triton",
    ),
    # The load that is a token ahead goes on behind the last token of the segment.
    (
        "kernels/triton/recurrent.py",
        "tl.where(i + 1 < count, sign, 0)",
        "tl.where(i < count, sign, 0)",
        "tests/kernels/triton",
    ),
    # A token that does not exist fades Mamba's state where a backward pass scans again: wrong
    # gradients of one reverse direction with an initial state and a ragged last chunk.
    (
        "kernels/triton/recurrent_parts.py",
        "return tl.where(mask, mamba.softplus(v), 0.0)\n    return",
        "return mamba.softplus(v)\n    return",
        "tests/kernels/triton",
    ),
    # Gradients of states are carried over splits in the direction of the scan, not against it.
    (
        "kernels/triton/recurrent_splits.py",
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
        "kernels/triton/chunk.py",
        "(1.0 + z * (1.0 - 2.0 * s))",
        "(1.0 + z * (1.0 - s))",
        "tests/kernels/triton",
    ),
    # kappa_scale on the products of two keys rather than on |k|^2: wrong where kappa_scale is not 1.
    (
        "kernels/triton/chunk_parts.py",
        "kappa_scale * dgram, dgram)",
        "dgram, kappa_scale * dgram)",
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
        'y = torch.empty((B, L, P), dtype=self.stored, device="cpu")',
        "y = workspace.empty((B, L, P), self.stored)",
        "tests/vil/test_recompute.py",
    ),
    # ---- the rest of kernels
    # Distances by columns use the phases of rows: wrong taps where the two differ.
    ("kernels/layout.py", "columns[1] * phases[1])", "columns[1] * phases[0])", REST),
    # The class token's part of the bias's gradient is dropped at another grid.
    (
        "kernels/layout.py",
        "return dx, dweight, dbias + dv.sum(1).to(dbias.dtype)",
        "return dx, dweight, dbias",
        REST,
    ),
    # With fewer tokens than were trained the states can grow without bounds.
    ("kernels/layout.py", "max(tokens_per_ref, 1.0) ** (0.5", "tokens_per_ref ** (0.5", REST),
    # The gradient of A at another grid is that of A / area.
    ("kernels/mixer.py", "steps.undo_A(grads.A),", "grads.A,", REST),
    # At another grid the second direction is not in scan order.
    (
        "kernels/onnx.py",
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
        "vil/block.py",
        "DropPath(drop_path) if",
        "DropPath(drop_path, scale_by_keep=False) if",
        "tests/vil",
    ),
    # Skip weights are decayed.
    ("vil/backbone.py", '("conv_bias", "dt_bias", "D")', '("conv_bias", "dt_bias")', "tests/vil"),
    # Of an odd number of patches, the patch behind the class token is handed out as the latter.
    (
        "vil/tokens.py",
        "middle = (x.shape[1] - 1) // 2",
        "middle = x.shape[1] // 2",
        "tests/vil",
    ),
    # With gradient checkpointing, stochastic depth drops others when blocks are computed again.
    (
        "vil/backbone.py",
        "checkpoint(block, x, layout) if",
        "checkpoint(block, x, layout, preserve_rng_state=False) if",
        "tests/vil",
    ),
    # Both directions of Mamba start with small steps; of Vision Mamba only the first does.
    ("vil/block.py", "self.dt_bias[0].copy_(", "self.dt_bias.copy_(", "tests/vil"),
    # The directions of an official checkpoint change places.
    (
        "vil/weights/adapt.py",
        '"dt_bias": ("dt_proj.bias", "dt_proj_b.bias")',
        '"dt_bias": ("dt_proj_b.bias", "dt_proj.bias")',
        "tests/vil",
    ),
    # Rows and columns of a checkpoint's grid change places where its positions are resampled.
    ("vil/weights/adapt.py", "old_size=grid,", "old_size=grid[::-1],", "tests/vil"),
    # Code in a file of weights is executed.
    (
        "vil/weights/archive.py",
        'torch.load(file, map_location="cpu", weights_only=True)',
        'torch.load(file, map_location="cpu", weights_only=False)',
        "tests/vil",
    ),
    # Patches that overlap belong to an image although some of their pixels are masked.
    (
        "vil/padded.py",
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
    ("vil/maps.py", "else mixed @ total", "else total @ mixed", "tests/vil"),
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
