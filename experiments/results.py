"""Write docs/results.md, docs/imagenet.md, docs/maps.md and pictures from the records in experiments/results.

    python -m experiments.results

The prose is in experiments/templates; every table and every number in it comes from a record, which
names its command, device, versions, commit and seeds. What was not run is said not to be run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from experiments import (
    comparisons,
    dense_results,
    dense_sizes_results,
    faithfulness,
    faithfulness_results,
    grids_results,
    mqar_results,
    plan_answers,
    plan_results,
)
from experiments import finetune_results as finetuning
from experiments import vision_results as vision
from experiments.records import CHOICE_SEED, Row, select
from vil.training.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS, TEMPLATES = ROOT / "experiments" / "results", ROOT / "experiments" / "templates"
SPEEDS = ROOT / "benchmarks" / "results" / "train_speed.json"
DOCUMENTS = ("results.md", "imagenet.md", "maps.md")
IMAGES = ROOT / "docs" / "images"


@dataclass(frozen=True)
class ImageNetRun:
    """A row of the run sheet."""

    output: str
    """Folder of the run, and name of its result."""
    model: str
    """As train_speed.py names it."""
    paper: str
    """Top-1 in percent that was published."""
    arguments: str
    """Of train_imagenet.py."""
    patch_stride: int = 16

    @property
    def command(self) -> str:
        """The command, as on the sheet."""
        return (
            f"torchrun --nproc-per-node 8 --max-restarts 5 train_imagenet.py {self.arguments} "
            f"--data.path /data/imagenet --run.output output/{self.output}"
        )


def imagenet_runs() -> list[ImageNetRun]:
    """Return the rows of the paper's Table 3, the exact variants, and the finer ones."""
    published = {
        ("vim", "tiny"): "76.1",
        ("vil", "tiny"): "76.4",
        ("vim", "small"): "80.5",
        ("vil", "small"): "80.7",
    }
    runs = []
    for size in ("tiny", "small"):
        for family in ("vim", "vil"):
            name = f"{family}_{size}"
            config = f"--config configs/{name}.yaml"
            runs.append(ImageNetRun(name, name, published[family, size], config))
            if family == "vil":
                exact = f"{name}_exact"
                runs.append(ImageNetRun(exact, exact, "none", f"{config} --model.name {exact}"))
    finer = {"vim_tiny": "78.3", "vil_tiny": "none", "vim_small": "81.6", "vil_small": "none"}
    for name, paper in finer.items():
        config = f"--config configs/{name}_finer.yaml"
        runs.append(ImageNetRun(f"{name}_finer", name, paper, config, patch_stride=8))
    return runs


@dataclass(frozen=True)
class DownstreamRun:
    """A row of the sheet of segmentation and detection."""

    task: str
    """Module of downstream/."""
    model: str
    paper: str
    """What was published, and of which model."""
    data: str

    @property
    def output(self) -> str:
        """Folder of the run, and name of its result."""
        return f"{self.task}_{self.model}"

    @property
    def command(self) -> str:
        """The command, as on the sheet."""
        return (
            f"torchrun --nproc-per-node 8 -m downstream.{self.task} --model {self.model}_pyramid "
            f"--weights output/{self.model}/best.pt --data {self.data} --output output/{self.output}"
        )


def downstream_runs() -> list[DownstreamRun]:
    """Return the rows: what is published of Vision Mamba, and ViL beside it."""
    scenes, objects = "/data/ADEChallengeData2016", "/data/coco"
    return [
        DownstreamRun("ade20k", "vim_tiny", "41.0 mIoU", scenes),
        DownstreamRun("ade20k", "vil_tiny", "none", scenes),
        DownstreamRun("ade20k", "vim_small", "44.9 mIoU", scenes),
        DownstreamRun("ade20k", "vil_small", "none", scenes),
        DownstreamRun("coco", "vim_tiny", "45.7 box AP", objects),
        DownstreamRun("coco", "vil_tiny", "none", objects),
    ]


