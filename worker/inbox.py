"""Inbox: how whatever happens reaches the main loop, from any thread and from signal handlers.

Owns what overtakes what. Must not know what an event means.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from worker.events import Cancel, Event, Stop, Wake

URGENT = (Cancel, Stop, Wake)  # few, and somebody waits for what they ask


class Inbox:
    """The engine's events keep their order; those of people and of Redis overtake them."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None: there is something urgent
        self._urgent: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """From anywhere."""
        if isinstance(event, URGENT):
            self._urgent.append(event)
            self._events.put(None)
        else:
            self._events.put(event)

    def take(self, timeout: float, seconds: float) -> Iterator[Event]:
        """Events, the first within ``timeout``, and then for about ``seconds`` as many as there are.

        The engine may say more than can be heard: what is left is for the next time.
        """
        try:
            event = self._events.get(timeout=timeout)
            until = time.monotonic() + seconds
            while True:
                while self._urgent:
                    yield self._urgent.popleft()
                if event is not None:
                    yield event
                if time.monotonic() >= until:
                    return
                event = self._events.get_nowait()
        except Empty:
            return
