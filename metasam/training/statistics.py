"""What may be concluded from runs over seeds: intervals, paired differences, adjusted p values, power, sentences.

Pure functions of numbers. scipy is imported where it is used: it comes with the command line, ``metasam[cli]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

VERDICTS = ("better", "worse", "equivalent", "not shown")
"""What a comparison can come to; "not shown" is neither a difference nor the absence of one."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95% t-interval, in the unit of the values.

    The half width is NaN for a single value, both are for none; a value that is NaN makes both NaN.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)
    (2.0, 2.484)
    """
    if not values:
        return math.nan, math.nan
    if len(values) < 2:
        return float(values[0]), math.nan
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    from scipy.stats import t

    return fmean(values), float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Paired:
    """Differences of two groups of runs, seed by seed: the group minus its base, in the unit of the results.

    Positive is better for accuracy and worse for loss. Quantities that so few seeds cannot give are NaN.
    """

    differences: tuple[float, ...]
    """One a seed that both sides have with finite results, in order of seed."""
    mean: float
    half: float
    """Half width of the 95% t-interval. NaN too where all differences are one nonzero number: see `p`."""
    p: float
    """Two-sided, of a paired t-test. 1 where both sides agree on every seed; NaN where all differences are one other
    number: two coarse results can tie, and no spread is no evidence."""
    lost: int = 0
    """Seeds that both sides have of which one has no finite result, such as a diverged run: left out above."""
    alone: int = 0
    """Seeds that one side has and the other lacks."""

    @property
    def seeds(self) -> int:
        """How many seeds are compared."""
        return len(self.differences)

    @property
    def sd(self) -> float:
        """Standard deviation of the differences; NaN for fewer than two."""
        return stdev(self.differences) if self.seeds > 1 else math.nan


def paired(group: Mapping[int, float], base: Mapping[int, float]) -> Paired:
    """Compare results by seed: ``group`` minus ``base`` on the seeds of both.

    >>> d = paired({1: 0.5, 2: 0.75, 3: 1.0}, {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.9})
    >>> d.mean, round(d.half, 4), round(d.p, 4), d.seeds, d.alone
    (0.5, 0.621, 0.0742, 3, 1)
    """
    both = sorted(group.keys() & base.keys())
    fine = [s for s in both if math.isfinite(group[s]) and math.isfinite(base[s])]
    differences = tuple(group[s] - base[s] for s in fine)
    mean, half = interval(differences)
    p = math.nan
    if not any(differences) and len(differences) > 1:
        p = 1.0
    elif len(differences) > 1:
        error = stdev(differences) / math.sqrt(len(differences))
        if error <= 1e-9 * max(map(abs, differences)):  # equal but for rounding
            half = math.nan
        else:
            from scipy.stats import t

            p = float(2 * t.sf(abs(mean) / error, len(differences) - 1))
    return Paired(differences, mean, half, p, len(both) - len(fine), len(group.keys() ^ base.keys()))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for how many there are (Holm 1979), in the order given.

    Calling significant those below alpha makes one or more false claims with probability alpha at most, whatever the
    dependence of the tests. NaN stands for a test that could not be made: it stays NaN and is not counted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]

    Raises:
        ValueError: a value is no probability.
    """
    for p in p_values:
        if not math.isnan(p) and not 0 <= p <= 1:
            raise ValueError(f"expected p values from 0 to 1, got {p}")
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def detectable(sd_of_differences: float, seeds: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest true mean difference that a two-sided paired t-test finds with this power, in the unit of the sd.

    Solved from the noncentral t distribution. For one comparison of many, give the alpha of the strictest step of
    `holm`: 0.05 over their number.

    Args:
        sd_of_differences: standard deviation of the differences by seed.
        seeds: how many pairs.
        power: probability of finding it.
        alpha: level of the test.

    Returns:
        The difference, positive; NaN for fewer than two seeds or a standard deviation that is NaN.

    Raises:
        ValueError: not 0 < alpha < power < 1, or a negative standard deviation.
    """
    if not 0 < alpha < power < 1:
        raise ValueError(f"expected 0 < alpha < power < 1, got alpha={alpha} and power={power}")
    if sd_of_differences < 0:
        raise ValueError(f"expected a standard deviation of 0 or more, got {sd_of_differences}")
    if seeds < 2 or math.isnan(sd_of_differences):
        return math.nan
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import ndtr
    from scipy.stats import chi2, t

    df = seeds - 1
    critical = float(t.ppf(1 - alpha / 2, df))
    # scipy's nct is NaN far in the tail: integrate instead over u = F(s^2 df), s the estimated sd over the true one
    u, weight = np.polynomial.legendre.leggauss(400)
    s = np.sqrt(chi2.ppf((1 + u) / 2, df) / df)

    def excess(noncentrality: float) -> float:
        found = ndtr(noncentrality - critical * s) + ndtr(-noncentrality - critical * s)
        return float(weight @ found) / 2 - power

    high = critical
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-10)) * sd_of_differences / math.sqrt(seeds)


@dataclass(frozen=True)
class Conclusion:
    """What one comparison comes to: one of `VERDICTS`, and the sentence that says so."""

    verdict: str
    sentence: str


def conclusion(
    name: str,
    difference: Paired,
    adjusted: float,
    *,
    base: str = "no SAM",
    margin: float = 0.01,
    quantity: str = "accuracy",
    alpha: float = 0.05,
    tests: int = 1,
) -> Conclusion:
    """Say in plain English what a paired comparison shows.

    "Better" or "worse" if the adjusted p value is below alpha; else "equivalent" only if the whole 95% interval lies
    within the margin; else "not shown" either way, with the smallest difference that could have been seen reliably.
    Seeds without a finite result leave it "not shown": those that are left are a selection.

    Args:
        name: of the group, to start the sentence.
        difference: group minus base.
        adjusted: p value after `holm` over all comparisons of the study.
        base: what the group is compared with.
        margin: half width of what counts as the same, in the unit of the differences: 0.01 is one point of accuracy.
        quantity: "accuracy", more is better, or "loss", less is better.
        alpha: level of the test.
        tests: how many comparisons were adjusted for: the difference that could have been seen is that of a test at
            alpha over their number, with 80% power.

    Raises:
        ValueError: another quantity, or a margin that is not positive.
    """
    if quantity not in ("accuracy", "loss"):
        raise ValueError(f"expected quantity accuracy or loss, got {quantity!r}")
    if not margin > 0:
        raise ValueError(f"expected a margin above 0, got {margin}; 0.01 is one point of accuracy")
    d = difference
    if d.seeds == 0 and not d.lost:
        return Conclusion("not shown", f"{name} against {base}: nothing to compare, no seed has both.")
    if d.lost:
        return Conclusion(
            "not shown",
            f"{name} against {base}: not shown either way; {d.lost} of {d.seeds + d.lost} seeds have no finite result, "
            "and those left are a selection.",
        )
    found = f"{amount(d.mean, quantity, d.half)} over {d.seeds} seed{'s' if d.seeds > 1 else ''}"
    if d.seeds == 1:
        return Conclusion(
            "not shown", f"{name} against {base}: {found}; one seed says nothing about how others would come out."
        )
    if math.isnan(d.half):
        return Conclusion(
            "not shown", f"{name} against {base}: {found}, the same on every seed; without spread there is no test."
        )
    p = "p < 0.001" if adjusted < 0.001 else f"p = {adjusted:.3f}"
    if adjusted < alpha:
        verdict = "better" if (d.mean > 0) == (quantity == "accuracy") else "worse"
        small = f", yet within {span(margin, quantity)}" if abs(d.mean) + d.half < margin else ""
        return Conclusion(verdict, f"{name} is {verdict} than {base}: {found} (adjusted {p}){small}.")
    if abs(d.mean) + d.half < margin:
        return Conclusion("equivalent", f"{name} is equivalent to {base} within {span(margin, quantity)}: {found}.")
    seen = amount(detectable(d.sd, d.seeds, alpha=alpha / max(1, tests)), quantity, sign=False)
    return Conclusion(
        "not shown",
        f"{name} against {base}: not shown either way, {found} (adjusted {p}); "
        f"a difference below {seen} could not have been seen reliably.",
    )


def summary(conclusions: Mapping[str, Sequence[Conclusion]], *, base: str = "no SAM") -> str:
    """Say what a whole study shows: how many comparisons of each name came to what.

    >>> c = Conclusion("better", ""), Conclusion("not shown", "")
    >>> summary({"inner loop": c, "outer loop": c[1:]})
    'Against no SAM, in 3 comparisons: inner loop better in 1 of 2, not shown in 1; outer loop not shown in 1 of 1.'
    """
    counts = {
        name: [(v, n) for v in VERDICTS if (n := sum(c.verdict == v for c in group))]
        for name, group in conclusions.items()
        if group
    }
    total = sum(n for group in counts.values() for _, n in group)
    if not total:
        return f"Nothing was compared with {base}."
    parts = [
        f"{name} "
        + ", ".join(
            f"{v} in {n}{f' of {sum(m for _, m in group)}' if i == 0 else ''}" for i, (v, n) in enumerate(group)
        )
        for name, group in counts.items()
    ]
    return f"Against {base}, in {total} comparison{'s' if total > 1 else ''}: {'; '.join(parts)}."


def amount(value: float, quantity: str, half: float = math.nan, *, sign: bool = True) -> str:
    """A difference in words, points for accuracy; a half width that is NaN is left out.

    >>> amount(0.0123, "accuracy", 0.0045), amount(-0.25, "loss"), amount(0.02, "accuracy", sign=False)
    ('+1.2 ± 0.4 points', '-0.250', '2.0 points')
    """
    scale, places, unit = (100, 1, " points") if quantity == "accuracy" else (1, 3, "")
    width = "" if math.isnan(half) else f" ± {scale * half:.{places}f}"
    return f"{scale * value:{'+' if sign else ''}.{places}f}{width}{unit}"


def span(margin: float, quantity: str) -> str:
    """A margin in words.

    >>> span(0.01, "accuracy"), span(0.005, "accuracy"), span(0.02, "loss")
    ('one point', '0.5 points', '0.02')
    """
    if quantity != "accuracy":
        return f"{margin:.3g}"
    return "one point" if math.isclose(margin, 0.01) else f"{100 * margin:.3g} points"
