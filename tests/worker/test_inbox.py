"""What overtakes what on its way to the main loop, and that a loop is never kept by its inbox."""

from __future__ import annotations

import time

from worker.engine import Load
from worker.events import Cancel, Died, Event, Outputs, Ready, Stop, Wake
from worker.inbox import Inbox

SAID = Outputs((), Load(0, 0, 0, 0, 0, 0, 0))


def inbox(*events: Event) -> Inbox:
    made = Inbox()
    for event in events:
        made.put(event)
    return made


def test_the_engines_events_keep_their_order_and_requests_overtake_them() -> None:
    engine = [Ready(1.0), SAID, Died("killed"), Ready(2.0)]
    asked = [Cancel("b"), Wake(), Stop("SIGTERM"), Stop("SIGTERM")]
    mixed = [event for pair in zip(engine, asked, strict=True) for event in pair]
    assert list(inbox(*mixed).take(0.0, 10.0)) == [*asked, *engine]


def test_what_is_asked_while_events_are_handled_comes_next() -> None:
    made = inbox(SAID, SAID, SAID)
    events = made.take(0.0, 10.0)
    assert next(events) == SAID
    made.put(Stop("SIGTERM"))
    assert list(events) == [Stop("SIGTERM"), SAID, SAID]
    assert not list(made.take(0.0, 10.0))


def test_an_engine_that_says_more_than_can_be_heard_does_not_keep_the_loop() -> None:
    made, heard = inbox(SAID), 0
    for _ in made.take(0.0, 0.05):
        made.put(SAID)
        time.sleep(0.01)
        heard += 1
    assert 1 <= heard <= 6
    assert list(made.take(0.0, 0.0)) == [SAID]


def test_an_empty_inbox_is_waited_for_and_no_longer() -> None:
    begun = time.monotonic()
    assert not list(Inbox().take(0.05, 10.0))
    assert time.monotonic() - begun >= 0.05
