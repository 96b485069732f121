"""Curves whose plateau and escape are known, because they were made from them."""

import numpy as np
import pytest

from nanoT5 import curve

STEPS = list(range(25, 4001, 25))
HELD_OUT = list(range(100, 4001, 100))


def power_law(steps) -> np.ndarray:
    return 2 + 10 * np.array(steps, dtype=float) ** -0.25


def hump(steps, escape: int, level: float = 4.0, fall: float = 1.2) -> np.ndarray:
    """Down to a level by step 200, there until `escape`, then `fall` nats lower within a third of a doubling."""
    at = np.log2(np.array(steps, dtype=float))
    descent = np.interp(at, np.log2([25, 200]), [8.0, level])
    return descent - np.interp(at, [np.log2(escape), np.log2(escape) + 1 / 3], [0.0, fall])


def noise(steps, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, len(steps))


@pytest.mark.parametrize("steps", [STEPS, HELD_OUT], ids=["training", "held out"])
@pytest.mark.parametrize("escape", [800, 1500, 2500])
@pytest.mark.parametrize("seed", range(5))
def test_a_hump(steps, escape, seed):
    shape = curve.describe(steps, list(hump(steps, escape) + noise(steps, seed)))
    assert shape["plateau"] == pytest.approx(4.0, abs=0.15)
    assert shape["escape"] == pytest.approx(escape, rel=0.12)
    assert shape["plateau_start"] == pytest.approx(200, rel=0.3)
    assert shape["final"] == pytest.approx(2.8, abs=0.03)


@pytest.mark.parametrize("steps", [STEPS, HELD_OUT], ids=["training", "held out"])
@pytest.mark.parametrize("seed", range(5))
def test_a_power_law_has_neither_plateau_nor_escape(steps, seed):
    losses = power_law(steps) + noise(steps, seed)
    shape = curve.describe(steps, list(losses))
    assert shape["plateau"] is shape["plateau_start"] is shape["escape"] is None
    assert shape["final"] == pytest.approx(power_law([3900])[0], abs=0.04)


@pytest.mark.parametrize("steps", [STEPS, HELD_OUT], ids=["training", "held out"])
@pytest.mark.parametrize("seed", range(5))
def test_a_stuck_run_has_a_plateau_and_no_escape(steps, seed):
    shape = curve.describe(steps, list(hump(steps, 4000) + noise(steps, seed) / 2))
    assert shape["escape"] is None
    assert shape["plateau"] == pytest.approx(4.0, abs=0.03) == shape["final"]
    assert shape["plateau_start"] == pytest.approx(200, rel=0.5)


def test_the_last_of_two_humps_counts():
    losses = hump(STEPS, 500, level=6.0) + hump(STEPS, 2000, level=4.0) - 4.0
    shape = curve.describe(STEPS, list(losses))
    assert shape["escape"] == pytest.approx(2000, rel=0.12) and shape["plateau"] == pytest.approx(4.8, abs=0.15)


def test_the_last_of_two_humps_counts_also_where_its_plateau_slopes():
    slope = np.interp(np.log2(STEPS), np.log2([700, 2000]), [0.0, 0.2])
    losses = hump(STEPS, 500, level=6.0) + hump(STEPS, 2000, level=4.0) - 4.0 - slope
    assert curve.describe(STEPS, list(losses))["escape"] == pytest.approx(2000, rel=0.12)


def test_a_slope_that_becomes_twice_as_steep_is_a_mild_escape():
    """From 0.2 to 0.5 nats a doubling at step 800; a slope that becomes half as steep again is none."""
    at = np.log2(STEPS)
    for steeper, escape in ((0.5, 800), (0.3, None)):
        losses = np.interp(at, np.log2([25, 200, 800, 1600]), [6.0, 4.2, 3.8, 3.8 - steeper])
        found = curve.describe(STEPS, list(losses))["escape"]
        assert found == (escape and pytest.approx(escape, rel=0.12))


def test_a_low_above_the_ceiling_does_not_count():
    """An exponential fall from a bad start, such as that of an untrained head, is slow at first against log(step)."""
    losses = list(4 + 60 * np.exp(-np.array(STEPS) / 300))
    assert curve.describe(STEPS, losses)["escape"] is not None
    assert curve.describe(STEPS, losses, ceiling=5.5)["escape"] is None


def test_too_short_a_run():
    assert set(curve.describe([], []).values()) == {None}
    assert curve.describe([3], [5.0]) == {"plateau": None, "plateau_start": None, "escape": None, "final": 5.0}
    assert curve.describe([10, 12], [5.0, 4.0])["escape"] is None


def test_runs_are_told_apart_by_the_keys_in_which_they_differ(tmp_path):
    for name, text in {
        "a": "seed: 0\nmodel:\n  std:\n    q: 1\n    k: null\n",
        "b": "seed: 0\nmodel:\n  std:\n    k: 1\n    q: null\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    assert curve.differences([tmp_path / "a", tmp_path / "b"]) == [
        "a model.std.q=1",
        "b model.std.k=1",
    ]


def test_a_whole_doubling_of_the_speed_is_nats_per_doubling():
    at, level, speed = curve.speeds([1, 2, 4, 8, 16], [9.0, 8.0, 7.0, 6.0, 5.0])
    assert speed == pytest.approx(np.ones_like(speed)) and level == pytest.approx(9 - np.log2(at))
