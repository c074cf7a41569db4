"""Run golden cases through the product: `python -m tests.goldens FILE…` prints how many of each file pass.

A case has `op`, `inputs`, `params`, `expected` and `tol`. Inputs named [B][T] hold sequences times tokens under `mask`;
the product's functions see the tokens under the mask alone, flat. No formula stands here: names are mapped, the product
computes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run as tests.goldens, this folder is not on the path

import golden_estimates
import golden_losses
from golden_tools import NotApplicable

OPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {**golden_losses.OPS, **golden_estimates.OPS}


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    """What the product gives for a case, under the keys of its `expected`.

    Raises NotApplicable, with the reason, where the product has no such function.
    """
    if case["op"] not in OPS:
        raise NotApplicable(f"no function for {case['op']}")
    found = OPS[case["op"]](case)
    return {name: found[name] for name in case["expected"]}


def misses(case: dict[str, Any]) -> list[str]:
    """One line per expected value that the product does not give within the case's tolerance."""
    found = evaluate(case)
    return [
        f"{case['name']}: {place} is {value!r}, expected {wanted!r}"
        for name, expected in case["expected"].items()
        for place, value, wanted in _pairs(found[name], expected, name)
        if not _is_close(value, wanted, _tolerance(case, name))
    ]


def _tolerance(case: dict[str, Any], name: str) -> dict[str, float]:
    absolute, relative = case["tol"]["atol"], case["tol"]["rtol"]
    if "metrics" in name:
        absolute = relative = case["tol"]["metrics"]
    return {"atol": absolute, "rtol": relative}


def _pairs(found: Any, expected: Any, place: str) -> list[tuple[str, Any, Any]]:
    if isinstance(expected, dict):
        assert isinstance(found, dict), f"{place} is {found!r}"
        return [pair for key in expected for pair in _pairs(found.get(key), expected[key], f"{place}[{key}]")]
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return [(place, found, expected)]
        return [pair for index, one in enumerate(expected) for pair in _pairs(found[index], one, f"{place}[{index}]")]
    return [(place, found, expected)]


def _is_close(found: Any, expected: Any, tolerance: dict[str, float]) -> bool:
    if not isinstance(found, (int, float)) or not isinstance(expected, (int, float)):
        return bool(found == expected)
    if not math.isfinite(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return abs(found - expected) <= tolerance["atol"] + tolerance["rtol"] * abs(expected)


def main(files: list[str]) -> int:
    """One line per file, and one per miss; 1 when there was a miss."""
    missed = False
    for file in files:
        cases = json.loads(Path(file).read_text())["cases"]
        passed, left_out = 0, []
        for case in cases:
            try:
                lines = misses(case)
            except NotApplicable as reason:
                left_out.append(f"{case['name']}: not applicable: {reason}")
                continue
            print(*lines, sep="\n", end="\n" if lines else "")
            passed += not lines
        print(*left_out, sep="\n", end="\n" if left_out else "")
        print(f"{file}: {passed}/{len(cases)} (not applicable {len(left_out)})")
        missed |= passed + len(left_out) < len(cases)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
