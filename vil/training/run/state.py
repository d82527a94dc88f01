"""How far a run has come, beside its weights: what a checkpoint keeps of it."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict


class LogRow(TypedDict):
    """What every row of the log has; where an average is kept, its scores too."""

    epoch: int
    lr: float
    train_loss: float
    val_loss: float
    top1: float
    top5: float
    skipped_images: int
    skipped_steps: int
    images_per_s: float
    seconds: float


class ChangeRow(TypedDict):
    """A setting changed on the way."""

    step: int
    epoch: int
    setting: str
    before: Any
    after: Any


@dataclass
class RunState:
    """Everything that the next step of a run depends on and that is no tensor."""

    step: int = 0
    """Steps done, skipped ones included."""
    loss_sum: float = 0.0
    """Of the epoch so far."""
    loss_count: int = 0
    """Steps in that sum."""
    seconds: float = 0.0
    """Spent on the epoch so far, by all starts of the run."""
    history: list[LogRow] = field(default_factory=list)
    """A row of the log per finished epoch."""
    bad_images: dict[int, str] = field(default_factory=dict)
    """Training images that could not be read so far, and why."""
    bad_steps: dict[int, float] = field(default_factory=dict)
    """Steps skipped because loss or gradient was not finite, and their loss."""
    changes: list[ChangeRow] = field(default_factory=list)
    """Settings changed on the way."""

    best_key: str = "top1"
    """What makes an epoch the best: top1, or ema_top1."""
    best_epoch: int = 0
    """Number of the epoch that best.pt is of, the first of equals; 0 if none is finished. Kept because
    with another best_key since then it may not be the best of all: the weights of others are gone."""

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Account for a finished epoch.

        Args:
            row: Of the log.
        """
        # Where the average began on the way, earlier epochs have none.
        score = row.get(self.best_key, -1.0)
        if not self.history or score > self.best.get(self.best_key, -1.0):
            self.best_epoch = len(self.history) + 1
        self.history.append(row)
        self.loss_sum, self.loss_count, self.seconds = 0.0, 0, 0.0

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch that best.pt is of."""
        return self.history[self.best_epoch - 1]

    @property
    def best_top1(self) -> float:
        """Its top-1 in percent."""
        return self.best.get(self.best_key, self.best["top1"])

    @property
    def best_is_last(self) -> bool:
        """Whether the epoch finished last is the best so far."""
        return bool(self.history) and self.best_epoch == len(self.history)

    @property
    def has_just_changed(self) -> bool:
        """Whether no step was made since settings were changed."""
        return bool(self.changes) and self.changes[-1]["step"] == self.step

    def as_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        """Undo as_dict; keys of other things are left alone."""
        return cls(**{item.name: values[item.name] for item in fields(cls)})
