"""Write a checkpoint of train_imagenet.py as safetensors with the model's configuration.

    python release.py output/vil_tiny/best.pt vil_tiny_in1k

timm.create_model("local-dir:vil_tiny_in1k", pretrained=True) then loads it; the folder can be pushed to
a hub as it is.
Exit codes: see vil/training/errors.py.
"""

import sys

SETTINGS_FIRST = True  # for vil, which then leaves importing torch to when the arguments are right

from vil.training.errors import run_script
from vil.training.options import ReleaseConfig
from vil.training.recipes import parse_arguments


def main() -> None:
    """Release as the command line says."""
    options = parse_arguments(ReleaseConfig, sys.argv[1:])

    from vil.training.console import new_console
    from vil.training.run.release import release

    result = release(options)
    new_console().print(
        f"released {result['model']}, {result['weights']} of epoch {result['epoch']}\n"
        f"load it  import vil; "
        f"timm.create_model('local-dir:{result['folder']}', pretrained=True)"
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
