"""Threads that wait on Redis so that the main loop never has to: for rows in dry queues, for commands.

Each has a connection of its own, survives outages, and only ever posts events. Must not touch rows or leases.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from redis.exceptions import OutOfMemoryError, RedisError
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.defaults import RQ_KEY_PREFIX

from producer.errors import WireError
from producer.store import COMMANDS
from producer.wire import parse_job_id
from worker.events import Cancel, Event, Post, Stop, Wake

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

BLOCK_SECONDS = 2  # of one blocking call: how long a thread may outlive the wish to stop it
RETRY_SECONDS = 1.0


class Listener(threading.Thread):
    """A daemon thread that repeats ``turn`` until ``stop``, whatever Redis does or says meanwhile."""

    def __init__(self, name: str, connection: Redis, post: Post) -> None:
        super().__init__(name=name, daemon=True)
        self.connection = connection
        self.post = post
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Ask it to end; it may take BLOCK_SECONDS, which nobody need wait for."""
        self.stopped.set()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self.turn()
            except RedisError as error:
                log.debug("%s: %s", self.name, error)  # the main loop says that Redis is away
                self.stopped.wait(RETRY_SECONDS)
            except Exception:  # what somebody wrote into Redis must not leave the worker deaf
                log.exception("%s goes on", self.name)
                self.stopped.wait(RETRY_SECONDS)

    def turn(self) -> None:
        """Wait for something once, at most BLOCK_SECONDS."""
        raise NotImplementedError


class Waiter(Listener):
    """Says when there is a row in one queue. Armed only while the queue is known to be dry."""

    def __init__(self, queue: str, connection: Redis, post: Post) -> None:
        super().__init__(f"waiter-{queue}", connection, post)
        self._key = f"{RQ_KEY_PREFIX}:queue:{queue}"
        self._armed = threading.Event()

    def arm(self) -> None:
        """The next row in the queue, or one that is there already, posts a Wake; once."""
        self._armed.set()

    def stop(self) -> None:
        super().stop()
        self._armed.set()

    def turn(self) -> None:
        self._armed.wait()
        if self.stopped.is_set():
            return
        # From the list's head to its head: this waits for a row but takes none, so a worker that dies now
        # loses none. The claim is one script; see scripts.py.
        if self._is_filled():
            self._armed.clear()
            self.post(Wake())

    def _is_filled(self) -> bool:
        try:
            return self.connection.blmove(self._key, self._key, BLOCK_SECONDS, "LEFT", "LEFT") is not None
        except OutOfMemoryError:  # a full Redis takes the move for growth; let the claim find out
            self.stopped.wait(RETRY_SECONDS)
            return True


class Commands(Listener):
    """Hears of cancelled batches from producers, and of what RQ's own command line sends to this worker."""

    def __init__(self, worker_name: str, connection: Redis, post: Post) -> None:
        super().__init__("commands", connection, post)
        self._pubsub = connection.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._channels = (COMMANDS, PUBSUB_CHANNEL_TEMPLATE % worker_name)
        self._subscribed = False

    def turn(self) -> None:
        if not self._subscribed:
            self._pubsub.subscribe(*self._channels)  # redis-py subscribes again after a lost connection
            self._subscribed = True
        message = self._pubsub.get_message(timeout=BLOCK_SECONDS)
        event = parse(message["data"], _meaning(message["channel"])) if message else None
        if event is not None:
            self.post(event)


Meaning = Callable[[str, Mapping[str, Any]], Event | None]  # of a command and its message


def parse(data: Any, meaning: Meaning) -> Event | None:
    """The event a message asks for; None (and a word in the log) for what means nothing there."""
    try:
        message = json.loads(data)
        if event := meaning(message["command"], message):
            return event
        log.warning("the command %.200r is none that a worker takes there", message["command"])
    except (ValueError, TypeError, KeyError, WireError, RecursionError):
        log.warning("a command was not understood: %.200r", data)
    return None


def _meaning(channel: bytes) -> Meaning:
    return to_all if channel == COMMANDS.encode() else to_one


def to_all(command: str, message: Mapping[str, Any]) -> Event | None:
    """What every producer may say, to all workers: one of them must not end those of the others."""
    return Cancel(str(message["batch"])) if command == "cancel" else None


def to_one(command: str, message: Mapping[str, Any]) -> Event | None:
    """RQ's own commands, on the worker's own channel, where producers may not publish."""
    if command in ("stop-job", "stop-execution"):
        job_id = str(message["job_id"])
        return Cancel(parse_job_id(job_id)[0], job_id)
    return Stop("rq's shutdown command") if command == "shutdown" else None
