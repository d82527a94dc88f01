"""Predict on photographs with a model that an example trained."""

from training import path_of, preparation

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from folders import find_photos, read_photo
from vil.weights.archive import load_archive


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the option that predicts instead of training."""
    words = "images, or folders of them: predict on these with the model in --output instead of training"
    parser.add_argument("--predict", type=path_of, nargs="+", metavar="PATH", help=words)


def predict_photos(
    args: argparse.Namespace,
    create: Callable[[argparse.Namespace, int], nn.Module],
    show: Callable[[nn.Module, Tensor, Tensor, Path], str],
) -> None:
    """Predict on the photographs of --predict: save a picture of each in predictions/ of --output, and print a line.

    Args:
        args: Options of ``parse``.
        create: Returns the model, from the options and the number of classes.
        show: Writes the picture of a photograph, and says in words what was found. Called with the model, the
            photograph, (3, H, W), uint8, the same prepared as a batch of one, and the path of the picture.

    Raises:
        FileNotFoundError: If photographs or weights are missing.
        ValueError: If the weights are damaged or do not fit model.json, or two photographs have the same name.
        OSError: After all other photographs, if some cannot be read.
    """
    photos, path, bad = find_photos(args.predict), args.output / "weights.pt", []
    model = create(args, len(args.classes))
    try:
        model.load_state_dict(load_archive(path))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{path} does not fit the model of {args.output / 'model.json'}: {error}") from error
    model, prepare = model.to(args.device).eval(), preparation(args.img_size)
    for name, source in photos.items():
        try:
            photo = read_photo(source)
        except OSError as error:
            bad.append(str(error))
            continue
        target = args.output / "predictions" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode():
            words = show(model, photo, prepare(photo)[None].to(args.device), target)
        print(f"{source} -> {target}: {words or 'nothing'}")
    if bad:
        raise OSError(f"{len(bad)} of {len(photos)} images have no prediction: {'; '.join(bad)}")
