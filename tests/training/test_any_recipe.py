"""Any recipe is a configuration or a line that says what is wrong with it."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.fuzzing import quick, thorough
from vil.training.config import TrainConfig
from vil.training.errors import ConfigError
from vil.training.recipes import flat_dict, read_recipe, to_yaml

KEYS = sorted(flat_dict(TrainConfig()))
SECTIONS = sorted({key.partition(".")[0] for key in KEYS})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["None", "null", "1e-3", "--run.seed", "-1", "digits", "True", "@x", "", " "])
    | st.dates()
    | st.binary(max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(scalars.filter(bool), inner, max_size=2)
    ),
    max_leaves=5,
)
recipes = st.dictionaries(
    st.sampled_from(SECTIONS) | scalars,
    st.dictionaries(st.sampled_from([key.partition(".")[2] for key in KEYS]) | scalars, values)
    | values,
    max_size=3,
)
# A setting that there is, with one value or a list.
settled = st.sampled_from(KEYS).flatmap(
    lambda key: st.tuples(st.just(key), scalars | st.lists(scalars, max_size=3))
)
TOKENS = (
    *("optim", "model", "run", "lr_base", "args", "seed", ":", ": ", "- ", "\n", "\n  ", "{", "}"),
    *("[", "]", ",", "&a ", "*a", "<<: *a", "? ", "| ", "> ", "'", '"', "#", "!!int ", "!!float "),
    *(
        "!!bool ",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!python/name:os.system ",
        "---\n",
        "%YAML",
    ),
    *("1", "2026-99-99", "1:1:1", ".inf", "0x", "~", "\t", "\x00", "\ufeff", "é", "%", "@", "`"),
)


def is_right_or_refused(path: Path) -> None:
    """Read a recipe, which gives a configuration that survives being written, or one line."""
    try:
        with redirect_stderr(io.StringIO()):  # what tyro explains
            config = read_recipe(path)
    except ConfigError:
        return
    path.write_text(to_yaml(config), encoding="utf-8")
    # Compared as text: NaN is not equal to itself.
    assert to_yaml(read_recipe(path)) == to_yaml(config)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


def nested(recipe: Path, content: object) -> None:
    recipe.write_text(yaml.safe_dump(content, allow_unicode=False), encoding="utf-8")
    is_right_or_refused(recipe)


def text(recipe: Path, content: str) -> None:
    recipe.write_bytes(content.encode(errors="surrogatepass"))
    is_right_or_refused(recipe)


def one_setting(recipe: Path, setting: tuple[str, object]) -> None:
    section, _, key = setting[0].partition(".")
    nested(recipe, {section: {key: setting[1]}})


CASES = {
    nested: recipes,
    text: st.text(max_size=60) | st.lists(st.sampled_from(TOKENS), max_size=25).map("".join),
    one_setting: settled,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_some_recipes(case: object, recipe: Path) -> None:
    settings(quick)(given(CASES[case])(lambda content: case(recipe, content)))()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_many_recipes(case: object, recipe: Path) -> None:
    settings(thorough)(given(CASES[case])(lambda content: case(recipe, content)))()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 5000, "is not YAML"),
        ("optim: {lr_base: 2026-99-99}", "is not YAML: month must be in"),
        ("optim: {lr_base: !!bool maybe}", "is not YAML"),
        ("optim: {lr_base: !!timestamp x}", "is not YAML"),
        ("model: {args: ['--run.seed', '5']}", r"model\.args must be a value or a list"),
        ("data: {path: {a: b}}", r"data\.path must be a value or a list .*; got dict"),
        ("data: {path: !!binary YWI=}", r"data\.path must be a value or a list .*; got bytes"),
        ("model: {args: [[a]]}", "got list"),
        ("&a {optim: *a}", r"unrecognized key optim\.optim"),
        ("0", "must map sections to keys, got 0"),
        ("1: {2: 3}", r"unrecognized key 1\.2"),
        ("optim: &o {lr_base: 1.0, lr_base: 2.0}\nrun: *o", "lr_base stands 2 times"),
        ("optim: {<<: {lr_base: 1.0, lr_base: 2.0}}", "lr_base stands 2 times"),
        ("optim: {<<: {opt: sgd}, <<: {opt: lamb}}", "<< stands 2 times"),
        ("optim: {'opt': sgd, opt: lamb}", "opt stands 2 times"),
    ],
)
def test_what_no_recipe_is_is_said(content: str, message: str, recipe: Path) -> None:
    recipe.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe)


def test_lists_in_lists_in_lists_are_not_written_out(recipe: Path) -> None:
    """Which would take the memory of the machine."""
    levels = [f"- &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    recipe.write_text("\n".join(["- &l0 [lol]", *levels]))
    with pytest.raises(ConfigError, match="must map sections to keys, got list"):
        read_recipe(recipe)
