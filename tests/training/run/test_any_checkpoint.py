"""Any file is a checkpoint or a line that says what is wrong with it, whatever its bytes and its content."""

import dataclasses
import io
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vil
from tests.training.fuzzing import quick
from tests.training.run.test_checkpoint import about, state
from vil.training.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from vil.training.distributed import World
from vil.training.errors import OutputError
from vil.training.run.checkpoint import load_checkpoint, save_checkpoint
from vil.training.run.resolve import fill_from_weights
from vil.training.run.setup import build_training

MOST = 2 << 30  # bytes that reading a checkpoint of 200 KB may take beside what is taken already


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint of the smallest model."""

    path: Path
    bytes: bytes
    content: dict


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("any")
    config = TrainConfig(
        model=ModelConfig(
            name="vil_tiny", num_classes=4, img_size=8, patch_size=8, embed_dim=4, depth=1
        ),
        data=DataConfig(path="images", batch_size=8),
        optim=OptimConfig(model_ema_decay=0.9),
        run=RunConfig(device="cpu"),
    )
    config = fill_from_weights(config, None)
    training = build_training(config, torch.device("cpu"), World())
    training.model(torch.zeros(1, 3, 8, 8)).sum().backward()
    training.optimizer.step()
    save_checkpoint(folder, training, about(config), state(50.0))
    path = folder / "last.pt"
    return Saved(path, path.read_bytes(), torch.load(path, weights_only=True))


@contextmanager
def little_memory() -> Iterator[None]:
    """Let an allocation of gigabytes fail."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_right_or_refused(path: Path, whole: dict | None = None) -> None:
    """Read a file for a run and for a model: each gives what was saved, or one line."""
    with little_memory():
        try:
            checkpoint = load_checkpoint(path)
        except OutputError as error:
            told = str(error)
        else:
            told = "x"
            if whole is not None:
                weights = whole["state_dict"]
                assert checkpoint["state_dict"].keys() == weights.keys()
                assert all(torch.equal(checkpoint["state_dict"][k], v) for k, v in weights.items())
        assert 0 < len(told) < 2000
        assert "\n" not in told
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vil.loading, "_logger", vil.loading.logging.getLogger("quiet"))
            try:
                vil.load(path)
            except (ValueError, LookupError) as error:
                told = str(error)
    assert "\n" not in told


def cut(saved: Saved, share: float) -> None:
    saved.path.write_bytes(saved.bytes[: int(share * len(saved.bytes))])
    is_right_or_refused(saved.path, saved.content)


def flipped(saved: Saved, places: list[float]) -> None:
    content = bytearray(saved.bytes)
    for place in places:
        bit = int(place * 8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    saved.path.write_bytes(content)
    is_right_or_refused(saved.path, saved.content)


def spliced(saved: Saved, cuts: tuple[float, float, float, bytes]) -> None:
    """Move a part to another place, or put something there."""
    start, end, to = (int(share * len(saved.bytes)) for share in cuts[:3])
    part = cuts[3] or saved.bytes[min(start, end) : max(start, end)]
    saved.path.write_bytes(saved.bytes[:to] + part + saved.bytes[to + len(part) * (end % 2) :])
    is_right_or_refused(saved.path, saved.content)


def rewritten(saved: Saved, part: tuple[int, bytes, int]) -> None:
    """Write bytes into a part of the archive, whose checksums are then right."""
    number, change, place = part
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved.bytes)) as old, zipfile.ZipFile(file, "w") as new:
        members = old.infolist()
        chosen = [member for member in members if member.filename.endswith("data.pkl")] + members
        for member in members:
            content = old.read(member)
            if member is chosen[number % len(chosen)] or (number < 40 and member is chosen[0]):
                place %= max(len(content), 1)
                content = content[:place] + change + content[place + len(change) :]
            new.writestr(member.filename, content)
    saved.path.write_bytes(file.getvalue())
    is_right_or_refused(saved.path)


def changed(saved: Saved, change: tuple[list[int], object]) -> None:
    """Put another value somewhere into the content."""
    path, value = change
    content = copied(saved.content)
    inner, parent = content, None
    for number in path:
        if not isinstance(inner, dict | list) or not inner:
            break
        key = list(inner)[number % len(inner)] if isinstance(inner, dict) else number % len(inner)
        parent, inner = (inner, key), inner[key]
    if parent is not None:
        parent[0][parent[1]] = value
    torch.save(content, saved.path)
    is_right_or_refused(saved.path)


def copied(content: object) -> object:
    """Copy dictionaries and lists, and no tensors."""
    if isinstance(content, dict):
        return {key: copied(value) for key, value in content.items()}
    return [copied(value) for value in content] if isinstance(content, list) else content


def anything(saved: Saved, content: object) -> None:
    torch.save(content, saved.path)
    is_right_or_refused(saved.path)


shares = st.floats(0, 1, exclude_max=True)
tensors = st.sampled_from(
    [
        torch.zeros(3),
        torch.zeros(0),
        torch.tensor(torch.nan),
        torch.zeros(1).expand(1 << 44),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2).to_sparse(),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
        torch.zeros(4, 4, dtype=torch.bool),
    ]
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**40, -(2**63)])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | tensors
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
keys = st.sampled_from(
    ["state_dict", "model", "arch", "epoch", "run", "config", "pretrained_cfg", "model_args"]
)
CASES: dict[Callable, st.SearchStrategy] = {
    cut: shares,
    flipped: st.lists(shares, min_size=1, max_size=4),
    spliced: st.tuples(shares, shares, shares, st.binary(max_size=30)),
    rewritten: st.tuples(
        st.integers(0, 200), st.binary(min_size=1, max_size=8), st.integers(0, 10**6)
    ),
    changed: st.tuples(st.lists(st.integers(0, 500), min_size=1, max_size=5), values),
    anything: values | st.dictionaries(keys, values, max_size=4),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_some_files(case: Callable, saved: Saved) -> None:
    settings(quick)(given(CASES[case])(lambda content: case(saved, content)))()
