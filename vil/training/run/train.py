"""Training from the settings to the summary, in one of its processes."""

import torch
from rich.console import Console

from vil.training.config import TrainConfig
from vil.training.console import new_console
from vil.training.data.batches import TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.data.image_files import ImageList
from vil.training.data.shared_memory import check_shared_memory
from vil.training.data.sources import open_source
from vil.training.distributed import World, process_group, world_from_environment
from vil.training.errors import OutputError
from vil.training.run.checkpoint import About
from vil.training.run.loop import Run, fit
from vil.training.run.preflight import check_ranges
from vil.training.run.report import Report, print_banner
from vil.training.run.resolve import fill_from_data, fill_from_weights
from vil.training.run.resume import RunFolder, open_for_all, restore_or_start
from vil.training.run.sameness import check_same, described
from vil.training.run.setup import build_training, read_pretrained, resolve_device
from vil.training.run.stopping import Agreement, opening


def train(config: TrainConfig, listed: dict[bool, ImageList]) -> None:
    """Train as the settings say.

    Args:
        config: The settings as asked for, checked.
        listed: Images of folders, as far as they are listed: to train on under True, to validate on
            under False.
    """
    world = world_from_environment()
    device = resolve_device(config.run, world)
    console = new_console(quiet=not world.is_main)
    try:
        with (
            process_group(world, device),
            open_for_all(config, world, console.print) as folder,
        ):
            _train(folder, config, listed, console, device, world)
    except OSError as error:  # what no function above it had an answer to
        if error.errno is None:
            raise
        what = error.filename or f"a file of the run in {config.run.output}"
        raise OutputError(f"{what} cannot be read or written: {error.strerror}") from error


def _train(
    folder: RunFolder,
    asked: TrainConfig,
    listed: dict[bool, ImageList],
    console: Console,
    device: torch.device,
    world: World,
) -> None:
    """Build everything, go to where the run was, and train."""
    weights = read_pretrained(folder.config.model) if folder.checkpoint is None else None
    config = fill_from_weights(folder.config, weights)
    check_ranges(config)
    with opening(world):
        sources = [
            open_source(config.data, config.model, training, listed.get(training))
            for training in (True, False)
        ]
        splits = dict(zip(("training", "validation"), sources, strict=True))
        config = fill_from_data(config, *sources)
        seen = described(splits, setting=asked, resolved=config)
        seen["setting data.path"] = str(asked.data.path)  # all read below the main process's
    check_same(world, seen)
    train_data = TrainData(config, device, world, sources[0])
    val_data = ValData(config, device, world, sources[1])
    check_shared_memory(train_data.shared_bytes + val_data.shared_bytes, world)
    seed_everything(config.run.seed)
    training = build_training(config, device, world, weights, sources[0].classes)
    about = About(
        config=config,
        asked=folder.asked,
        fingerprints={split: source.fingerprint for split, source in splits.items()},
        classes=sources[0].classes,
    )
    state = restore_or_start(training, folder, about, world)
    if state.step == 0:
        val_data.check()
    print_banner(console, training, train_data, val_data, config, state)
    agreement = Agreement(world, config.run.save_minutes)
    report = Report(console, folder.path, config, train_data.steps_per_epoch, state, agreement)
    with agreement, report:
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
