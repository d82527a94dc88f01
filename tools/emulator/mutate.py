"""Break the project's own compiled kernels and see that the emulator notices.

    python tools/emulator/mutate.py --arch 90 --case exact-B2-L17-D72-M4-bf16-both

Deletes each bar.sync (or bar.warp.sync) in turn; where there are asynchronous copies, waits for
none of them. Prints, for every kernel of the case, how many deletions were reported, and at which
source lines a barrier could go: there no access pattern needs it (a ``tl.debug_barrier`` that only
makes sure).
"""

import argparse
import contextlib
import os
import re
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases
import runtime


def outcome(case: cases.Case, text: str = "", broken: str = "") -> tuple[set[str], set[str]]:
    """Run a case with one kernel's PTX replaced; return the kinds of failures and of the rest."""
    runtime.clear()
    runtime.STATE.edit = lambda t: broken if t == text else t
    with contextlib.suppress(AssertionError):  # the results are wrong
        cases.errors(case)
    failing = {f["kind"] for _, f in runtime.faults()}
    return failing, runtime.kinds() - failing


def texts(case: cases.Case) -> list[str]:
    """Return the PTX of a case's kernels, after running them unbroken."""
    found = {}
    runtime.clear()
    runtime.STATE.edit = lambda t: found.setdefault(t, t)
    cases.errors(case)
    print("unbroken:", {f["kind"] for _, f in runtime.faults()} or "clean")
    return list(found)


def main() -> int:
    """Break every kernel of a case in every way."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--case", default="longhorn-B2-L37-D40-M4-f32-both")
    args = parser.parse_args()
    state = runtime.install(args.arch)
    runtime.install_project()
    state.orders, state.raise_on_error = (0,), False
    case = next(c for c in cases.all_cases() if c.name == args.case)
    for text in texts(case):
        name = f"sm_{args.arch} " + re.search(r"\.entry (\S+)\(", text)[1]
        parts = re.split(r"(?=\tbar\.(?:warp\.)?sync)", text)
        reported, lanes, unneeded = 0, 0, []
        for i in range(1, len(parts)):
            broken = "".join([*parts[:i], "//" + parts[i], *parts[i + 1 :]])
            failing, other = outcome(case, text, broken)
            if failing:
                reported += 1
            elif any(k.startswith("LANE_") for k in other):
                lanes += 1
            else:
                unneeded.append(re.findall(r"// (\w+\.py:\d+)", "".join(parts[:i]))[-1])
        print(
            f"{name}: {len(parts) - 1} barriers; deleting one was reported {reported} times,"
            f" as between lanes of a warp {lanes} times; not needed at {unneeded}",
            flush=True,
        )
        wait = r"cp\.async\.wait_group \t\d+;"
        if waits := re.findall(wait, text):
            failing, _ = outcome(case, text, re.sub(wait, "cp.async.wait_group 99;", text))
            print(f"{name}: {len(waits)} waits for copies; none waited: {failing or 'clean'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
