"""The pulse: when a node beats, and when it can no longer trust its lease. Time is a number here."""

import math

from hypothesis import given
from hypothesis import strategies as st

from taskyard.cluster.pulse import Act, Pulse, Step

LEASE_S = 15.0


def a_pulse(stall_s: float = math.inf) -> Pulse:
    return Pulse(LEASE_S, stall_s=stall_s, began_mono=100.0)


def test_a_beat_follows_the_join_and_then_every_fifth_of_the_lease():
    """The first beat is due at once, each next one a fifth of the lease after the last was sent."""
    pulse = a_pulse()
    assert pulse.next(100.0, 100.0).act is Act.BEAT
    pulse.heard(100.0)
    assert pulse.next(100.2, 100.0) == Step(Act.WAIT, 103.0)
    assert pulse.next(103.0, 100.0).act is Act.BEAT


def test_a_missed_beat_is_tried_again_sooner():
    """After a miss the next try comes within two seconds, and a good one makes everything as it was."""
    pulse = a_pulse()
    pulse.heard(100.0)
    pulse.missed(103.0)
    assert pulse.next(103.1, 103.0) == Step(Act.WAIT, 105.0)
    assert pulse.next(105.0, 105.0).act is Act.BEAT
    pulse.heard(105.0)
    # Trusted until 117, from when the good one was sent.
    assert pulse.next(116.9, 105.0) == Step(Act.BEAT, 117.0)
    pulse.missed(116.9)
    assert pulse.next(117.0, 105.0).act is Act.LOST


def test_a_short_lease_is_not_beaten_to_death():
    """Tries that fail, and so connections, are at least half a second apart, however short the lease."""
    pulse = Pulse(1.0, stall_s=math.inf, began_mono=0.0)
    pulse.missed(0.1)
    assert pulse.next(0.2, 0.0) == Step(Act.WAIT, 0.6)


def test_a_store_that_is_away_is_not_stormed():
    """Beats that fail at once make a connection every two seconds: the store makes more than one a second besides."""
    pulse, now, tries = a_pulse(), 100.0, 0
    while (step := pulse.next(now, now)).act is not Act.LOST:
        if step.act is Act.BEAT:
            tries += 1
            pulse.missed(now)
        now = max(now, step.until_mono if step.act is Act.WAIT else now)
    assert (now, tries) == (112.0, 7)


def test_a_process_that_was_stopped_asks_before_it_gives_up():
    """When nothing could run for longer than the lease, one short beat is made first: it may still be heard."""
    pulse = a_pulse()
    pulse.heard(100.0)
    assert pulse.next(160.0, 100.0) == Step(Act.BEAT, 161.5)
    pulse.missed(161.5)
    assert pulse.next(161.5, 100.0).act is Act.LOST


def test_a_beat_that_hangs_leaves_time_for_another():
    """One try takes at most two fifths of the lease, and none reaches beyond what is trusted."""
    pulse = a_pulse()
    assert pulse.next(100.0, 100.0) == Step(Act.BEAT, 106.0)
    pulse.missed(106.0)
    assert pulse.next(108.0, 106.0) == Step(Act.BEAT, 112.0)
    pulse.missed(112.0)
    assert pulse.next(112.0, 112.0).act is Act.LOST


def test_a_loop_that_stands_still_stops_the_beat():
    """After `stall_s` without a tick nothing is beaten; with the next tick it goes on."""
    pulse = a_pulse(stall_s=10.0)
    at = 100.0
    while (step := pulse.next(at, 100.0)).act is not Act.STALLED:
        if step.act is Act.BEAT:
            pulse.heard(at)
        at += 1.0
    assert at == 110.0
    assert pulse.next(113.0, 100.0).act is Act.STALLED
    assert pulse.next(114.0, 113.5).act is Act.BEAT


def test_a_process_that_was_stopped_has_no_stalled_loop():
    """A loop that did not tick because nothing ran at all is not called stalled."""
    pulse = a_pulse(stall_s=60.0)
    pulse.heard(100.0)
    assert pulse.next(1000.0, 100.0).act is Act.BEAT


def test_a_loop_that_is_over_is_not_watched():
    """With nothing to watch, the node beats on."""
    pulse = a_pulse(stall_s=10.0)
    for at in range(100, 200):
        step = pulse.next(float(at), math.inf)
        assert step.act in (Act.BEAT, Act.WAIT)
        if step.act is Act.BEAT:
            pulse.heard(float(at))


tries = st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60)


@given(lease_s=st.floats(1.0, 60.0), tries=tries)
def test_a_node_gives_up_before_the_others_may(lease_s, tries):
    """However long tries take and whichever of them are heard: a node that is not stopped gives up no earlier than 0.8
    of the lease after its last good beat was sent, and no later than 0.9."""
    pulse = Pulse(lease_s, stall_s=math.inf, began_mono=0.0)
    now = good = 0.0
    left = iter(tries)
    while (step := pulse.next(now, now)).act is not Act.LOST:
        assert step.until_mono > now
        if step.act is Act.WAIT:
            now = step.until_mono
            continue
        share, is_heard = next(left, (1.0, False))
        sent, now = now, now + share * (step.until_mono - now)
        if is_heard:
            good = sent
            pulse.heard(sent)
        else:
            pulse.missed(now)
    assert 0.8 - 1e-9 <= (now - good) / lease_s <= 0.9 + 1e-9
