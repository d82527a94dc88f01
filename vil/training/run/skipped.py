"""skipped.txt: every image and every step that a run left out, by name and reason."""

from pathlib import Path

from vil.training.data.batches import TrainData
from vil.training.errors import OutputError
from vil.training.files import write_text
from vil.training.run.resume import SKIPPED
from vil.training.run.state import RunState


def write_skipped(folder: Path, state: RunState, data: TrainData) -> None:
    """Write skipped.txt anew; remove one of an earlier start where nothing is skipped.

    Args:
        folder: The run's folder.
        state: Holds what was skipped.
        data: Names images.

    Raises:
        OutputError: it could not be written or removed.
    """
    if not (data.source.excluded or state.bad_images or state.bad_steps):
        try:
            (folder / SKIPPED).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot remove {folder / SKIPPED}: {error.strerror}") from error
        return
    bad = [f"{data.source.name(index)}: {why}" for index, why in state.bad_images.items()]
    lines = [
        f"{len(data.source.excluded)} images without a usable label, left out",
        *(f"  {line}" for line in data.source.excluded),
        f"{len(bad)} images that could not be read so far, each replaced by another",
        *(f"  {line}" for line in bad),
        f"{len(state.bad_steps)} steps whose loss or gradient was not finite, without effect",
    ]
    for step, loss in state.bad_steps.items():
        epoch, step_in_epoch = divmod(step, data.steps_per_epoch)
        lines.append(f"  step {step_in_epoch + 1} of epoch {epoch + 1}, loss {loss}, its images:")
        lines += [f"    {name}" for name in data.names(step)]
    write_text(folder / SKIPPED, "\n".join(lines) + "\n")
