"""Least squares over observations of several processes: only sums are kept, and they travel as counters::

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
_EQUAL = 1e-9  # relative difference of two losses that rounding may cause


@dataclass(frozen=True)
class LinearFit:
    """Coefficients of at least 0. ``terms``: their names. ``at_most``: (a, b) where a unit of a costs no more than one
    of b does on average, with all that comes along with it."""

    name: str
    terms: tuple[str, ...]
    at_most: tuple[str, ...] = ()

    def observe(self, recorder: Recorder, value: float, *terms: float) -> None:
        for i, a in enumerate(terms):
            recorder.count(f"{self.name}/{i}", a * value)
            for j in range(i, len(terms)):
                recorder.count(f"{self.name}/{i}/{j}", a * terms[j])

    def coefficients(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Of the terms that were not always 0. Terms that could not be told apart share what they explain together."""
        present, products, values, scale = self._sums(counters)
        found = _least_squares(products, values)
        bounded = [present.index(i) for i in map(self.terms.index, self.at_most) if i in present]
        if len(bounded) == 2:
            a, b = bounded
            most = products[b] * scale[a] / scale[b]
            most[a] = 0.0
            if found[a] > most @ found:
                others = np.delete(np.eye(len(found)), a, axis=1)  # [N, N - 1]: what the others explain, and a by them
                others[a] = most @ others
                found = others @ _least_squares(others.T @ products @ others, others.T @ values)
        return {self.terms[i]: float(x) for i, x in zip(present, found / scale, strict=True)}

    def not_told_apart(self, counters: Mapping[str, float]) -> list[str]:
        """Terms that were always in proportion to others: only what they explain together is known."""
        present, products, _, _ = self._sums(counters)
        sizes, directions = np.linalg.eigh(products)
        alike = (np.abs(directions[:, sizes < _TOLD_APART]) > _INVOLVED).any(axis=1)
        return [self.terms[i] for i, also in zip(present, alike, strict=True) if also]

    def _sums(self, counters: Mapping[str, float]) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
        """Of the terms that were not always 0: indices, their products with each other and with the value, [N, N] and
        [N], in units of their root sums of squares, [N]."""
        count = len(self.terms)
        at = lambda i, j: counters.get(f"{self.name}/{min(i, j)}/{max(i, j)}", 0.0)
        products = np.array([[at(i, j) for j in range(count)] for i in range(count)])
        values = np.array([counters.get(f"{self.name}/{i}", 0.0) for i in range(count)])
        present = [i for i in range(count) if products[i, i] > 0]
        scale = np.sqrt(np.diag(products)[present])
        return present, products[np.ix_(present, present)] / np.outer(scale, scale), values[present] / scale, scale


def _least_squares(products: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The non-negative x of least xᵀ ``products`` x − 2 ``values`` x, by trying which of the few are 0; of equal ones
    the one with the most terms."""
    count, best, least = len(values), np.zeros(len(values)), 0.0
    for used in sorted(itertools.product((True, False), repeat=count), key=sum, reverse=True):
        mask, x = np.array(used, bool), np.zeros(count)
        x[mask] = np.linalg.lstsq(products[np.ix_(mask, mask)], values[mask], rcond=_TOLD_APART)[0]
        if (x >= 0).all() and (loss := x @ products @ x - 2 * values @ x) < least - _EQUAL * abs(least):
            best, least = x, loss
    return best
