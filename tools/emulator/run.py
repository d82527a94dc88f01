"""Execute the compiled PTX of every Triton kernel of vil on the CPU and check it.

    python tools/emulator/run.py [--arch 80 90 120] [--quick | --bias] [--only TEXT ...] [--json FILE]

The exit status is 0 only if the emulator reported every planted fault, every case agrees with the
float64 reference, and no launch had a fault. Faults are races, out-of-bounds and misaligned
accesses, and reads of unwritten memory. See README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases
import runtime
import selftest

# Largest error relative to the largest value, as in the project's tests on a GPU. Exception: the
# exact form multiplies its float32 state in TF32 where activations are half precision.
TOLERANCE = {"f32": 1e-5, "bf16": 2**-7, "f16": 2**-10}
EXACT_TOLERANCE = {**TOLERANCE, "f16": 2**-9}
BIAS_TOLERANCE = 1e-4

# Runs cases in Triton's interpreter: names on stdin, a JSON line [name, errors] for each on stdout.
INTERPRETER = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import cases
names = json.loads(sys.stdin.read())
for c in cases.all_cases():
    if c.name in names:
        try:
            print(json.dumps([c.name, cases.errors(c)]), flush=True)
        except Exception as error:
            print(json.dumps([c.name, {"error": repr(error)[:200]}]), flush=True)
"""


def interpret(names: list[str]) -> dict[str, dict]:
    """Return the errors of cases in Triton's interpreter, which runs in a separate process."""
    command = [sys.executable, "-c", INTERPRETER, str(HERE)]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": cache}
        out = subprocess.run(
            command, input=json.dumps(names), capture_output=True, text=True, env=env
        )
    if out.returncode:
        print(out.stderr[-2000:])
    return dict(json.loads(line) for line in out.stdout.splitlines() if line.startswith("["))


def tolerance(c: cases.Case) -> float:
    """Return the largest error that a case may have."""
    limit = (EXACT_TOLERANCE if c.op == "exact" else TOLERANCE)[c.dtype]
    return 2 * limit if c.op in ("mixer", "model") else limit


def judge(c: cases.Case, measure: Callable[[cases.Case], dict[str, float]], limit: float) -> dict:
    """Run a case and return its result.

    Args:
        c: The case.
        measure: Returns a number for every output and gradient of a case.
        limit: Largest magnitude allowed for these numbers.
    """
    runtime.clear()
    start = time.time()
    try:
        errors, failure = measure(c), ""
    except Exception as error:  # any failure must leave the other cases running
        errors, failure = {}, f"{type(error).__name__}: {error}"[:300]
    worst = max(errors, key=lambda n: abs(errors[n])) if errors else ""
    records = runtime.STATE.records
    if not records and not failure:
        failure = "no kernel was launched"
    return {
        "arch": runtime.STATE.arch,
        "case": c.name,
        "ok": not failure
        and not runtime.faults()
        and all(abs(v) <= limit for v in errors.values()),
        "errors": errors,
        "worst": worst,
        "failure": failure,
        "seconds": time.time() - start,
        "kinds": dict(Counter(f["kind"] for r in records for f in r.findings)),
        "launches": [vars(r) for r in records],
    }


def report(result: dict) -> None:
    """Print a result and its findings, each source line once."""
    text = result["failure"] or f"{result['errors'][result['worst']]:.1e} ({result['worst']}"
    if not result["failure"]:
        known = [v for v in result["interpreter"].values() if isinstance(v, float)]
        text += f"; interpreter {max(known):.1e})" if known else ")"
    instructions = sum(r["instructions"] for r in result["launches"]) / 1e6
    print(
        f"{'ok  ' if result['ok'] else 'FAIL'} sm_{result['arch']} {result['case']}: {text}"
        f"  {instructions:.1f} M warp instructions, {result['seconds']:.0f} s"
        + (f"  notes {result['kinds']}" if result["kinds"] else ""),
        flush=True,
    )
    shown = set()
    for kernel, f in runtime.faults() + runtime.warnings():
        key = (kernel, f["kind"], f["source"])
        if key in shown or len(shown) > 12:
            continue
        shown.add(key)
        print(
            f"       {f['kind']} in {kernel}, {f['tensor']} {f.get('what', '')}:"
            f" line {f['line']} `{f['text']}` ({f['source']})"
            f" against line {f['other']} `{f['other_text']}` ({f['other_source']}),"
            f" {f['count']} times"
        )


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--arch", nargs="+", type=int, default=[80, 90, 120])
    add("--quick", action="store_true", help="few cases, of every kernel")
    add("--bias", action="store_true", help="instead: is the exact form too large or too small?")
    add("--only", nargs="+", default=[], help="cases whose name contains one of these")
    add("--skip", nargs="+", default=[], help="no cases whose name contains one of these")
    add("--no-selftest", action="store_true", help="no planted faults")
    add("--interpreter", action="store_true", help="errors of Triton's interpreter beside (slow)")
    add("--noise", action="store_true", help="approximate instructions off by what they may be")
    add("--round-tf32", action="store_true", help="round to TF32 what hardware cuts in products")
    add("--json", type=Path, help="everything about every launch")
    add("--budget", type=float, default=0, help="seconds after which no further case is begun")
    return parser.parse_args()


def main() -> int:
    """Run the chosen cases and return the exit status."""
    args = arguments()
    begin = time.time()
    bad = 0 if args.no_selftest else selftest.main(args.arch)
    if args.bias:
        chosen = [cases.BIAS]
    else:
        chosen = [c for c in cases.all_cases() if c.quick or not args.quick]
    if args.only:
        chosen = [c for c in chosen if any(t in c.name for t in args.only)]
    chosen = [c for c in chosen if not any(t in c.name for t in args.skip)]
    interpreted = interpret([c.name for c in chosen]) if args.interpreter else {}
    results, skipped = [], []
    for arch in args.arch:
        state = runtime.install(arch)
        runtime.install_project()
        state.raise_on_error = True
        state.options.noise = int(args.noise)
        state.options.tcmode = 3 if args.round_tf32 else 1
        for c in chosen:
            if args.quick and not args.bias and c.quick not in (True, arch):
                continue
            if args.budget and time.time() - begin > args.budget:
                skipped.append((arch, c.name))
                continue
            if args.bias:
                result = judge(c, cases.scales, BIAS_TOLERANCE)
            else:
                result = judge(c, cases.errors, tolerance(c))
            result["interpreter"] = interpreted.get(c.name, {})
            results.append(result)
            report(result)
            if args.bias:
                print("      ", ", ".join(f"{n} {v:+.1e}" for n, v in result["errors"].items()))
    if args.json:
        args.json.write_text(json.dumps(results, default=str))
    for arch, name in skipped:
        print(f"not run sm_{arch} {name}: no time")
    failed = sum(not r["ok"] for r in results)
    bad += failed
    print(
        f"ptx: {len(results) - failed} cases ok, {failed} failed, {len(skipped)} not run;"
        f" {bad} failures; {time.time() - begin:.0f} s"
    )
    return int(bad > 0 or bool(skipped))


if __name__ == "__main__":
    sys.exit(main())
