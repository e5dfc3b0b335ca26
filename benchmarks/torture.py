"""Storms of faults: ``python -m benchmarks.torture --seed S``, at most half an hour.

First a round of the fast form (`tests.torture.fast`), then a storm over whole runs on Ray (`tests.torture.storm`). The
last line is a JSON object: ``faults``, ``violations`` and ``hangs`` (both must be 0), ``resumes``, ``kinds`` (faults of
each), ``seconds_to_next_step_p95``: on Ray, from a fault to the next new step.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

import numpy as np

from tests.torture import fast, storm

FAST_FAULTS, RAY_FAULTS = 300, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", type=int, default=FAST_FAULTS, help="faults without Ray")
    parser.add_argument("--ray", type=int, default=RAY_FAULTS, help="faults of runs on Ray")
    args = parser.parse_args()
    quick = fast.storms(args.seed, args.fast)
    whole = storm.storms(args.seed, args.ray)
    kinds: Counter[str] = quick.faults + Counter({f"ray: {kind}": n for kind, n in whole.faults.items()})
    print(f"\n{'fault':24} number")
    for kind, number in sorted(kinds.items()):
        print(f"{kind:24} {number:6}")
    seconds = whole.seconds_to_next_step
    figures = {
        "faults": kinds.total(),
        "violations": len(quick.violations) + len(whole.violations),
        "hangs": quick.hangs + whole.hangs,
        "resumes": quick.resumes + whole.resumes,
        "kinds": dict(kinds),
        "seconds_to_next_step_p95": round(float(np.percentile(seconds, 95)), 1) if seconds else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
