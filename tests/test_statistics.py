"""Statistics over seeds against scipy, numbers by hand, published tables and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from metasam.training.statistics import (
    Conclusion,
    Paired,
    conclusion,
    detectable,
    holm,
    interval,
    paired,
    summary,
)

A = {1: 0.71, 2: 0.78, 3: 0.74, 5: 0.80, 8: 0.69}
B = {1: 0.70, 2: 0.73, 3: 0.75, 5: 0.76, 8: 0.66}


def test_interval_is_that_of_scipy():
    values = list(A.values())
    mean, half = interval(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half, mean + half) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_interval_of_nothing_or_of_what_is_not_finite_is_nan(values):
    assert all(map(math.isnan, interval(values)))


def test_interval_of_one_value_has_no_width():
    mean, half = interval([0.5])
    assert mean == 0.5
    assert math.isnan(half)


def test_paired_is_the_paired_t_test_of_scipy():
    d = paired(A, B)
    found = stats.ttest_rel(list(A.values()), list(B.values()))
    low, high = found.confidence_interval(0.95)
    assert d.mean == pytest.approx(0.024)  # by hand: (1 + 5 - 1 + 4 + 3) / 5 points
    assert d.p == pytest.approx(found.pvalue)
    assert (d.mean - d.half, d.mean + d.half) == (pytest.approx(low), pytest.approx(high))
    assert d.sd == pytest.approx(np.std([0.01, 0.05, -0.01, 0.04, 0.03], ddof=1))
    assert (d.seeds, d.lost, d.alone) == (5, 0, 0)


def test_swapping_sides_swaps_the_sign_alone():
    d, e = paired(A, B), paired(B, A)
    assert e.mean == pytest.approx(-d.mean)
    assert (e.half, e.p) == (pytest.approx(d.half), pytest.approx(d.p))


def test_pairs_are_by_seed_not_by_order():
    assert paired(dict(reversed(A.items())), B) == paired(A, B)


def test_seeds_of_one_side_and_results_that_are_not_finite_are_counted_and_left_out():
    d = paired({**A, 9: 0.99, 3: math.nan}, B)
    assert (d.seeds, d.lost, d.alone) == (4, 1, 1)
    assert d.differences == pytest.approx([0.01, 0.05, 0.04, 0.03])


def test_sides_that_agree_on_every_seed():
    d = paired(A, A)
    assert (d.mean, d.half, d.p) == (0, 0, 1)


def test_the_same_difference_on_every_seed_is_no_evidence():
    d = paired({1: 0.3, 2: 0.4, 3: 0.8}, {1: 0.2, 2: 0.3, 3: 0.7})  # 0.1 each, but for rounding
    assert d.mean == pytest.approx(0.1)
    assert math.isnan(d.p)
    assert math.isnan(d.half)


def test_one_seed_or_none_has_no_test():
    one, none = paired({1: 0.5}, {1: 0.4}), paired({1: 0.5}, {2: 0.4})
    assert one.mean == pytest.approx(0.1)
    assert math.isnan(one.p)
    assert math.isnan(one.half)
    assert math.isnan(one.sd)
    assert none.seeds == 0
    assert none.alone == 2
    assert math.isnan(none.mean)


def test_holm_by_hand():
    # 4 tests in order .005 .01 .03 .04: 4 x .005, 3 x .01, 2 x .03, and 1 x .04 is raised to the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_out_tests_that_were_not_made():
    found = holm([0.01, math.nan, 0.03])
    assert (found[0], found[2]) == (pytest.approx(0.02), 0.03)
    assert math.isnan(found[1])


@pytest.mark.parametrize("p", [-0.1, 1.1, math.inf])
def test_holm_refuses_what_is_no_probability(p):
    with pytest.raises(ValueError, match="expected p values from 0 to 1"):
        holm([0.5, p])


def test_holm_keeps_order_and_bounds():
    random = np.random.default_rng(0)
    for _ in range(200):
        raw = random.uniform(size=random.integers(1, 12)) ** 3
        found = np.array(holm(raw.tolist()))
        assert (found >= raw).all()
        assert (found <= 1).all()
        assert (found <= np.minimum(1, raw * len(raw))).all()  # never worse than Bonferroni
        assert (np.diff(found[np.argsort(raw)]) >= 0).all()
        shuffle = random.permutation(len(raw))
        assert holm(raw[shuffle].tolist()) == found[shuffle].tolist()


def test_holm_keeps_the_rate_of_false_claims():
    random = np.random.default_rng(1)
    claims = sum(min(holm(p.tolist())) < 0.05 for p in random.uniform(size=(4000, 6)))
    assert 0.04 < claims / 4000 < 0.06


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_detectable_against_published_sample_sizes(effect, pairs):
    # pairs that a two-sided paired t-test at 5% needs for 80% power, as in Cohen's tables and G*Power
    assert detectable(1.0, pairs) <= effect < detectable(1.0, pairs - 1)


@pytest.mark.parametrize(("seeds", "alpha"), [(3, 0.05), (5, 0.05), (10, 0.005)])
def test_detectable_is_found_with_the_stated_power(seeds, alpha):
    sd = 0.02
    effect = detectable(sd, seeds, power=0.8, alpha=alpha)
    draws = np.random.default_rng(2).normal(effect, sd, size=(20_000, seeds))
    power = (stats.ttest_1samp(draws, 0, axis=1).pvalue < alpha).mean()
    assert power == pytest.approx(0.8, abs=0.012)  # 4 standard errors


@pytest.mark.parametrize(("seeds", "alpha"), [(2, 0.05), (3, 0.005), (5, 0.05 / 18), (10, 0.0005), (100, 0.01)])
def test_detectable_is_where_the_noncentral_t_of_scipy_has_the_power(seeds, alpha):
    noncentrality = detectable(1.0, seeds, power=0.9, alpha=alpha) * math.sqrt(seeds)
    upper = stats.nct.sf(stats.t.ppf(1 - alpha / 2, seeds - 1), seeds - 1, noncentrality)  # the lower tail is nothing
    assert upper == pytest.approx(0.9, abs=1e-6)


def test_detectable_scales_and_has_its_limits():
    assert detectable(0.02, 5) == pytest.approx(2 * detectable(0.01, 5))
    assert detectable(0.0, 5) == 0
    assert detectable(0.01, 2, alpha=0.05 / 36) > detectable(0.01, 2) > detectable(0.01, 3)
    assert math.isnan(detectable(0.01, 1))
    assert math.isnan(detectable(math.nan, 5))


@pytest.mark.parametrize("options", [{"power": 1.0}, {"alpha": 0.0}, {"alpha": 0.9}, {"sd_of_differences": -1.0}])
def test_detectable_refuses_what_cannot_be(options):
    with pytest.raises(ValueError, match="expected"):
        detectable(**{"sd_of_differences": 1.0, "seeds": 5, **options})


def around(mean, half, seeds=5):
    """Differences with this mean and 95% half width."""
    shape = np.linspace(-1, 1, seeds)
    unit = interval(shape.tolist())[1]
    return paired(dict(enumerate(mean + shape * half / unit)), dict.fromkeys(range(seeds), 0.0))


@pytest.mark.parametrize(
    ("mean", "half", "quantity", "verdict"),
    [
        (0.03, 0.01, "accuracy", "better"),
        (-0.03, 0.01, "accuracy", "worse"),
        (-0.03, 0.01, "loss", "better"),
        (0.03, 0.01, "loss", "worse"),
        (0.001, 0.008, "accuracy", "equivalent"),
        (0.003, 0.008, "accuracy", "not shown"),  # its interval leaves the margin on one side
        (-0.003, 0.008, "accuracy", "not shown"),
        (0.0, 0.05, "accuracy", "not shown"),
    ],
)
def test_verdicts(mean, half, quantity, verdict):
    d = around(mean, half)
    assert conclusion("x", d, d.p, quantity=quantity).verdict == verdict


def test_a_difference_that_does_not_survive_adjustment_is_not_shown():
    d = around(0.03, 0.02)
    assert d.p < 0.05
    assert conclusion("x", d, 6 * d.p).verdict == "not shown"


def test_sentences():
    d = around(0.021, 0.008)
    assert conclusion("sam in the inner loop", d, 0.012).sentence == (
        "sam in the inner loop is better than no SAM: +2.1 ± 0.8 points over 5 seeds (adjusted p = 0.012)."
    )
    assert conclusion("x", d, 0.0001, base="low").sentence == (
        "x is better than low: +2.1 ± 0.8 points over 5 seeds (adjusted p < 0.001)."
    )
    d = around(-0.001, 0.004)
    assert (
        conclusion("x", d, 0.9).sentence
        == "x is equivalent to no SAM within one point: -0.1 ± 0.4 points over 5 seeds."
    )
    d = around(0.005, 0.004)
    assert conclusion("x", d, d.p).sentence.endswith(", yet within one point.")


def test_what_could_not_have_been_seen_is_that_of_the_strictest_test():
    d = around(0.01, 0.03)
    expected = 100 * detectable(d.sd, 5, alpha=0.05 / 18)
    sentence = conclusion("x", d, 1.0, tests=18).sentence
    assert f"a difference below {expected:.1f} points could not have been seen reliably" in sentence
    assert "not shown either way" in sentence


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        (paired({1: 0.9}, {1: 0.1}), "one seed says nothing"),
        (paired({1: 0.9}, {2: 0.1}), "no seed has both"),
        (paired({1: 0.5, 2: 0.75}, {1: 0.25, 2: 0.5}), "the same on every seed"),
        (paired({1: 0.9, 2: math.nan, 3: 0.9}, {1: 0.1, 2: 0.1, 3: 0.2}), "1 of 3 seeds have no finite result"),
        (paired({1: math.nan}, {1: 0.1}), "1 of 1 seeds have no finite result"),
    ],
)
def test_what_cannot_be_said_is_said(difference, says):
    found = conclusion("x", difference, difference.p)
    assert found.verdict == "not shown"
    assert says in found.sentence
    assert "nan" not in found.sentence


def test_agreement_on_every_seed_is_equivalence():
    assert conclusion("x", paired(A, A), 1.0).verdict == "equivalent"


@pytest.mark.parametrize("options", [{"quantity": "error"}, {"margin": 0.0}, {"margin": math.nan}])
def test_conclusion_refuses(options):
    with pytest.raises(ValueError, match="expected"):
        conclusion("x", Paired((), 0.0, 0.0, 1.0), 1.0, **options)


def test_summary_of_nothing():
    assert summary({"inner loop": []}) == "Nothing was compared with no SAM."


def test_summary_counts_every_conclusion():
    c = {v: Conclusion(v, "") for v in ("better", "worse", "equivalent", "not shown")}
    found = summary({"inner loop": [c["better"], c["better"], c["worse"]], "outer loop": [c["equivalent"]]})
    assert found == (
        "Against no SAM, in 4 comparisons: inner loop better in 2 of 3, worse in 1; outer loop equivalent in 1 of 1."
    )
