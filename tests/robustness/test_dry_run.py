"""The dry run's verdict: evaluation and log must agree."""

import json
from pathlib import Path

import pytest

from tests.robustness import dry_run


@pytest.mark.parametrize(
    ("top1", "loss", "images", "epochs", "message"),
    [
        (10.0, 2.5, 1000, 1, None),
        (10.1, 2.5, 1000, 1, "eval.py found 10.1"),
        (10.0, 2.6, 1000, 1, "eval.py found 10.0 and 2.6"),
        (10.0, 2.5, 999, 1, "999 images"),
        (10.0, 2.5, 1000, 2, "1 epochs"),
    ],
)
def test_verdict(
    tmp_path: Path, top1: float, loss: float, images: int, epochs: int, message: str | None
) -> None:
    (tmp_path / "log.csv").write_text("epoch,top1,val_loss\n1,10.0,2.5\n")
    result = {"top1": top1, "loss": loss, "num_images": images}
    (tmp_path / "last-eval.json").write_text(json.dumps(result))
    if message is None:
        dry_run.check(tmp_path, epochs)
    else:
        with pytest.raises(SystemExit, match=message):
            dry_run.check(tmp_path, epochs)
