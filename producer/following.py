"""A batch followed for a person: result lines to where they go, progress beside them, a sum at the end.

Owns that order, what is tallied and its wording. Must not know flags, exit codes or keys.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from producer import again
from producer.screen import say

if TYPE_CHECKING:
    from producer.batch import Batch, BatchStatus
    from producer.client import Client
    from producer.completions import Page
    from producer.output import Output, ResultFile, Stdout
    from producer.progress import Display

NO_WORKER_SECONDS = 5.0  # in which no row ended, then we look whether anybody serves the queue
COMMON_CODES = 5  # kinds of failures named in the last line


class Outage:
    """Says once that Redis is away, and once that it is back."""

    def __init__(self) -> None:
        self._is_away = False

    def begin(self) -> None:
        if not self._is_away:
            self._is_away = True
            say("Redis cannot be reached any more: trying again for half a minute")

    def end(self) -> None:
        if self._is_away:
            self._is_away = False
            say("Redis is back")


class Lookout:
    """Says once that nobody serves the batch's queue, where no row has ended for a while."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = clock
        self._ended = -1
        self._look_at = 0.0
        self._has_said = False

    def see(self, status: BatchStatus) -> None:
        now = self._now()
        if status.ended != self._ended:
            self._ended, self._look_at = status.ended, now + NO_WORKER_SECONDS
        if status.waiting and not self._has_said and now > self._look_at:
            self._look_at = now + NO_WORKER_SECONDS
            self._look(status.queue)

    def _look(self, queue: str) -> None:
        if any(worker.serves(queue) for worker in self._client.workers()):
            return
        self._has_said = True
        start = again.worker(queue, self._client.url)
        loading = "(one that still loads its model is not seen yet)"
        say(f'no worker serves queue "{queue}": start one with: {start} {loading}')


class Follower:
    """Writes a batch's results to ``sink``, shows progress, and remembers what the failures were.

    ``output`` says in which order they come, and whether what is written is deleted from Redis.
    """

    def __init__(
        self,
        client: Client,
        batch_id: str,
        output: Output,
        sink: ResultFile | Stdout,
        show: Display,
        *,
        outage: Outage,
    ) -> None:
        self._client = client
        self._batch_id = batch_id
        self._output = output
        self._sink = sink
        self._show = show
        self._outage = outage
        self._lookout = Lookout(client)
        self._failures: Counter[str] = Counter()

    def run(self, *, follow: bool) -> None:
        """To the end of what there is, or with ``follow`` of the batch."""
        ordered, cursor = self._output.ordered, self._sink.cursor
        for page in self._client.pages(self._batch_id, follow=follow, ordered=ordered, cursor=cursor):
            self._take(page)
            self._show.running(page.status)
            self._lookout.see(page.status)

    def gather(self) -> None:
        """Take what has ended so far, while rows are still being queued."""
        for page in self._client.pages(self._batch_id, cursor=self._sink.cursor):
            self._take(page)
            self._lookout.see(page.status)

    @property
    def failed(self) -> int:
        """Rows that came as failures: also those that completed, and whose results Redis has no longer."""
        return self._failures.total()

    def summary(self, status: BatchStatus) -> Iterator[str]:
        """``20 completed, 4 failed -> results.jsonl``, and in another line which failures those were."""
        counts = f"{status.completed:,} completed, {status.failed:,} failed"
        counts += f", {status.cancelled:,} cancelled" if status.cancelled else ""
        yield f"{counts}{self._output.where}"
        if self._failures:
            yield self._reasons(status)

    def _take(self, page: Page) -> None:
        self._outage.end()
        self._sink.expect(page.status.created)
        self._sink.write(page.results, page.cursor)
        self._failures.update(result.failure.code for result in page.results if result.failure)
        if self._output.release:  # a kill before this leaves one page to its TTL
            self._client.release(self._batch_id, [result.job_id for result in page.results])

    def _reasons(self, status: BatchStatus) -> str:
        common = self._failures.most_common(COMMON_CODES)
        codes = [f"{count:,} {code}" for code, count in common]
        if others := self.failed - sum(count for _, count in common):
            codes.append(f"{others:,} others")
        is_all = self.failed == status.failed + status.cancelled
        return f"failed{'' if is_all else ' in this run'}: {', '.join(codes)}"


def queued_line(batch: Batch) -> str:
    """``queued 24 rows on livebatch, 2 bad (their results say why)``, and where 1 is bad, ``its result``."""
    already = f", {batch.already:,} were there already" if batch.already else ""
    why = "its result says why" if batch.failed == 1 else "their results say why"
    bad = f", {batch.failed:,} bad ({why})" if batch.failed else ""
    return f"queued {batch.queued:,} rows on {batch.queue}{already}{bad}"
