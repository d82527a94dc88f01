"""Draw what a model reads in an image: ``python -m vil.maps SOURCE IMAGE --output maps.png``.

    python -m vil.maps output/digits/best.pt digit.png --output maps.png
    python -m vil.maps my_model photo.jpg --target tench --img-size 384
    python -m vil.maps deit_tiny_patch16_224 photo.jpg

The image is preprocessed as in eval.py. Exit codes: see vil/training/errors.py.
"""

import sys

try:
    from vil.maps.command import MapsConfig, draw_as
    from vil.training.errors import run_script
    from vil.training.recipes import parse
except ModuleNotFoundError as error:
    sys.exit(f"python -m vil.maps needs {error.name}: pip install 'vision-longhorn[train]'")


def main() -> None:
    """Parse the command line and draw."""
    draw_as(parse(MapsConfig, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
