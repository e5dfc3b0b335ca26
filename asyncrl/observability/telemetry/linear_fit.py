"""Least squares over observations of several processes: only sums are kept, and they travel as counters.

DECODE = LinearFit("profile/decode", ("step_s", "row_s"))
DECODE.observe(recorder, seconds, steps, rows)     # seconds ≈ step_s · steps + row_s · rows
DECODE.coefficients(counters)                      # {"step_s": …, "row_s": …}
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from asyncrl.observability.telemetry.recorder import Recorder

_TOLD_APART = 1e-3  # least eigenvalue of the terms' cosines: below it, some terms were in proportion to others
_INVOLVED = 0.1  # least part of a term in such a proportion


@dataclass(frozen=True)
class LinearFit:
    """Coefficients of at least 0. ``terms``: their names."""

    name: str
    terms: tuple[str, ...]

    def observe(self, recorder: Recorder, value: float, *terms: float) -> None:
        for i, a in enumerate(terms):
            recorder.count(f"{self.name}/{i}", a * value)
            for j in range(i, len(terms)):
                recorder.count(f"{self.name}/{i}/{j}", a * terms[j])

    def coefficients(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Those that the observations determine: no term that was always 0, nor those that were always in proportion
        to each other."""
        count = len(self.terms)
        at = lambda i, j: counters.get(f"{self.name}/{min(i, j)}/{max(i, j)}", 0.0)
        products = np.array([[at(i, j) for j in range(count)] for i in range(count)])
        values = np.array([counters.get(f"{self.name}/{i}", 0.0) for i in range(count)])
        present = [i for i in range(count) if products[i, i] > 0]
        if not present:
            return {}
        scale = np.sqrt(np.diag(products)[present])
        cosines, target = products[np.ix_(present, present)] / np.outer(scale, scale), values[present] / scale
        lengths, directions = np.linalg.eigh(cosines)
        alike = (np.abs(directions[:, lengths < _TOLD_APART]) > _INVOLVED).any(axis=1)
        found = _least_squares(cosines, target) / scale
        return {self.terms[i]: float(found[k]) for k, i in enumerate(present) if not alike[k]}


def _least_squares(products: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The non-negative x of least xᵀ ``products`` x − 2 ``values`` x, by trying which of the few are 0."""
    count = len(values)
    best, least = np.zeros(count), 0.0
    for used in itertools.product((False, True), repeat=count):
        mask = np.array(used)
        x = np.zeros(count)
        x[mask] = np.linalg.lstsq(products[np.ix_(mask, mask)], values[mask], rcond=None)[0]
        if (x >= 0).all() and (loss := x @ products @ x - 2 * values @ x) < least:
            best, least = x, loss
    return best
