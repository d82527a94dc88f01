"""Every setting has a type and a range beside it, and a value outside of them is one line and exit code 2."""

import dataclasses
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import timm

import train_imagenet
from vil.forms import Range, Rule, misfit
from vil.messages import said
from vil.timm_arguments import NOT_OF_A_MODEL
from vil.training.config import TrainConfig
from vil.training.errors import SettingsError, run_script
from vil.training.recipes import read_recipe
from vil.training.run.preflight import check_ranges, check_settings

ROOT = Path(__file__).parents[2]
DIGITS = read_recipe(ROOT / "configs" / "digits.yaml")
FORMS = {
    f"{section.name}.{key}": form
    for section in dataclasses.fields(TrainConfig)
    for key, form in get_type_hints(section.default_factory, include_extras=True).items()
}


def undeclared(form: Any) -> Iterator[Any]:
    """Return the parts of a type whose values nothing limits."""
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        for part in parts:
            yield from undeclared(part)
    elif origin is tuple:
        yield from undeclared(parts[0])
    elif origin is Annotated:
        rules = parts[1:]
        if not rules or not all(isinstance(rule, Range | Rule) for rule in rules):
            yield form
        if get_origin(parts[0]) is tuple:
            yield from undeclared(parts[0])
    elif origin is not Literal and form not in (bool, NoneType):
        yield form


@pytest.mark.parametrize("key", FORMS)
def test_every_setting_has_a_range_beside_it(key: str) -> None:
    assert not list(undeclared(FORMS[key])), f"{key} has a type that takes any value"


def test_what_the_weights_of_timm_say_of_images_is_in_range() -> None:
    for name in timm.list_pretrained():
        cfg = timm.get_pretrained_cfg(name)
        for key in ("crop_pct", "mean", "std", "interpolation"):
            assert misfit(getattr(cfg, key), FORMS[f"data.{key}"], f"{name}: {key}") is None


def test_a_setting_without_a_range_is_found() -> None:
    for form in (int, float | None, str, tuple[float, ...], list[int], Annotated[int, "Range(1)"]):
        assert list(undeclared(form)), form


def ends(base: type, limits: Range) -> tuple[list[Any], list[Any]]:
    """Return numbers next to the ends of a range: those outside, and those inside."""
    low, high = limits.low, limits.high
    step = {
        int: lambda end, by: end + by,
        float: lambda end, by: math.nextafter(float(end), by * math.inf),
    }[base]
    outside, inside = [step(low, -1)], [step(low, 1)]
    (outside if limits.open == "low" else inside).append(base(low))
    if high < math.inf:
        outside += [step(high, 1)]
        inside += [step(high, -1)]
        (outside if limits.open == "high" else inside).append(base(high))
    return outside, inside


def cases(form: Any, draw: random.Random) -> tuple[list[Any], list[Any]]:
    """Return values that a type refuses, and values that it takes."""
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        (part,) = (part for part in parts if part is not NoneType)
        wrong, right = cases(part, draw)
        return [value for value in wrong if value is not None], [*right, None]
    if origin is Literal:
        return ["nope", "", 2, True, 1.0, None], list(parts)
    if form is bool:
        return [0, 1, "True", None], [True, False]
    if origin is tuple:
        wrong, right = cases(parts[0], draw)
        few = [draw.choice(right)] if parts[-1] is not Ellipsis else []
        around = [(value, draw.choice(right)) for value in wrong]
        return [*around, *([tuple(few)] if few else []), "x", 3, None], []
    base, *rules = parts
    if get_origin(base) is tuple:
        wrong, _ = cases(base, draw)
        both = {
            "at least one value": [()],
            "two numbers": [(0.5, 0.25)],
            "different": [(16, 16), ()],
        }
        (broken,) = (v for words, v in both.items() if words in rules[0].words)
        return wrong + broken, []
    if base is str:
        return ["", "a\0b", 5, 1.5, ["x"], None], ["x" * draw.randrange(1, 100)]
    outside, inside = ends(base, rules[0])
    huge = [-(10**30), 10**400, math.inf, -math.inf, math.nan]
    kinds = ["x", "1", [1], {"a": 1}, True, None] + ([1.5, 1.0] if base is int else [])
    return outside + huge + kinds, inside


def with_value(key: str, value: Any) -> TrainConfig:
    section, name = key.split(".")
    changed = dataclasses.replace(getattr(DIGITS, section), **{name: value})
    return dataclasses.replace(DIGITS, **{section: changed})


