"""Train a Vision Longhorn, or any timm model, on images.

Without arguments: a small ViL on handwritten digits, about a minute on two CPU cores.

    python train_imagenet.py
    python train_imagenet.py --config configs/vil_tiny.yaml --data.path /data/imagenet
    torchrun --nproc-per-node 8 --max-restarts 5 train_imagenet.py --config configs/vil_tiny.yaml \
        --data.path /data/imagenet

The same command again, with the --run.output of a run, continues it where it was.
Exit codes: see vil/training/errors.py.
"""

import sys
from pathlib import Path

import torch
from rich.console import Console

from vil.training.checkpoint import About
from vil.training.data import TrainData, ValData, check_same_classes
from vil.training.distributed import World, process_group, world_from_environment
from vil.training.draws import seed_everything
from vil.training.errors import run_script
from vil.training.loop import Run, fit
from vil.training.recipes import load_config
from vil.training.report import Report, new_console, print_banner
from vil.training.resolve import fill_from_data, fill_from_weights
from vil.training.resume import RunFolder, open_for_all, restore_or_start
from vil.training.setup import build_training, read_pretrained, resolve_device
from vil.training.sources import open_source
from vil.training.stopping import Agreement
from vil.training.tracking import check_installed

DEFAULT_RECIPE = Path(__file__).parent / "configs" / "digits.yaml"


def main() -> None:
    """Train as the command line says."""
    config, recipe = load_config(sys.argv[1:], DEFAULT_RECIPE)
    check_installed(config.run.tracker)
    world = world_from_environment()
    device = resolve_device(config.run, world)
    with process_group(world, device):
        console = new_console(quiet=not world.is_main)
        with open_for_all(config, recipe, world, console.print) as folder:
            train(folder, console, device, world)


def train(folder: RunFolder, console: Console, device: torch.device, world: World) -> None:
    """Train in one of the run's processes."""
    weights = read_pretrained(folder.config.model) if folder.checkpoint is None else None
    config = fill_from_weights(folder.config, weights)
    with world.main_first():
        sources = [open_source(config.data, config.model, training) for training in (True, False)]
    config = fill_from_data(config, *sources)
    train_data = TrainData(config, device, world, sources[0])
    val_data = ValData(config, device, world, sources[1])
    check_same_classes(train_data, val_data)
    seed_everything(config.run.seed)
    training = build_training(config, device, world, weights, sources[0].classes)
    about = About(
        config=config,
        asked=folder.asked,
        fingerprints={"training": sources[0].fingerprint, "validation": sources[1].fingerprint},
        classes=sources[0].classes,
    )
    state = restore_or_start(training, folder, about, world)
    if state.step == 0:
        val_data.check()
    print_banner(console, training, train_data, val_data, config, state)
    with (
        Report(console, folder.path, config, train_data.steps_per_epoch, state) as report,
        Agreement(world, config.run.save_minutes) as agreement,
    ):
        fit(
            Run(
                training=training,
                train_data=train_data,
                val_data=val_data,
                about=about,
                folder=folder.path,
                state=state,
                agreement=agreement,
                report=report,
            )
        )
    report.summarize(config.model.name, val_data.num_images)


if __name__ == "__main__":
    sys.exit(run_script(main))
