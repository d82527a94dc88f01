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

from vil.training.config import TrainConfig
from vil.training.data import TrainData, ValData, check_same_classes
from vil.training.distributed import World, process_group, world_from_environment
from vil.training.draws import seed_everything
from vil.training.errors import run_script
from vil.training.loop import Run, fit
from vil.training.recipes import load_config
from vil.training.report import Report, new_console, print_banner
from vil.training.resume import open_for_all, restore_or_start, with_output
from vil.training.setup import build_training, resolve_device
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
        train(config, recipe, device, world)


def train(config: TrainConfig, recipe: str, device: torch.device, world: World) -> None:
    """Train in one of the run's processes."""
    console = new_console(quiet=not world.is_main)
    with open_for_all(config, recipe, world, console.print) as folder:
        config = with_output(config, folder.path)
        seed_everything(config.run.seed)
        training = build_training(config, device, world)
        with world.main_first():
            train_data = TrainData(config, device, world)
            val_data = ValData(config, device, world)
        check_same_classes(train_data, val_data)
        fingerprints = {
            "training": train_data.source.fingerprint,
            "validation": val_data.source.fingerprint,
        }
        state = restore_or_start(training, folder, config, fingerprints)
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
                    config=config,
                    folder=folder.path,
                    state=state,
                    fingerprints=fingerprints,
                    agreement=agreement,
                    report=report,
                )
            )
        report.summarize(config.model.name, val_data.num_images)


if __name__ == "__main__":
    sys.exit(run_script(main))
