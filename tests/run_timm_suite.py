#!/usr/bin/env python3
"""Run timm's own tests on this package's models.

    python tests/run_timm_suite.py [--models vil_tiny 'vim_*'] [--extended] [--timm-src DIR] [-k EXPRESSION]

No code of timm is copied. The tests come from a source tree of timm; by default pip downloads the source
distribution of the installed version. Only the lists of models are narrowed to ours. They stand where timm lists
vit_*, as plain-sequence models with ``forward_intermediates``. ``--extended`` adds tests that timm runs for single
models and that hold for any plain-sequence model.

The exit status is 0 if every expected test was collected and none failed.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Set before timm and torch are imported. GITHUB_ACTIONS makes timm hide tests.
os.environ.pop("GITHUB_ACTIONS", None)
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
sys.path[0] = str(Path(__file__).resolve().parents[1])  # not tests/, where tests/vil would hide the package

import pytest
import timm
import torch

import vil  # noqa: F401  registers the models

# Our models are added where timm's lists have these entries.
PLAIN, HAS_INTERMEDIATES = "vit_*", "vision_transformer"
# Tests that must be collected for every model.
EXPECTED = (
    *("test_model_forward", "test_model_backward", "test_model_default_cfgs_non_std"),
    *("test_model_forward_intermediates", "test_model_forward_intermediates_features"),
    *("test_model_forward_fx", "test_model_backward_fx"),
)
FILES = ("test_models.py", "test_model_input.py", "test_utils.py")
# timm's tests for single models: parameter names, and for ours the values after the model name.
EXTENDED = {
    "test_model_forward_features": ("model_name",),
    "test_prune_intermediate_layers_params_used": ("model_name",),
    "test_catavgmax_unsupported": ("model_name",),
    "test_features_only_feature_cls_class": ("model_name",),
    "test_freeze_unfreeze_root_parameters": ("model_name",),
    "test_head_hidden_size": ("model_name,model_kwargs", {"img_size": 64}),
    "test_headless_checkpoint_reload": ("model_name,kwargs", {}),
    "test_relpos_non_square_checkpoint_reload": ("model_name,kwargs", {}),
    "test_relpos_non_square_set_input_size": ("model_name,kwargs", {}),
    "test_relpos_family_set_input_size": ("model_name,kwargs,img_size,new_size", {}, 224, 256),
    "test_model_init_weights_after_to_empty": ("model_name,kwargs", {"img_size": 64}),
    "test_default_resize_hub_roundtrip": ("name,kwargs,img_size,new_size", {}, 64, 96),
    "test_export_tracks_reset_classifier_structure": (*("model_name,kwargs,pool,reload_naflex", {}, "avg", None),),
}


def as_list(names: str | Iterable[str]) -> list[str]:
    return [names] * bool(names) if isinstance(names, str) else list(names)


class Suite:
    """A pytest plugin that narrows timm's lists of models to ours and counts outcomes."""

    def __init__(self, patterns: list[str], extended: bool) -> None:
        self.list_models, self.extended = timm.list_models, extended
        self.ours = sorted(set(timm.list_models(filter=patterns)))
        modules = (timm.models.model_entrypoint(name).__module__ for name in self.ours)
        self.modules = sorted({module.split(".")[-1] for module in modules})
        self.outcomes: Counter[str] = Counter()
        self.collected: set[tuple[str, str]] = set()
        for module in (timm, timm.models):
            module.list_models = self.narrowed
            module.list_pretrained = lambda *_, **__: []  # would download weights

    def narrowed(
        self,
        filter: str | list[str] = "",
        module: str | list[str] = "",
        pretrained: bool = False,
        exclude_filters: str | list[str] = "",
        name_matches_cfg: bool = False,
        include_tags: bool | None = None,
    ) -> list[str]:
        """List our models where timm lists its own; one without a default cfg must fail, not vanish."""
        filter, module, exclude = map(as_list, (filter, module, exclude_filters))
        filter += self.ours if PLAIN in filter else []
        exclude += self.ours if PLAIN in exclude else []
        module += self.modules if HAS_INTERMEDIATES in module else []
        found = self.list_models(filter, module, False, exclude, include_tags=include_tags)
        return [] if pretrained else [name for name in found if name.split(".")[0] in self.ours]

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run the tests for single models with our models."""
        names, *rest = EXTENDED.get(metafunc.definition.name, ("",))
        marks = metafunc.definition.own_markers
        for i, mark in enumerate(marks):
            given = mark.args[0] if mark.name == "parametrize" else ()
            given = given.split(",") if isinstance(given, str) else given
            if self.extended and [name.strip() for name in given] == names.split(","):
                values = [(name, *rest) if rest else name for name in self.ours]
                marks[i] = pytest.mark.parametrize(names, values).mark

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        """Keep the tests of our models."""
        kept = []
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            name = params.get("model_name") or params.get("name")
            if isinstance(name, str) and name.split(".")[0] in self.ours:
                self.collected.add((item.originalname, name.split(".")[0]))
                kept.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_setup(self) -> None:
        """Give every test the same seed."""
        torch.manual_seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of each call, and of each setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1

    @property
    def missing(self) -> list[str]:
        """Expected tests that were not collected."""
        due = ((test, name) for test in EXPECTED for name in self.ours)
        return [f"{test}[{name}]" for test, name in due if (test, name) not in self.collected]


def source(folder: Path) -> Path:
    """Fetch the source distribution of the installed timm."""
    command = [sys.executable, "-m", "pip", "download", "-q", f"timm=={timm.__version__}"]
    subprocess.check_call([*command, "--no-deps", "--no-binary", "timm", "-d", str(folder)])
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.glob("timm-*") if path.is_dir())


def main() -> int:
    """Run the tests and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vil_*", "vim_*"], metavar="PATTERN")
    parser.add_argument("--extended", action="store_true", help="also tests for single models")
    parser.add_argument("--timm-src", default="pip", help="a source tree; pip fetches one")
    parser.add_argument("-k", default="", help="pytest's -k")
    args = parser.parse_args()
    suite = Suite(args.models, args.extended)
    with tempfile.TemporaryDirectory() as name:
        root = source(Path(name)) if args.timm_src == "pip" else Path(args.timm_src).resolve()
        # This configuration replaces timm's and ours. importlib mode keeps the source tree out of
        # sys.path, so that the installed timm is tested.
        config = Path(name, "pytest.ini")
        config.write_text("[pytest]\nfilterwarnings = ignore\n")
        options = ["-v", "--durations", "10", "-c", str(config), f"--rootdir={root}"]
        options += ["--import-mode=importlib", "-p", "no:cacheprovider", "-k", args.k]
        files = FILES if args.extended else FILES[:1]
        status = pytest.main([*options, *(str(root / "tests" / f) for f in files)], [suite])
    missing = [] if args.k else suite.missing
    for test in missing:
        print(f"MISSING {test}")
    count, failed = suite.outcomes, suite.outcomes["failed"] + len(missing)
    print(f"timm suite: {count['passed']} passed, {failed} failed, {count['skipped']} skipped")
    return int(status != 0 or bool(missing) or not suite.ours)


if __name__ == "__main__":
    sys.exit(main())
