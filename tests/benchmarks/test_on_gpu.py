"""The command for a GPU: parts that fail, hang or are killed, what is run again, and its tables."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import on_gpu, on_gpu_parts, on_gpu_report, on_gpu_run, part_process, wheels
from benchmarks.on_gpu_parts import PARTS, ROOT, Part
from benchmarks.on_gpu_run import Session

ENVIRONMENT = {"device": "GPU", "arch": "9.0", "torch": "2.11.0"}


def part(name: str, code: str, share: float = 1.0) -> Part:
    """Return a part that runs some Python, which finds its arguments in sys.argv."""
    arguments = ("-c", f"import os, sys, time\n{code}", "{output}", "{seconds}")
    return Part(name, "something", share, arguments, arguments)


def session(folder: Path, minutes: float = 1.0, **environment: str) -> Session:
    """Open a session as another call of the command does."""
    opened = Session(folder / "out", folder / "work", ENVIRONMENT | environment, minutes, site=ROOT)
    opened._lock.close()  # as when its process has ended
    return opened


def statuses(folder: Path) -> dict[str, str]:
    """Return how every part ended, by the record."""
    content = json.loads((folder / "out" / "on_gpu.json").read_text())
    return {name: entry["status"] for name, entry in content["parts"].items()}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so, and fail after a while."""
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 10 s")


