"""Execute the compiled PTX of every Triton kernel of vil on the CPU and check it.

    python lab/emulator/run.py [--arch 80 90 120] [--quick] [--only TEXT ...]

The exit status is 0 only if the emulator reported every planted fault, every case agrees with the
float64 reference, and no launch had a fault. Faults are races, out-of-bounds and misaligned
accesses, and reads of unwritten memory. See README.md.
"""

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases
import runtime
import selftest

# Largest error relative to the largest value, as in the project's tests on a GPU. Exception: the
# exact form multiplies its float32 state in TF32 where activations are half precision.
TOLERANCE = {"f32": 1e-5, "bf16": 2**-7, "f16": 2**-10}
EXACT_TOLERANCE = {**TOLERANCE, "f16": 2**-9}


def tolerance(c: cases.Case) -> float:
    """Return the largest error that a case may have."""
    limit = (EXACT_TOLERANCE if c.op == "exact" else TOLERANCE)[c.dtype]
    return 2 * limit if c.op in ("mixer", "model") else limit


def judge(c: cases.Case) -> dict:
    """Run a case and return its result."""
    runtime.clear()
    start = time.time()
    try:
        errors, failure = cases.errors(c), ""
    except Exception as error:  # any failure must leave the other cases running
        errors, failure = {}, f"{type(error).__name__}: {error}"[:300]
    records = runtime.STATE.records
    if not records and not failure:
        failure = "no kernel was launched"
    return {
        "case": c.name,
        "ok": not failure and not runtime.faults() and max(errors.values()) <= tolerance(c),
        "errors": errors,
        "failure": failure,
        "seconds": time.time() - start,
        "kinds": dict(Counter(f["kind"] for r in records for f in r.findings)),
        "instructions": sum(r.instructions for r in records),
    }


def report(result: dict) -> None:
    """Print a result and its findings, each source line once."""
    worst = max(result["errors"], key=result["errors"].get, default="")
    text = result["failure"] or f"{result['errors'][worst]:.1e} ({worst})"
    print(
        f"{'ok  ' if result['ok'] else 'FAIL'} sm_{runtime.STATE.arch} {result['case']}: {text}"
        f"  {result['instructions'] / 1e6:.1f} M warp instructions, {result['seconds']:.0f} s"
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


def main() -> int:
    """Run the chosen cases and return the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--arch", nargs="+", type=int, default=[80, 90, 120])
    add("--quick", action="store_true", help="few cases, of every kernel")
    add("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    args = parser.parse_args()
    begin = time.time()
    bad = selftest.main(args.arch)
    results = []
    for arch in args.arch:
        runtime.install(arch).raise_on_error = True
        runtime.install_project()
        for c in cases.all_cases():
            chosen = c.quick in (True, arch) or not args.quick
            if chosen and any(text in c.name for text in args.only):
                results.append(judge(c))
                report(results[-1])
    failed = sum(not r["ok"] for r in results)
    bad += failed
    print(
        f"ptx: {len(results) - failed} cases ok, {failed} failed, 0 not run;"
        f" {bad} failures; {time.time() - begin:.0f} s"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
