"""What ``on_gpu.py`` runs: the parts in order, their commands, their shares of the time."""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ROOMS = ("benchmarks", "experiments")


@dataclass(frozen=True)
class Part:
    """A command that runs in a process of its own.

    In its arguments {output} is the folder of the records, {state} one for what is not a record, and
    {seconds} the time after which it should begin nothing new.
    """

    name: str
    what: str
    """Shown."""
    share: float
    """Of the time, relative to those of the parts after it; the seconds of 25 minutes."""
    command: tuple[str, ...]
    """Arguments of Python."""
    toy: tuple[str, ...]
    """The same, tiny and without a GPU."""
    record: str | None = None
    """File that the command writes."""
    own: float = 1.0
    """{seconds} as a share of the limit: the rest is for finishing what was begun."""

    def arguments(self, toy: bool, output: Path, state: Path, limit_s: float) -> list[str]:
        """Return the arguments of Python."""
        known = {"output": output, "state": state, "seconds": f"{self.own * limit_s:.0f}"}
        return [argument.format(**known) for argument in (self.toy if toy else self.command)]


_TINY = (
    *(
        "--run.no-amp",
        "--data.num-workers",
        "0",
        "--data.batch-size",
        "8",
        "--model.num-classes",
        "4",
    ),
    *("--model.img-size", "32", "--model.depth", "2", "--model.embed-dim", "48"),
    *("--augment.mix-size", "8"),
)
_SECONDS = ("--seconds", "{seconds}")
_GPU_TESTS = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
    "tests/kernels/triton/test_on_gpu.py",
    # The next part.
    "--deselect=tests/kernels/triton/test_on_gpu.py::test_every_backend_agrees_with_the_reference",
)
_SHAPE_TESTS = ("tests/kernels/triton/test_scans.py",)
# Those of an aim and of long sequences first.
_SHAPES = ("128,197,384", "8,6085,384", "64,197,768", "1,6085,384")
_SCAN = ("-m", "benchmarks.scan", "--resume", "--output", "{output}/scan.json", *_SECONDS)
_MODELS = (
    *("-m", "benchmarks.models", "deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny"),
    *("--memory", "--output", "{output}/models.json", *_SECONDS),
)
_STEPS = (
    *("train_imagenet.py", "--config", "configs/fractals.yaml", "--run.output", "{state}/steps"),
    *("--data.path", "{state}/fractals"),
    *("--schedule.epochs", "1", "--schedule.warmup-epochs", "0"),
)
_IMAGES = ("-m", "experiments.fractals", "{state}/fractals")
_TUNE = ("-m", "benchmarks.tune", "--output", "{output}/tune.json", *_SECONDS)
_RECALL = (
    *("-m", "experiments.recall", "--setting", "published", "--jobs", "3"),
    *(
        "--recurrences",
        "longhorn",
        "longhorn_exact",
        "mamba",
        "--rates",
        "2.2e-3",
        "--seeds",
        "123",
    ),
    *("--output", "{output}/recall.json", *_SECONDS),
)
_FRACTALS = (
    *(
        "-m",
        "experiments.images",
        "fractals_224",
        "--models",
        "ViL",
        "ViL exact",
        "ViM",
        "DeiT tiny",
    ),
    *("--rates", "2e-3", "--seeds", "0", "--output", "{output}/images.json", *_SECONDS),
)

PARTS = (
    # First, because its processes compile side by side what the later parts find compiled.
    Part(
        "tests",
        "the tests that need a GPU, and a dozen shapes",
        250,
        (*_GPU_TESTS, *_SHAPE_TESTS, "-n", "14"),
        _GPU_TESTS,
    ),
    Part(
        "selfcheck",
        "every backend against the reference",
        150,
        ("-m", "vil.selfcheck"),
        ("-m", "vil.selfcheck"),
    ),
    Part(
        "scans",
        "scans against the roofline and what else does the job",
        300,
        (*_SCAN, "--limit", "120", "--shapes", *_SHAPES),
        (*_SCAN, "--toy", "--repetitions", "2"),
        record="scan.json",
        own=0.65,
    ),
    Part(
        "models",
        "images/s and memory of whole models",
        350,
        (
            *(*_MODELS, "--device", "cuda", "--ways", "eager", "graphs", "compile"),
            *("--sizes", "224:128", "512:32", "1024:8"),
        ),
        (*_MODELS, "--sizes", "32:1", "--rounds", "1"),
        record="models.json",
        own=0.85,
    ),
    Part(
        "images",
        "the images that the next part trains on",
        60,
        (*_IMAGES, "--classes", "100", "--images", "640", "--jobs", "14"),
        (*_IMAGES, "--classes", "4", "--images", "16", "--size", "32", "--jobs", "1"),
    ),
    Part(
        "steps",
        "1,000 bfloat16 steps of the trainer, which counts those it skips",
        170,
        (
            *(*_STEPS, "--run.amp", "--data.num-workers", "14", "--data.batch-size", "64"),
            *("--model.num-classes", "100", "--augment.mix-size", "64"),
        ),
        (*_STEPS, *_TINY),
    ),
    Part(
        "blocks",
        "block sizes by time",
        180,
        (*_TUNE, "--jobs", "14"),
        (*_TUNE, "--toy"),
        record="tune.json",
        own=0.9,
    ),
    Part(
        "recall",
        "recall at 512 tokens",
        130,
        (*_RECALL, "--lengths", "512", "--dims", "64"),
        (
            *(*_RECALL, "--lengths", "64", "--dims", "16", "--vocabulary", "64", "--epochs", "2"),
            *("--train-count", "64", "--test-count", "64"),
        ),
        record="recall.json",
        own=0.8,
    ),
    Part(
        "fractals",
        "ViL, exact, ViM and DeiT on fractals at 224 px",
        200,
        (*_FRACTALS, "--steps", "100"),
        (*_FRACTALS, "--steps", "1", "--per-class", "4", "--with", *_TINY),
        record="images.json",
        own=0.85,
    ),
)


def sources(part: Part) -> str:
    """Return a digest of the files that a part's outcome depends on.

    These are the library and its kernels, the tests or the module that the part runs, and what this
    imports of benchmarks/ and experiments/.
    """
    paths = {*(ROOT / "vil").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")}
    queue = [ROOT / name for name in part.command if name.endswith(".py")]
    queue += [_path(name) for name in part.command if name.startswith(_ROOMS)]
    while queue:
        path = queue.pop()
        if path in paths:
            continue
        paths.add(path)
        queue += [_path(name) for name in _imports(path.read_text()) if _path(name).exists()]
    digest = hashlib.sha256(repr(part.command).encode())
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def _imports(source: str) -> Iterator[str]:
    """Return the modules of benchmarks/ and experiments/ that a source may import, by whole name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_ROOMS):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
