"""Size models: ``python -m vil.profile [MODEL ...] [--img-size PX]``.

Prints parameters and multiply-adds for one image, scans included. You can name any timm models; without a name, it
lists the models of this package. Exit status: 0, or 2 if timm has no such model, or the model refuses the size.

PyTorch's FlopCounterMode supports the operators as soon as ``vil`` is imported. For time and memory, see docs/speed.md.
"""

import argparse
from collections.abc import Sequence

import timm
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import vil.registry  # noqa: F401  (registers the models)
from vil.timm_models import create, evaluating, is_own

_ALIKE = ("*_exact_pyramid", "vim_*_pyramid")  # they add the same levels as the vil_* pyramids


def count_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Count the multiply-adds of one forward pass of one image, scans and convolutions included.

    Matrix products and convolutions are counted as in torch's FlopCounterMode. A scan counts, per
    direction, token, channel and state, 4 for diagonal Longhorn and Mamba and 3 for exact Longhorn,
    plus skip and gate. Exponentials, divisions, norms and activations are not counted. Nothing is
    computed: the model runs on meta tensors.

    Args:
        model: Any image model.
        input_size: (channels, height, width) of the image.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # Not empty_like, because quantized weights have no meta tensors of their own kind.
    shapes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items()}
    dtype = next(model.parameters()).dtype
    image = torch.empty(1, *input_size, device="meta", dtype=dtype)
    with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, (image,))
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Count all parameters, trainable or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def table_of_models(names: Sequence[str] = (), img_size: int | None = None) -> str:
    """Return a Markdown table of models with parameters and multiply-adds.

    Pyramids are counted with ``features_only=True``, without a head.

    Args:
        names: timm's names of the models. Default: this package's models, equal pyramids once.
        img_size: Height and width in pixels; None uses the configured size of each model.

    Raises:
        ValueError: timm has no such model, or the model cannot be created for this size.
    """
    rows = ["| model | parameters | GMACs |", "|---|---|---|"]
    own = filter(is_own, timm.list_models(("vil_*", "vim_*"), exclude_filters=list(_ALIKE)))
    for name in names or own:
        options = {"features_only": True} if name.endswith("_pyramid") else {}
        options |= {"img_size": img_size} if img_size else {}
        model = create(name, device="meta", **options)
        channels, *size = timm.get_pretrained_cfg(name).input_size
        macs = count_macs(model, (channels, *([img_size] * 2 if img_size else size)))
        rows.append(f"| `{name}` | {count_parameters(model):,} | {macs / 1e9:.2f} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of timm.list_models()")
    parser.add_argument("--img-size", type=int, metavar="PX", help="default: as configured")
    args = parser.parse_args(arguments)
    try:
        print(table_of_models(args.models, args.img_size))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
