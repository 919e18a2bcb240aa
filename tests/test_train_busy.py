"""Idle shares: overlapping activities count once, and a reading covers the time since the one before."""

from __future__ import annotations

import pytest

from train.busy import BusyClock, IdleMeter


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_activities_count_once() -> None:
    time = Time()
    clock = BusyClock(time)
    with clock:
        time.now = 2.0
        with clock:
            time.now = 3.0
        assert clock.seconds == 3.0  # still going on
        time.now = 4.0
    time.now = 10.0
    assert clock.seconds == 4.0
    with pytest.raises(KeyError), clock:  # what fails was busy too, and ends
        time.now = 11.0
        raise KeyError
    time.now = 20.0
    assert clock.seconds == 5.0


def test_idle_shares_are_those_since_the_last_reading() -> None:
    time = Time()
    sampler, trainer = BusyClock(time), BusyClock(time)
    meter = IdleMeter(sampler, trainer, time)
    with sampler:
        time.now = 6.0
    with trainer:
        time.now = 8.0
    assert meter.shares() == pytest.approx({"idle_share": 0.25, "trainer_idle_share": 0.75})
    with sampler:
        time.now = 10.0
        assert meter.shares() == pytest.approx({"idle_share": 0.0, "trainer_idle_share": 1.0})
        assert meter.shares() == {"idle_share": 0.0, "trainer_idle_share": 0.0}  # no time has passed
