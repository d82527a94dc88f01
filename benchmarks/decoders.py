"""Compare validation with Pillow and with torchvision on photographs: train on tiles of them, evaluate with either.

    apt-get install -y mate-backgrounds plasma-workspace-wallpapers
    python -m benchmarks.decoders output/decoders /usr/share/backgrounds/mate /usr/share/wallpapers

Every JPEG of at least 1,900 px is cut into tiles of 500 x 375 px, saved as JPEG of quality 90. A model learns which
photograph a tile is from, with configs/scratch.yaml, once with each decoder. Both models are evaluated with both
decoders on the tiles that were held out. Takes 15 minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

SIZE, LEAST, EPOCHS = (500, 375), 1900, 30
DECODERS = ("pillow", "torchvision")


def cut(folders: list[Path], output: Path) -> None:
    """Write the tiles of all photographs, a class for each photograph."""
    paths = sorted({path.resolve() for folder in folders for path in folder.rglob("*.jpg")})
    for number, path in enumerate(paths):
        with Image.open(path) as file:
            if file.width < LEAST:
                continue
            image = file.convert("RGB").resize((2000, round(2000 * file.height / file.width)))
        name = output / f"{number:02} {path.stem}"
        name.mkdir(parents=True)
        for top in range(0, image.height - SIZE[1] + 1, SIZE[1]):
            for left in range(0, image.width - SIZE[0] + 1, SIZE[0]):
                tile = image.crop((left, top, left + SIZE[0], top + SIZE[1]))
                tile.save(name / f"{top}-{left}.jpg", quality=90)


def run(*arguments: str) -> None:
    """Run a script of this repository."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Cut, train, evaluate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="new folder for tiles and runs")
    parser.add_argument("photographs", type=Path, nargs="+", help="folders")
    args = parser.parse_args()
    tiles = args.output / "tiles"
    cut(args.photographs, tiles)
    print("| trained with | evaluated with | top-1 (%) | loss | tiles |\n|---|---|---|---|---|")
    for trained in DECODERS:
        folder = args.output / trained
        run(
            *("train_imagenet.py", "--config", "configs/scratch.yaml", "--data.path", str(tiles)),
            *("--data.val-fraction", "0.4", "--data.decoder", trained),
            *("--schedule.epochs", str(EPOCHS), "--run.output", str(folder)),
        )
        for decoder in DECODERS:
            result = args.output / f"{trained}-{decoder}.json"
            options = ("--data.decoder", decoder, "--json", str(result))
            run("eval.py", str(folder / "last.pt"), *options)
            found = json.loads(result.read_text())
            print(
                f"| {trained} | {decoder} | {found['top1']:.2f} | {found['loss']:.4f} "
                f"| {found['num_images']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
