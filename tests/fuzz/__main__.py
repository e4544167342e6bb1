"""Runs cases of the fuzzer, or takes one apart: python -m tests.fuzz --help"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.fuzz.case import COMPOSITIONS, draw
from tests.fuzz.judge import SECONDS, judge
from tests.fuzz.program import render
from tests.fuzz.report import summary
from tests.fuzz.shrink import shrink


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="A differential fuzzer of trainings.")
    parser.add_argument("--cases", type=int, default=30, help="number of cases (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case (default: %(default)s)")
    parser.add_argument("--backend", choices=("gloo", "xla"), default="gloo")
    parser.add_argument("--composition", choices=COMPOSITIONS, help="instead of drawn ones")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for a case (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="one case only: run it and show what differs")
    parser.add_argument("--print", action="store_true", help="with --seed: print the program instead of running it")
    parser.add_argument("--shrink", action="store_true", help="take failing cases apart and print what is left")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.cases) if options.seed is None else [options.seed]
    cases = [draw(seed, composition=options.composition, backend=options.backend) for seed in seeds]
    if options.print and options.seed is not None and not options.shrink:
        print(render(cases[0]))
        return 0
    verdicts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda case: judge(case, seconds=options.seconds), cases):
            verdicts.append(verdict)
            shown = verdict.case.describe() if verdict.failed or options.seed is not None else verdict.case.composition
            print(f"{verdict.case.seed}: {verdict.kind} ({verdict.seconds:.1f} s) {shown}", flush=True)
            if verdict.detail:
                detail = verdict.detail if options.seed is not None else verdict.detail.partition("--- traceback")[0]
                print("    " + detail.rstrip().replace("\n", "\n    "), flush=True)
            if verdict.failed and options.shrink:
                smallest = shrink(verdict, seconds=options.seconds)
                print(f"--- smallest: {smallest.case.describe()}\n{smallest.detail}\n\n{render(smallest.case)}")
    print(summary(verdicts))
    return 1 if any(verdict.failed for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
