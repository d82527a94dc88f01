#!/usr/bin/env python3
"""Run timm's own test-suite against the models that another package registers with timm.

    run_timm_suite.py --timm-src DIR --models 'vil_*' 'vim_*' [--extended] [--path SRC]

DIR is a timm source tree that has tests/ (default: $TIMM_SRC). 'pip' as DIR fetches the source
distribution of the installed timm, whose tests match it exactly. Nothing of timm is copied: the tests are
collected where they are, and only their lists of model names are narrowed to the models under test, as if
those models lived in timm and their authors had listed them as plain-sequence models with
forward_intermediates (as timm does for vit_*).

The last line printed is always "timm suite: N passed, N failed, N skipped"; exit status 0 iff nothing
failed and something passed.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# An entry of each of the lists in timm's tests that name model families; our models join the list it is in.
NON_STD = "vit_*"  # plain sequence output, no NCHW feature maps from forward_features()
HAS_INTERMEDIATES = "vision_transformer"  # modules whose models have forward_intermediates()
NO_JIT = "*naflex*"  # models that do not support torch.jit.script

# Tests that every model under test must at least be collected for.
EXPECTED = (
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs_non_std",
    "test_model_forward_intermediates",
    "test_model_forward_intermediates_features",
    "test_model_forward_fx",
    "test_model_backward_fx",
)

# --extended: tests that timm runs for a hand-written list of models but that hold for any plain-sequence
# model. test name -> (parameter names, parameters for model m). All files below tests/.
EXTENDED_FILES = ("test_models.py", "test_model_input.py", "test_utils.py")
EXTENDED = {
    "test_model_forward_features": ("model_name", lambda m: [m]),
    "test_prune_intermediate_layers_params_used": ("model_name", lambda m: [m]),
    "test_catavgmax_unsupported": ("model_name", lambda m: [m]),
    "test_features_only_feature_cls_class": ("model_name", lambda m: [m]),
    "test_head_hidden_size": ("model_name,model_kwargs", lambda m: [(m, {"img_size": 64})]),
    "test_headless_checkpoint_reload": ("model_name,kwargs", lambda m: [(m, {})]),
    "test_relpos_non_square_checkpoint_reload": ("model_name,kwargs", lambda m: [(m, {})]),
    "test_relpos_non_square_set_input_size": ("model_name,kwargs", lambda m: [(m, {})]),
    "test_relpos_family_set_input_size": (
        "model_name,kwargs,img_size,new_size",
        lambda m: [(m, {}, 224, 256)],
    ),
    "test_model_init_weights_after_to_empty": (
        "model_name,kwargs",
        lambda m: [(m, {"img_size": 64})],
    ),
    "test_default_resize_hub_roundtrip": (
        "name,kwargs,img_size,new_size",
        lambda m: [(m, {}, 64, 96)],
    ),
    "test_export_tracks_reset_classifier_structure": (
        "model_name,kwargs,pool,reload_naflex",
        lambda m: [(m, {}, "avg", None)],
    ),
    "test_freeze_unfreeze_root_parameters": ("model_name", lambda m: [m]),
}


def names_of(value):
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)


# ---------------------------------------------------------------- in the process that runs pytest


class Suite:
    """pytest plugin: narrows timm's parametrized lists to the models under test, reports as JSON lines."""

    def __init__(self, job):
        import timm
        import timm.models
        import torch

        __import__(job["module"])
        self.torch, self.job, self.events = torch, job, open(job["events"], "a", buffering=1)
        self.phases, self.done = {}, set(job["done"])
        self.list_models = timm.models.list_models
        self.ours = set(self.list_models(filter=job["models"]))
        self.arch_modules = sorted(
            {timm.models.model_entrypoint(m).__module__.split(".")[-1] for m in self.ours}
        )
        self.emit("models", names=sorted(self.ours), timm=timm.__version__, torch=torch.__version__)
        for module in (timm, timm.models):
            module.list_models = self.narrowed
            module.list_pretrained = lambda *a, **k: self.narrowed(*a, **dict(k, pretrained=True))

    def emit(self, what, **data):
        self.events.write(json.dumps(dict(data, ev=what)) + "\n")

    def narrowed(
        self,
        filter="",
        module="",
        pretrained=False,
        exclude_filters="",
        name_matches_cfg=False,
        include_tags=None,
    ):
        if pretrained and not self.job["pretrained"]:
            return []  # these download weights
        filter, module, exclude = names_of(filter), names_of(module), names_of(exclude_filters)
        patterns = sorted(self.ours)
        if NON_STD in filter:
            filter += patterns
        if NON_STD in exclude or (NO_JIT in exclude and not self.job["torchscript"]):
            exclude += patterns
        if HAS_INTERMEDIATES in module:
            module += self.arch_modules
        # name_matches_cfg is not passed on: a model that has no default cfg shall fail, not go missing
        found = self.list_models(
            filter=filter,
            module=module,
            pretrained=pretrained,
            exclude_filters=exclude,
            include_tags=include_tags,
        )
        return [n for n in found if n.split(".")[0] in self.ours]

    def retarget(self, metafunc):
        spec = EXTENDED.get(metafunc.definition.name)
        if not self.job["extended"] or spec is None:
            return
        import pytest

        for i, mark in enumerate(metafunc.definition.own_markers):
            names = mark.args[0] if mark.name == "parametrize" else ()
            if isinstance(names, str):
                names = names.split(",")
            names = [n.strip() for n in names]
            if names == spec[0].split(","):
                values = [v for m in sorted(self.ours) for v in spec[1](m)]
                metafunc.definition.own_markers[i] = pytest.mark.parametrize(spec[0], values).mark

    def wanted(self, item):
        params = getattr(item, "callspec", None)
        name = params and (params.params.get("model_name") or params.params.get("name"))
        return isinstance(name, str) and name.split(".")[0] in self.ours

    def collected(self, config, items):
        keep = [i for i in items if self.wanted(i)]
        drop = [i for i in items if not self.wanted(i)]
        self.emit("collected", ids=[self.short(i.nodeid) for i in keep])
        done = [i for i in keep if self.short(i.nodeid) in self.done]
        items[:] = [i for i in keep if i not in done]
        config.hook.pytest_deselected(items=drop + done)

    @staticmethod
    def short(nodeid):
        return Path(nodeid.split("::")[0]).name + "::" + nodeid.split("::", 1)[1]

    def start(self, nodeid):
        self.emit("start", id=self.short(nodeid))
        self.torch.manual_seed(0)
        self.cpu = time.process_time()

    def report(self, report):
        phases = self.phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when != "teardown":
            return
        bad = [r for r in phases if r.failed]
        outcome = "failed" if bad else "skipped" if any(r.skipped for r in phases) else "passed"
        text = ""
        if bad:
            text = bad[0].longreprtext
        elif outcome == "skipped":
            text = str(next(r for r in phases if r.skipped).longrepr[-1])
        self.emit(
            "end",
            id=self.short(report.nodeid),
            outcome=outcome,
            text=text,
            seconds=sum(r.duration for r in phases),
            cpu=time.process_time() - self.cpu,
        )