def downstream_sheet() -> str:
    """Return a row for each run of segmentation and detection."""
    lines = ["| run | published | here | GPU hours | command |", "|---|---|---|---|---|"]
    for run in downstream_runs():
        result, speed = load(run.output), load(f"{run.output}_speed")
        figures = {"miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}
        here = [
            f"{result[key]:.1f} {unit}" for key, unit in figures.items() if key in (result or {})
        ]
        hours = f"{speed['hours']:,.0f} on {speed['device']}" if speed else "unmeasured"
        cells = (run.output, run.paper, ", ".join(here) or "not run", hours, f"`{run.command}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def load(name: str) -> dict[str, Any] | None:
    """Return a record, or None where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def reported(name: str) -> list[Row]:
    """Return the runs of a record that are reported, in the order of seeds."""
    record = load(name)
    rows = [] if record is None else record["runs"]
    return sorted((r for r in rows if r["seed"] != CHOICE_SEED), key=lambda row: row["seed"])


def provenance(name: str) -> str:
    """Tell where a record's figures come from."""
    record = load(name)
    if record is None:
        return "no record yet"
    seeds = sorted({row["seed"] for row in reported(name)})
    made = [record["environment"] | row for row in record["runs"]]  # a run may name its own
    parts = ("device", "torch", "timm", "python", "commit")
    where = {part: " and ".join(sorted({one[part] for one in made})) for part in parts}
    versions = ", ".join(f"{part} {where[part]}" for part in ("torch", "timm", "python"))
    return (
        f"`{record['command']}` on {where['device']}, {versions}, commit "
        f"{where['commit']}, seeds {', '.join(map(str, seeds))} "
        f"([`{name}.json`](../experiments/results/{name}.json))"
    )


def rates(name: str) -> str:
    """Tell which learning rate each model took."""
    rows = reported(name)
    return ", ".join(f"{m} {select(rows, model=m)[0]['lr']:g}" for m in vision.models(rows))


def ablation_findings(rows: list[Row]) -> dict[str, bool]:
    """Return which variants' top-1 differs from the published choice beyond the noise, by model."""
    judged = {
        name: comparison
        for form in vision.variants.FORMS
        for name, comparison in vision.ablations(rows, form).items()
    }
    found = comparisons.beyond_noise(list(judged.values()))
    return dict(zip(judged, found, strict=True))


def hours(run: ImageNetRun) -> str:
    """Return the hours of 300 epochs on one GPU, from the measured images per second."""
    speeds = json.loads(SPEEDS.read_text()) if SPEEDS.exists() else None
    rows = [] if speeds is None else select(speeds["rows"], model=run.model)
    if not rows or run.patch_stride != 16:
        return "unmeasured"
    return f"{rows[0]['hours']:,.0f} on one {speeds['environment']['device']}"


def imagenet_result(run: ImageNetRun) -> str:
    """Return the top-1 that eval.py found for a run."""
    result = load(f"imagenet_{run.output}")
    return "not run" if result is None else f"{result['top1']:.2f}"


def run_sheet() -> str:
    """Return a row for each run on ImageNet."""
    lines = ["| run | published top-1 | here | GPU hours | command |", "|---|---|---|---|---|"]
    for run in imagenet_runs():
        cells = (run.output, run.paper, imagenet_result(run), hours(run), f"`{run.command}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ output


def vision_blocks(name: str) -> dict[str, str]:
    """Return what a comparison of the models adds to the templates, and draw its pictures."""
    record = f"vision_{name}"
    rows = reported(record)
    if not rows:
        return {"accuracy": f"Not run yet: `python -m experiments.vision {name}`."}
    vision.draw_accuracy(rows, IMAGES / f"{name}_accuracy.png")
    return {
        "from": provenance(record),
        "rates": rates(record),
        "accuracy": vision.accuracy_table(rows),
        "differences": comparisons.table(vision.pairwise(rows)),
    }


def ablation_blocks() -> dict[str, str]:
    """Return what the ablations add to the templates, and draw their picture."""
    rows = reported("vision_ablations")
    vision.draw_ablations(rows, IMAGES / "ablations.png")
    found = ablation_findings(rows)
    return {
        "from": provenance("vision_ablations"),
        "table": vision.ablation_table(rows, found),
        "count": f"{sum(found.values())} of {len(found)}",
    }


def changes_blocks() -> dict[str, str]:
    """Return what the changes of Longhorn in images add to the templates."""
    rows = reported("vision_changes")
    table = (
        vision.changes_table(rows) if rows else "Not run: `python -m experiments.vision changes`."
    )
    return {"table": table, "from": provenance("vision_changes")}


def mqar_blocks() -> dict[str, str]:
    """Return what associative recall adds to the templates, and draw its pictures."""
    found = {}
    for setting in ("short", "long", "longer"):
        name = f"mqar_{setting}"
        rows = reported(name)
        found[f"{setting}_from"] = provenance(name)
        found[f"{setting}_table"] = mqar_results.table(rows) if rows else "Not run yet."
        if rows:
            mqar_results.draw(mqar_results.best_mean(rows), IMAGES / f"{name}.png")
    rows = reported("mqar_published")
    if rows:
        best = mqar_results.best_of_rates(rows)
        mqar_results.draw(best, IMAGES / "mqar_published.png")
        found["published"] = (
            f"{mqar_results.published_table(best)}\n\nFrom {provenance('mqar_published')}."
        )
    else:
        found["published"] = "Not run yet: `python -m experiments.mqar --setting published`."
    return found


def finetune_blocks() -> dict[str, str]:
    """Return what fine-tuning adds to the templates."""
    rows, tried = reported("finetune"), load("finetune")["runs"]
    return {
        "from": provenance("finetune"),
        "steps": f"{rows[0]['steps']:,}",
        "fractals": f"{next(row['fractals_top1'] for row in rows if 'fractals_top1' in row):.1f}",
        "search": finetuning.search_table(tried),
        "accuracy": finetuning.accuracy_table(rows),
        "differences": finetuning.differences_table(finetuning.differences(rows)),
    }


def dense_blocks() -> dict[str, str]:
    """Return what segmentation and detection add to the templates."""
    rows = load("dense")["runs"]
    return {
        "from": provenance("dense"),
        "segment": dense_results.metrics_table(rows, "segment"),
        "detect": dense_results.metrics_table(rows, "detect"),
        "search": dense_results.search_table(rows),
        "differences": comparisons.table(dense_results.differences(rows)),
        **dense_results.figures(rows),
    }


def dense_sizes_blocks() -> dict[str, str]:
    """Return what segmentation of larger images adds to the templates, and draw its picture."""
    rows = load("dense_sizes")["runs"]
    picture = IMAGES / "dense_sizes.png"
    dense_sizes_results.draw(rows, picture)
    parts = [
        "Mean IoU of all classes, in percent:",
        dense_sizes_results.scores_table(rows, "miou"),
        f"![Mean IoU and small letters by size](images/{picture.name})",
        "IoU of letters of less than 16 px, in percent:",
        dense_sizes_results.scores_table(rows, "small"),
        "IoU of the other letters, in percent:",
        dense_sizes_results.scores_table(rows, "large"),
        "CPU time of an image, as a multiple of the time of `whole`:",
        dense_sizes_results.times_table(rows),
        "Differences in mean IoU, seed by seed (paired t-test):",
        comparisons.table(dense_sizes_results.differences(rows)),
        "Training, and the mean IoU at 64 px by learning rate of a seed that is not reported:",
        dense_sizes_results.training_table(rows),
        dense_sizes_results.search_table(rows),
        f"From {provenance('dense_sizes')}.",
    ]
    return {"results": "\n\n".join(parts), **dense_sizes_results.figures(rows)}


def grids_blocks() -> dict[str, str]:
    """Return what other image sizes add to the templates, and draw their picture."""
    rows = reported("grids")
    grids_results.draw(rows, IMAGES / "grids.png")
    return {
        "from": provenance("grids"),
        "table": grids_results.table(rows),
        "missed": grids_results.missed_text(rows),
        **grids_results.figures(rows),
    }


def plan_blocks() -> dict[str, str]:
    """Return what the questions of PLAN.md add to the templates."""
    rows = plan_results.load()
    found = plan_answers.answers(rows)
    plan_answers.draw_all(rows, IMAGES)
    return {
        "decided": plan_answers.decided_text(found),
        "undecided": plan_answers.undecided_text(found),
        "pictures": plan_answers.undecided_pictures(found),
        "verdicts": plan_results.verdict_table(rows),
        "runs": plan_results.runs_text(rows),
    }


def faithfulness_blocks() -> dict[str, str]:
    """Return what the faithfulness of maps adds to the templates."""
    found: dict[str, str] = {}
    groups: dict[str, list[list[Row]]] = {fill: [] for fill in faithfulness.FILLS}
    for name in faithfulness.EXPERIMENTS:
        record = f"faithfulness_{name}"
        rows = reported(record)
        commits = sorted({row["trained_at"] for row in rows})
        found[f"{name}_from"] = f"{provenance(record)}; trained at commit {' or '.join(commits)}"
        if not rows:
            found[f"{name}_from"] = f"nothing: run `python -m experiments.faithfulness {name}`"
        for fill in faithfulness.FILLS:
            chosen = select(rows, fill=fill)
            groups[fill].append(chosen)
            table = faithfulness_results.table(chosen) if chosen else "Not run yet."
            found[f"{name}_{fill}"] = table
    best = {fill: faithfulness_results.recommended(rows) for fill, rows in groups.items()}
    return found | {f"recommended_{fill}": names for fill, names in best.items()}


def placeholders() -> dict[str, str]:
    """Return what the templates' placeholders stand for."""
    groups = {name: vision_blocks(name) for name in (*vision.COMPARED, "digits_lower_rate")}
    groups |= {"ablations": ablation_blocks(), "mqar": mqar_blocks(), "finetune": finetune_blocks()}
    groups["changes"] = changes_blocks()
    groups |= {"dense": dense_blocks(), "dense_sizes": dense_sizes_blocks()}
    groups["plan"] = plan_blocks()
    groups["faithfulness"] = faithfulness_blocks()
    groups["grids"] = grids_blocks()
    found = {
        f"{group}_{part}": text for group, parts in groups.items() for part, text in parts.items()
    }
    found["run_sheet"] = run_sheet()
    found["downstream_sheet"] = downstream_sheet()
    return found


def main() -> None:
    """Write the documents."""
    IMAGES.mkdir(exist_ok=True)
    found = placeholders()
    for name in DOCUMENTS:
        template = Template((TEMPLATES / name).read_text())
        write_text(ROOT / "docs" / name, template.substitute(found))


if __name__ == "__main__":
    main()