def is_alive(pid: int) -> bool:
    """Tell whether a process runs, and is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_fails_or_crashes_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    parts = [
        part("good", "print('fine')"),
        part("bad", "print('it is wrong'); sys.exit(1)"),
        part("crashing", "os.kill(os.getpid(), 11)"),
        part("short", "sys.exit(75)"),
        part("last", "print('still here')"),
    ]
    assert not session(tmp_path).run(parts)
    assert statuses(tmp_path) == {
        "good": "passed",
        "bad": "failed",
        "crashing": "crashed",
        "short": "unfinished",
        "last": "passed",
    }
    entries = json.loads((tmp_path / "out" / "on_gpu.json").read_text())["parts"]
    assert entries["bad"]["tail"] == "it is wrong\n"
    assert (entries["bad"]["code"], entries["crashing"]["code"]) == (1, -11)
    assert (tmp_path / "work" / "logs" / "last.log").read_text() == "still here\n"


def test_a_part_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    """Its child ignores the polite signal; where Python hung is in the log."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {child!r}])
open(sys.argv[1] + "/pid", "w").write(str(child.pid))
time.sleep(600)
"""
    parts = [part("hanging", code, share=0.1), part("last", "pass")]
    start = time.monotonic()
    assert not session(tmp_path, minutes=0.7).run(parts)
    assert time.monotonic() - start < 30
    assert statuses(tmp_path) == {"hanging": "timed out", "last": "passed"}
    pid = int((tmp_path / "out" / "pid").read_text())
    wait_for(lambda: not is_alive(pid))
    assert "Fatal Python error: Aborted" in (tmp_path / "work" / "logs" / "hanging.log").read_text()


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    count = "open(sys.argv[1] + '/count', 'a').write('x')"
    parts = [part("good", count), part("bad", f"{count}; sys.exit(1)")]
    for _ in range(2):
        assert not session(tmp_path).run(parts)
    assert (tmp_path / "out" / "count").read_text() == "xx"
    assert session(tmp_path).run(parts[:1], again=True)
    assert (tmp_path / "out" / "count").read_text() == "xxx"


def test_parts_that_were_cut_short_come_after_those_that_had_no_turn(tmp_path: Path) -> None:
    parts = [part("short", "sys.exit(75)"), part("good", "pass"), part("new", "pass")]
    opened = session(tmp_path)
    opened.run(parts[:2])
    assert [p.name for p in opened.queue(parts)] == ["new", "short"]


def test_other_files_make_a_part_run_anew_and_keep_its_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = part("it", "open(sys.argv[1] + '/it.json', 'a').write('x')")
    recording = Part("it", "", 1.0, write.command, write.toy, record="it.json")
    assert session(tmp_path).run([recording])
    monkeypatch.setattr(on_gpu_run, "sources", lambda part: "others")
    assert session(tmp_path).run([recording])
    assert (tmp_path / "out" / "it.json").read_text() == "x"
    assert (tmp_path / "out" / "it.old.json").read_text() == "x"


def test_another_gpu_is_refused(tmp_path: Path) -> None:
    session(tmp_path).run([part("good", "pass")])
    with pytest.raises(SystemExit, match="name another folder with --output"):
        session(tmp_path, device="another")


def test_time_is_that_of_all_calls_and_what_is_left_over_goes_on(tmp_path: Path) -> None:
    tell = "print(sys.argv[2])"
    parts = [part("first", tell, 1.0), part("second", tell, 1.0), part("third", tell, 2.0)]
    opened = session(tmp_path, minutes=10)
    opened._spent_before = 200
    opened.run(parts)
    entries = json.loads((tmp_path / "out" / "on_gpu.json").read_text())["parts"]
    limits = [entries[p.name]["limit_s"] for p in parts]
    assert limits == pytest.approx([400 / 4, 400 / 3, 400], abs=6)  # each takes a second or less
    assert float(entries["third"]["tail"]) == pytest.approx(limits[2], abs=1)
    again = session(tmp_path, minutes=10)
    assert 200 < again.spent_s < 220


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert not session(tmp_path, minutes=0.01).run([part("good", "pass")])
    assert statuses(tmp_path) == {"good": "not run"}


_CALL = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
SETTINGS_FIRST = True  # as in on_gpu.py
sys.path.insert(0, {root!r})
from benchmarks import on_gpu_run
from pathlib import Path
from benchmarks.on_gpu_parts import Part
code = ("-c", "import os, sys, time; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); "
        "time.sleep(600 if not os.path.exists(sys.argv[1] + '/quick') else 0)", "{{output}}")
parts = [Part("good", "", 1.0, ("-c", "pass"), ()), Part("slow", "", 1.0, code, ())]
folder = Path({folder!r})
session = on_gpu_run.Session(folder / "out", folder / "work", {environment!r}, 10)
sys.exit(0 if session.run(parts) else 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_stopped_at_any_moment_it_continues(tmp_path: Path, number: int) -> None:
    """The part that ran ends with the command, is marked, and is the first to run the next time."""
    values = {"root": str(ROOT), "folder": str(tmp_path)}
    command = [sys.executable, "-c", _CALL.format(**values, environment=ENVIRONMENT)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid_file = tmp_path / "out" / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    process.send_signal(number)
    process.wait(20)
    wait_for(lambda: not is_alive(int(pid_file.read_text())))
    expected = "running" if number == signal.SIGKILL else "interrupted"
    assert statuses(tmp_path) == {"good": "passed", "slow": expected}
    (tmp_path / "out" / "quick").touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "== good" not in done.stdout
    assert statuses(tmp_path) == {"good": "passed", "slow": "passed"}


def test_records_are_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the record while parts run finds a whole one."""
    monkeypatch.setattr(on_gpu_run, "HEARTBEAT_S", 0.0)
    path, whole = tmp_path / "out" / "on_gpu.json", []
    original = part_process._follow

    def follow(*arguments: object) -> int:
        whole.append(json.loads(path.read_text())["parts"]["it"]["status"])
        return original(*arguments)

    monkeypatch.setattr(part_process, "_follow", follow)
    assert session(tmp_path).run([part("it", "time.sleep(1)")])
    assert set(whole) == {"running"}
    assert len(whole) > 2
    assert not list((tmp_path / "out").glob(".*"))


# -------------------------------------------------------------------------------------- the parts


def test_parts_are_in_the_order_of_the_command() -> None:
    names = ["tests", "selfcheck", "scans", "models", "steps", "blocks", "recall", "fractals"]
    assert [part.name for part in PARTS] == names