def run_pytest(job_file):
    # Started as a script, so its own folder comes first: tests/vil would hide the package.
    sys.path.remove(str(Path(__file__).resolve().parent))
    with open(job_file) as f:
        job = json.load(f)
    import pytest

    suite = Suite(job)

    class Plugin:
        @pytest.hookimpl(tryfirst=True)
        def pytest_generate_tests(self, metafunc):
            suite.retarget(metafunc)

        @pytest.hookimpl(trylast=True)  # after -k
        def pytest_collection_modifyitems(self, config, items):
            suite.collected(config, items)

        def pytest_runtest_logstart(self, nodeid, location):
            suite.start(nodeid)

        def pytest_runtest_logreport(self, report):
            suite.report(report)

        def pytest_collectreport(self, report):
            if report.failed:
                suite.emit("collect_error", text=report.longreprtext)

    return pytest.main(job["pytest_args"], plugins=[Plugin()])


# ------------------------------------------------------------------------- in the process that you start


def fetch_sdist(into):
    """The source distribution of the installed timm, from the package index."""
    version = subprocess.check_output(
        [sys.executable, "-c", "import timm; print(timm.__version__)"], cwd=into, text=True
    ).strip()
    subprocess.check_call(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            f"timm=={version}",
            "--no-deps",
            "--no-binary",
            "timm",
            "-d",
            str(into),
        ]
    )
    import tarfile

    with tarfile.open(next(Path(into).glob("timm-*.tar.gz"))) as tar:
        tar.extractall(into, filter="data")
    return next(p for p in Path(into).glob("timm-*") if p.is_dir())