def told(key: str, value: Any) -> list[str]:
    """Return what is said about a setting, a line each."""
    try:
        check_ranges(with_value(key, value))
    except SettingsError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()]
    return []


@pytest.mark.parametrize("key", FORMS)
def test_values_at_and_beyond_the_ends_of_a_range(key: str) -> None:
    wrong, right = cases(FORMS[key], random.Random(key))
    for value in wrong:
        lines = [line for line in told(key, value) if line.startswith(key)]
        assert lines, f"{key} takes {said(value)}"
        assert " must " in lines[0], lines
        assert ", got " in lines[0], lines
        assert len(lines[0]) < 300, lines
        shown = [said(item) for item in (value, *(value if isinstance(value, tuple) else ()))]
        shown += ["got 1", "got none"] if isinstance(value, tuple) else []  # how many there are
        assert any(text in lines[0] for text in shown), lines
    for value in right:
        lines = [line for line in told(key, value) if line.startswith(key)]
        assert not lines, lines


def words_of(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, tuple) else (value,))]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> int:
    """Run train_imagenet.py in this process, but for its first step."""
    monkeypatch.setattr("vil.training.run.train.fit", lambda run: pytest.fail("it trains"))
    command = ["train_imagenet.py", "--run.output", str(tmp_path / "out"), *words]
    monkeypatch.setattr(sys, "argv", command)
    try:
        return run_script(train_imagenet.main)
    except SystemExit as error:  # of the parser, which has said why
        return error.code


@pytest.mark.parametrize("section", [field.name for field in dataclasses.fields(TrainConfig)])
def test_command_line_says_it_and_ends_with_2(
    section: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    draw = random.Random(section)
    for key, form in FORMS.items():
        if not key.startswith(f"{section}.") or form is bool:
            continue
        wrong = [value for value in cases(form, draw)[0] if isinstance(value, str | float | tuple)]
        wrong = [value for value in wrong if value not in ("", "1", 1.0, ())]
        # A word is text whatever it is, but for the empty one.
        words = [""] if "Annotated[str" in str(form) else words_of(draw.choice(wrong))
        code = run(monkeypatch, tmp_path, f"--{key.replace('_', '-')}={words[0]}", *words[1:])
        line = capsys.readouterr().err
        assert code == 2, (key, words, line)
        assert key.replace("_", "-") in line.replace("_", "-"), (words, line)
        assert "Traceback" not in line, (key, words)
        assert not (tmp_path / "out").exists(), (key, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--optim.clip-grad", "-1"],
            "optim.clip_grad must be a finite number above 0 or None, got",
        ),
        (
            ["--optim.clip-grad", "0"],
            "optim.clip_grad must be a finite number above 0 or None, got",
        ),
        (["--data.std", "0"], "data.std[0] must be a finite number above 0 and at most 1, got 0.0"),
        (
            ["--run.seed", "-1"],
            "run.seed must be a whole number of at least 0 and at most 42949672",
        ),
        (["--run.seed", "4294967296"], "at least 0 and at most 4294967295, got 4294967296"),
        (
            ["--model.args", "norm_layer=nope"],
            "norm_layer must be None, a class, or a name that timm",
        ),
        (["--model.args", "norm_layer=5"], "norm_layer must be None, a class, or a name that timm"),
        (
            ["--data.mean", "0.5", "0.5"],
            "data.mean must have model.in_chans = 1 values, got (0.5, 0.5)",
        ),
        *((["--model.args", f"{key}=True"], f"got {key}=True") for key in NOT_OF_A_MODEL),
    ],
    ids=" ".join,
)
def test_what_would_have_failed_later_is_one_line(
    words: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert run(monkeypatch, tmp_path, *words) == 2
    assert expected in (line := capsys.readouterr().err)
    assert line.startswith("error: ")
    assert line.count("\n") == 1


def test_a_real_command_ends_so_too(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train_imagenet.py"), "--optim.clip-grad", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    expected = "error: optim.clip_grad must be a finite number above 0 or None, got -1.0\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_many_classes_of_fractals_are_counted_and_not_listed() -> None:
    """Two thousand million names would take the memory of the machine."""
    config = with_value("data.dataset", "fractals")
    model = dataclasses.replace(config.model, name="vil_tiny", num_classes=2**31 - 1)
    check_settings(
        dataclasses.replace(
            config, model=model, run=dataclasses.replace(config.run, output="output/none")
        ),
        1,
    )