@pytest.mark.parametrize("toy", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_arguments_name_files_that_exist_and_no_placeholder(part: Part, toy: bool) -> None:
    arguments = part.arguments(toy, Path("records"), Path("work"), 100.0)
    assert not any("{" in argument for argument in arguments)
    for argument in arguments:
        if argument.endswith(".py"):
            assert (ROOT / argument).exists()
        if argument.startswith(("benchmarks.", "experiments.")):
            assert (ROOT / f"{argument.replace('.', '/')}.py").exists()
    if part.record:
        assert f"records/{part.record}" in arguments
        seconds = float(arguments[arguments.index("--seconds") + 1])
        assert seconds == pytest.approx(100 * part.own)


def test_a_part_depends_on_the_library_its_script_and_what_that_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("vil", "kernels", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "benchmarks" / "a.py").write_text("from benchmarks import b\n")
    (tmp_path / "benchmarks" / "b.py").write_text("from benchmarks.c import name\n")
    for name in ("vil/x", "kernels/y", "benchmarks/c", "benchmarks/other"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(on_gpu_parts, "ROOT", tmp_path)
    it = Part("it", "", 1.0, ("-m", "benchmarks.a"), ())
    before = on_gpu_parts.sources(it)
    for name in ("vil/x", "kernels/y", "benchmarks/a", "benchmarks/b", "benchmarks/c"):
        path = tmp_path / f"{name}.py"
        text = path.read_text()
        path.write_text(f"{text}\n1\n")
        assert on_gpu_parts.sources(it) != before, name
        path.write_text(text)
    (tmp_path / "benchmarks" / "other.py").write_text("1")
    assert on_gpu_parts.sources(it) == before


def test_settled_rows_are_rows_of_pending() -> None:
    commands = on_gpu_report.pending_commands(on_gpu_report.PENDING.read_text())
    assert commands[0].startswith("python -m benchmarks.on_gpu")
    for part in PARTS:
        for start in part.settles:
            assert any(command.startswith(start) for command in commands), start


# ----------------------------------------------------------------------------------------- report


def write_records(folder: Path, toy: bool = False) -> None:
    """Write small records as the parts write them."""
    entry = {"status": "passed", "seconds": 12.3, "commit": "abc"}
    scans = [
        {"shape": [128, 197, 384], "pass": name, "contestant": contestant, "ms": 1.0}
        | {"of_roofline": 1.25, "faster_than": dict.fromkeys(on_gpu_report.SCANS[2:], 2.5)}
        for name in ("inference", "forward + backward")
        for contestant in on_gpu_report.SCANS
    ]
    models = [
        {"model": "vil_tiny", "size": 512, "pass_name": "training", "mode": mode}
        | {"ratio": ratio, "memory_ratio": 0.5}
        for mode, ratio in (("eager", 0.75), ("graphs", None))
    ]
    runs = [
        {"recurrence": name, "length": 512, "epochs": len(scores), "by_epoch": scores}
        for name, scores in zip(
            on_gpu_report.RECURRENCES, ([0.1, 0.2], [0.3, 0.4, 0.5], [0.1, 0.25]), strict=True
        )
    ]
    fractals = [
        {"model": name, "steps": steps, "top1": steps / 10 + i}
        for steps in (100, 200)
        for i, name in enumerate((*on_gpu_report.CLASSIFIERS, "DeiT"))
    ]
    contents = {
        "on_gpu.json": {"environment": ENVIRONMENT | {"toy": toy}, "parts": {"scans": entry}},
        "scan.json": {"rows": scans},
        "models_speed.json": {"rows": models},
        "train_steps.json": {
            "environment": {"steps": 1000},
            "rows": [{"model": "vim_tiny", "finite_steps": 1000}],
        },
        "mqar.json": {"settings": {"epochs": 64}, "runs": runs},
        "vision_turns.json": {"rows": fractals},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))


def test_report_from_records(tmp_path: Path) -> None:
    write_records(tmp_path)
    text = on_gpu_report.report(tmp_path)
    assert "forward + backward: times the roofline | 1.25 | 1.25 | 1.25 |" in text
    assert "speed relative to our own Mamba kernel's | 2.50 | 2.50 | 1 |" in text
    assert "CUDA graph / compiled | 0.75 / failed / - | not run yet | not run yet |" in text
    assert "training at 512 px, peak memory relative to `deit_tiny` | 0.50 | not run yet" in text
    assert "before one that is not finite | not run yet | not run yet | 1,000 |" in text
    assert "recall at 512 tokens after 2 epochs of 64, % | 20.0 | 40.0 | 25.0 |" in text
    assert "top-1 in % after 200 steps (DeiT: 23.0) | 20.0 | 21.0 | 22.0 |" in text
    assert (
        "| scans: scans against the roofline and what else does the job | passed | 12 | abc |"
        in text
    )
    assert "| `python -m benchmarks.scan` | done |" in text
    assert "| `python -m benchmarks.tune` | not run yet |" in text
    assert "TOY" not in text


def test_a_toy_is_marked_and_settles_nothing(tmp_path: Path) -> None:
    write_records(tmp_path, toy=True)
    text = on_gpu_report.report(tmp_path)
    assert text.startswith("TOY: ")
    assert "| `python -m benchmarks.scan` | passed |" in text
    assert "| done |" not in text


def test_readme_has_the_table_of_every_gpu_there_is_a_record_of() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "`python -m benchmarks.on_gpu --minutes 25`" in readme
    for path in on_gpu.RESULTS.glob("*/on_gpu.json"):
        records = on_gpu_report.load(path.parent)
        assert not records["on_gpu"]["environment"]["toy"]
        assert on_gpu_report.main_table(records) in readme


def test_report_alone_runs_nothing(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    write_records(tmp_path)
    assert on_gpu.main(["--report", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("GPU, arch 9.0, torch 2.11.0\n")


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(on_gpu_run, "facts", lambda site: {"device": None})
    assert on_gpu.main(["--wheels", "/nowhere"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- wheels


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """Write a wheel with one module, which tells its version."""
    import zipfile

    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_what_is_missing_or_too_old_is_lacking() -> None:
    carried = [wheels.Wheel(Path(n), n, "9", ()) for n in ("timm", "tyro", "rich")]
    names = {"timm": "1.0.22", "rich": "1"}
    assert [w.name for w in wheels.lacking(carried, names)] == ["timm", "tyro"]
    assert [w.name for w in wheels.lacking(carried, names | {"timm": "1.0.31"})] == ["tyro"]


def test_unmet_needs_are_told(tmp_path: Path) -> None:
    needs = ("b>=2", "c", 'd; extra == "more"', 'e; python_version < "3"')
    wheel = wheels.read(make_wheel(tmp_path, "a", "1", *needs))
    assert wheels.unmet([wheel], {"b": "1"}) == [
        "a 1 needs b>=2, there is 1",
        "a 1 needs c, there is None",
    ]
    assert wheels.unmet([wheel], {"b": "2", "c": "0"}) == []


def test_carried_packages_come_before_those_of_the_machine(tmp_path: Path) -> None:
    """They are seen by a part, and nothing is installed."""
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    make_wheel(folder, "vil_carried_thing", "1.5")
    assert wheels.use(folder, site) == ["vil-carried-thing 1.5"]
    code = "import vil_carried_thing, benchmarks.budget; print(vil_carried_thing.version)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=on_gpu_run.variables(site),
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1.5\n"
    assert wheels.use(tmp_path / "nothing", site) == []
    assert list(site.iterdir()) == []


def test_setup_of_mamba_ssm_is_patched_for_one_architecture_and_the_torch_there_is() -> None:
    setup = """
    if bare_metal_version >= Version("11.8"):
        cc_flag.append("-gencode")
        cc_flag.append("arch=compute_90,code=sm_90")
    flags = ["-O3", "-std=c++17"]
"""
    patched = """
    if bare_metal_version >= Version("11.8"):
        pass
    flags = ["-O3", "-std=c++17"]
"""
    assert wheels._patched(setup, "2.11.0+cu130") == patched
    assert wheels._patched(setup, "2.13.1") == patched.replace("c++17", "c++20")


def test_required_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{need}"' in text for need in wheels.REQUIRED)
    assert set(wheels.REQUIRED) <= set(wheels.PACKAGES)


@pytest.mark.slow
def test_every_part_runs_as_a_toy(tmp_path: Path) -> None:
    """From an empty folder to the tables, as on a machine with a GPU."""
    output = str(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.on_gpu",
            "--toy",
            "--output",
            output,
            "--wheels",
            "/nowhere",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    content = json.loads((tmp_path / "on_gpu.json").read_text())
    assert {entry["status"] for entry in content["parts"].values()} == {"passed"}
    assert content["environment"]["toy"] is True
    assert all((tmp_path / part.record).exists() for part in PARTS if part.record)
    assert "TOY: nothing below was measured on a GPU" in done.stdout