def first_line(text):
    """The line of a pytest failure text that says what was wrong."""
    lines = [t[1:].strip() for t in text.splitlines() if t.startswith("E")]
    lines = [t for t in lines if t] or text.strip().splitlines()[-1:] or ["?"]
    return lines[0][:200]


def child_events(args, env, work, job, events):
    """Run pytest in a child process; yield what it reports, then how it ended."""
    with open(work / "log", "a") as log:
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child", str(job)],
            cwd=work,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    seen, last, slow = 0, time.monotonic(), False
    try:
        while True:
            over = child.poll() is not None
            lines = events.read_text().split("\n")[:-1]
            for line in lines[seen:]:
                last = time.monotonic()
                yield json.loads(line)
            seen = len(lines)
            if over:
                break
            if time.monotonic() - last > args.test_timeout:
                slow = True
                child.kill()
            time.sleep(0.1)
    finally:
        child.kill()
    how = (
        f"no end within {args.test_timeout:.0f} s"
        if slow
        else f"process ended with status {child.returncode}"
    )
    yield {"ev": "exit", "how": how}


def drive(args, work):
    """Run the tests in child processes; a test that kills or hangs its process counts as failed."""
    src = Path(fetch_sdist(work) if args.timm_src == "pip" else args.timm_src).resolve()
    files = list(EXTENDED_FILES) if args.extended else ["test_models.py"]
    paths = [src / "tests" / f for f in files]
    if not paths[0].is_file():
        sys.exit(f"{args.timm_src}: no tests/test_models.py there")
    ini = work / "pytest.ini"
    marks = (
        "base",
        "forward",
        "backward",
        "cfg",
        "cfg_nonstd",
        "torchscript",
        "features",
        "fxforward",
        "fxbackward",
    )
    ini.write_text(
        "[pytest]\nmarkers =\n" + "".join(f"    {m}: timm\n" for m in (*marks, "timeout"))
    )
    # own config file, so that neither timm's nor the caller's applies; importlib mode keeps DIR off sys.path,
    # so `import timm` stays the installed one
    pytest_args = [
        "-q",
        "--no-header",
        "-c",
        str(ini),
        f"--rootdir={src}",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *(str(p) for p in paths if p.is_file()),
    ]
    if args.k:
        pytest_args += ["-k", args.k]

    env = {k: v for k, v in os.environ.items() if k != "GITHUB_ACTIONS"}  # it hides tests
    env.update(HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    env.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(args.threads)))
    extra = [str(Path(p).resolve()) for p in args.path]
    inherited = [str(Path(p).resolve()) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join(extra + inherited)

    results, errors, models, dead = {}, [], None, 0
    while True:
        events, job = work / "events", work / "job"
        events.write_text("")
        job.write_text(
            json.dumps(
                {
                    "module": args.module,
                    "models": args.models,
                    "events": str(events),
                    "done": sorted(results),
                    "pretrained": args.pretrained,
                    "torchscript": not args.no_torchscript,
                    "extended": args.extended,
                    "pytest_args": pytest_args,
                }
            )
        )
        running, ids = None, None
        for event in child_events(args, env, work, job, events):
            if event["ev"] == "models" and models is None:
                models = event["names"]
                print(
                    f"timm {event['timm']}, torch {event['torch']}, tests from {src.name}; "
                    f"models: {' '.join(models) or 'NONE'}",
                    flush=True,
                )
            elif event["ev"] == "collected":
                ids = event["ids"]
            elif event["ev"] == "collect_error":
                errors.append(event["text"])
            elif event["ev"] == "start":
                running, since = event["id"], time.monotonic()
            elif event["ev"] == "end":
                running = None
                results[event["id"]] = event
                show(event, args.verbose)
            elif event["ev"] == "exit":
                how = event["how"]
        if running:  # the process died in this test: record it, run the rest in a new process
            results[running] = {
                "id": running,
                "outcome": "failed",
                "text": "E " + how,
                "cpu": 0.0,
                "seconds": time.monotonic() - since,
            }
            show(results[running], args.verbose)
            dead += 1
            if dead < 10:
                continue
        break

    if models is None or (ids is None and not errors):
        errors.append("pytest did not get to the tests:\n" + (work / "log").read_text()[-2000:])
    for pattern in args.models:
        if models is not None and not fnmatch.filter(models, pattern):
            errors.append(f"{args.module} registers no model {pattern}")
    missing = [i for i in ids or () if i not in results]
    if models and not args.k:
        got = {
            (i.split("::")[1].split("[")[0], m)
            for i in ids or ()
            for m in models
            if re.search(rf"[-\[]{re.escape(m)}[-.\]]", i)
        }
        due = [(t, m) for t in EXPECTED for m in models]
        missing += [f"{t}[{m}]" for t, m in due if (t, m) not in got]
    return results, missing, errors, models or []


def show(event, verbose):
    text = {"passed": "", "skipped": event["text"], "failed": first_line(event["text"])}[
        event["outcome"]
    ]
    print(
        f"{event['outcome'].upper():7} {event['seconds']:6.1f} s ({event['cpu']:5.1f} cpu)  {event['id']}"
        + (f"  {text}" if text else ""),
        flush=True,
    )
    if verbose and event["outcome"] == "failed":
        print(event["text"], flush=True)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--timm-src", default=os.environ.get("TIMM_SRC"), help="timm source tree, or 'pip'"
    )
    p.add_argument("--models", nargs="+", default=["vil_*", "vim_*"], metavar="PATTERN")
    p.add_argument("--module", default="vil", help="module whose import registers the models")
    p.add_argument(
        "--path", action="append", default=[], help="directory to import it from (repeatable)"
    )
    p.add_argument(
        "--extended", action="store_true", help="also timm's tests with hand-written model lists"
    )
    p.add_argument(
        "--no-torchscript", action="store_true", help="leave the torch.jit.script tests out"
    )
    p.add_argument(
        "--pretrained", action="store_true", help="also the tests that load pretrained weights"
    )
    p.add_argument("-k", help="pytest's -k")
    p.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; more than 1 is far slower for loops of small operations on a busy machine",
    )
    p.add_argument("--test-timeout", type=float, default=600, help="seconds without any progress")
    p.add_argument("--json", help="write the results there")
    p.add_argument("-v", "--verbose", action="store_true", help="print whole failure texts")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return run_pytest(args.child)
    if not args.timm_src:
        p.error("--timm-src or $TIMM_SRC is needed ('pip' fetches the installed version's)")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        results, missing, errors, models = drive(args, Path(work))
    for text in errors:
        print(f"ERROR   {text}")
    for name in missing:
        print(f"MISSING {name}")
    count = {
        o: sum(r["outcome"] == o for r in results.values()) for o in ("passed", "failed", "skipped")
    }
    count["failed"] += len(missing) + len(errors)
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {
                    "models": models,
                    "count": count,
                    "missing": missing,
                    "errors": errors,
                    "results": list(results.values()),
                },
                indent=1,
            )
        )
    print(f"{time.monotonic() - began:.0f} s")
    print(
        f"timm suite: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped",
        flush=True,
    )
    return 0 if count["passed"] and not count["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
