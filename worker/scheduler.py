"""Scheduler: who runs, how many tokens each, who waits, who is preempted, who leaves.

Policy is arithmetic on integers; knows block counts and lengths, no model, no text and no token's meaning.
Who runs changes in ``plan`` and ``land`` only; ``add`` and ``cancel`` leave a note for the next plan. Between
``launch`` and ``land`` a step's tokens are promised: the next step can be planned on their number alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels.rows import Status
from worker.blocks import BlockPool, blocks_for
from worker.live import LiveBatch
from worker.sequence import Indices, Ints, Output, Row, Sequence, Step

MOST_HELD = 4  # steps in a row in which decodes wait and new rows are seated all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers the scheduler goes by."""

    max_batch: int = 32  # live rows
    prefill_tokens: int = (
        64  # a step's share for rows with more than one token to compute, beside the decodes
    )
    max_overtakes: int = 16  # times a waiting row that does not fit yet may be overtaken, in its whole life
    lookahead: int = 32  # waiting rows looked at past one that does not fit
    reserve_tokens: int = (
        16  # growth a live row is left room for when another joins, so that it rarely preempts
    )
    apart: bool = False  # prefills run in steps of their own, each whole or not at all: fewer runs
    prefill_launch: float = 0.0  # what a run of prefills costs beside its tokens, in steps of the live batch


def deal(pending: Indices, prefill_tokens: int, apart: bool = False) -> Indices:
    """Tokens each row computes in a step, rows oldest first. [B] -> [B]

    One pending token (a decode) always runs; rows with more share ``prefill_tokens``, the oldest first.
    ``apart``: nobody gets less than it wants or the whole share, and decodes wait while others are behind.
    Where decodes are a run of their own it costs nearly the same for few rows as for all of them.
    """
    counts = pending.copy()
    behind = np.flatnonzero(pending > 1)
    if apart and len(behind):
        counts[pending == 1] = 0
    wanted = np.minimum(pending[behind], prefill_tokens)
    left = prefill_tokens - (wanted.cumsum() - wanted)  # of the share, when it is the row's turn
    given = np.minimum(wanted, np.maximum(left, 0))
    counts[behind] = np.where(given < wanted, 0, given) if apart else given
    return counts


def reserve(num_live: int, reserve_tokens: int, block_size: int) -> int:
    """Blocks to leave free when a row joins ``num_live`` others."""
    return blocks_for(num_live * reserve_tokens, block_size)


class Scheduler:
    """First come, first served, as far as slots, blocks and the step's token budget go."""

    def __init__(self, policy: Policy, pool: BlockPool, live: LiveBatch, context_length: int) -> None:
        self.policy = policy
        self.limit: float = policy.max_batch  # live rows admitted now; see shrink
        self.num_preemptions = 0
        self._pool = pool
        self._live = live
        self._context_length = context_length
        self._arrivals = itertools.count()
        self._rows: dict[int, Sequence] = {}  # every row that has not ended, by id
        self._waiting: deque[Sequence] = deque()  # by arrival, preempted rows in their old place
        self._finishing: dict[int, Sequence] = {}  # by arrival: off its seat, its last token under way
        self._cancelled: set[int] = set()
        self._held = 0  # steps in a row in which decodes waited
        self._idle = 0  # slots left empty though a row waited, summed over the steps since rows were seated
        self._left: list[int] = []
        self._joined: list[Sequence] = []
        self._outputs: list[Output] = []

    # -- asked by anyone, between steps

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._outputs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, row: Row) -> None:
        """Queues a row. One that can never run is refused at once, by an Output."""
        assert row.id not in self._rows, f"row {row.id} is already here"
        row = self._cut(row) if row.open_ended else row
        refusal = self._refusal(row)
        if refusal:
            self._outputs.append(Output(row.id, (), *refusal))
        else:
            self._rows[row.id] = sequence = Sequence(row, next(self._arrivals))
            self._waiting.append(sequence)

    def cancel(self, row_id: int) -> None:
        """Ends a row at the next plan. A row that has ended meanwhile is nobody's fault: ignored."""
        if row_id in self._rows:
            self._cancelled.add(row_id)

    def take_outputs(self) -> list[Output]:
        """What there is to say since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def computed(self, row_id: int) -> int | None:
        """Tokens of the row in the cache; None when it has ended."""
        sequence = self._rows.get(row_id)
        if sequence is None:
            return None
        return int(self._live.computed[sequence.slot]) if sequence.slot >= 0 else 0

    # -- plan

    def plan(self, only: Set[int] | None = None) -> Step:
        """The next step: decodes, and prefill as far as its share goes; see ``deal``.

        ``only``: admit these row ids alone (the live rows are among them). Raises RuntimeError when rows wait
        and none can run: that is a bug and never the end of the work.
        """
        if self._cancelled:
            self._drop_cancelled()
        self._retire(self._live.spent)
        self._make_room()
        self._admit(only)
        step = self._slices()
        if not len(self._live) and self._wait(only):
            raise RuntimeError(
                f"{len(self._rows)} rows wait and none can run: {self._pool.num_free} blocks free"
            )
        return step

    def _drop_cancelled(self) -> None:
        gone = [self._rows[row_id] for row_id in self._cancelled & self._rows.keys()]
        for sequence in gone:
            self._tell(sequence, Status.CANCELLED)
        self._unseat(np.array([one.slot for one in gone if one.slot >= 0], np.int64))
        self._waiting = deque(one for one in self._waiting if one.row.id not in self._cancelled)
        self._cancelled.clear()

    def _wait(self, only: Set[int] | None) -> bool:
        """Whether rows wait, or those of ``only`` that have not ended."""
        return any(only is None or one.row.id in only for one in self._waiting)

    def _retire(self, spent: Indices) -> None:
        """Frees the seats of rows whose last token is promised: nothing more is computed for them."""
        for slot in spent.tolist():
            sequence = self._live.at(slot)
            sequence.output = self._live.output(slot)
            self._finishing[sequence.arrival] = sequence
        if len(spent):
            self._unseat(spent)

    @property
    def must_preempt(self) -> bool:
        """Whether the next plan may send a row back, for which every token must have landed."""
        return len(self._live.cramped) > self._pool.num_free

    def _make_room(self) -> None:
        """A block for each row whose tokens outgrew its own; where none is left, the newest rows make way."""
        while len(cramped := self._live.cramped) > self._pool.num_free:
            self._preempt(self._live.order[-1:])
            self.num_preemptions += 1
        if len(cramped):
            self._live.grow(cramped, self._pool.lend(len(cramped)))

    def _admit(self, only: Set[int] | None) -> None:
        """Seats waiting rows while slots, blocks and the prefill share last.

        A row that does not fit is stepped over, a bounded number of times. A trial (``only``) steps over whom
        it likes and counts nothing.
        """
        if not self._waiting or not self._has_seat(0):
            return
        pending = self._live.pending
        if only is None and self._shall_wait(pending):
            return
        share = self.policy.prefill_tokens - int(pending[pending > 1].sum())
        joining, blocks, passed = list[Sequence](), 0, list[Sequence]()
        while self._waiting and self._has_seat(len(joining)) and share >= self._least_share(self._waiting[0]):
            sequence = self._waiting.popleft()
            needed = blocks_for(sequence.num_tokens, self._live.block_size)
            if (only is None or sequence.row.id in only) and self._fit(len(joining), blocks + needed):
                joining.append(sequence)
                blocks += needed
                share -= sequence.num_tokens
                for other in passed if only is None else ():
                    other.overtaken += 1
            else:
                passed.append(sequence)
            if passed and only is None and self._must_wait(passed):
                break
        self._waiting.extendleft(reversed(passed))
        if joining:
            self._live.join(joining, self._pool.lend(blocks))
            self._joined.extend(joining)

    def _least_share(self, sequence: Sequence) -> int:
        """Of the step's prefill tokens, to be seated for."""
        return min(sequence.num_tokens, self.policy.prefill_tokens) if self.policy.apart else 1

    def _shall_wait(self, pending: Indices) -> bool:
        """Whether seating rows now would start a run of prefills before it pays.

        The run holds up every live row for ``prefill_launch`` steps, an empty slot loses one step a step. The
        sum of both is least when the slots' loss has come up to the run's cost: the economic order quantity
        (Harris 1913). Nor are rows seated where decodes have waited too long: those that end with their first
        token would keep them waiting for ever.
        """
        if self._held >= MOST_HELD and len(pending):
            return True
        if (pending > 1).any():  # there is such a run in this step anyway
            return False
        self._idle += min(self.policy.max_batch - len(self._live), len(self._waiting))
        if self._idle < self.policy.prefill_launch * len(self._live):
            return True
        self._idle = 0
        return False

    def _has_seat(self, joining: int) -> bool:
        """For one more row beside those that are live or ``joining`` already."""
        return len(self._live) + joining + 1 <= self.limit

    def _must_wait(self, passed: list[Sequence]) -> bool:
        """Whether nobody may overtake ``passed`` any more."""
        overtaken = any(one.overtaken >= self.policy.max_overtakes for one in passed)
        return overtaken or len(passed) > self.policy.lookahead

    def _fit(self, joining: int, blocks: int) -> bool:
        """Whether the pool has these blocks, and a reserve for those who are live or ``joining`` already."""
        kept = reserve(len(self._live) + joining, self.policy.reserve_tokens, self._live.block_size)
        return blocks + kept <= self._pool.num_free

    def _slices(self) -> Step:
        pending = self._live.pending
        counts = deal(pending, self.policy.prefill_tokens, self.policy.apart)
        self._held = self._held + 1 if (counts[pending == 1] == 0).any() else 0
        runs = np.flatnonzero(counts)
        slots = self._live.order[runs]
        step = Step(
            slots=slots,
            starts=self._live.computed[slots],
            counts=counts[runs],
            samples=(counts == pending)[runs],
            arrivals=self._live.arrival[slots],
            left=tuple(self._left),
            joined=tuple(self._joined),
        )
        self._left.clear()
        self._joined.clear()
        return step

    # -- launch and land

    def launch(self, step: Step) -> None:
        """Books what ``step`` computes, and a promised token for each of its n sampling rows."""
        self._live.computed[step.slots] += step.counts
        self._live.promise(step.slots[step.samples])

    def land(self, step: Step, tokens: Ints, status: NDArray[np.uint8]) -> None:
        """Books what the n sampling rows of a launched step drew [n]. Ended rows leave at once.

        A row that left while the step was under way is passed over, unless all it lacks is this token.
        """
        live, slots, arrivals = self._live, step.slots[step.samples], step.arrivals[step.samples]
        here = live.arrival[slots] == arrivals
        for index in np.flatnonzero(~here).tolist() if self._finishing else ():
            self._finish(int(arrivals[index]), int(tokens[index]), Status(status[index]))
        slots, tokens, status = slots[here], tokens[here], status[here]
        drawn = status <= Status.LENGTH  # beyond, the row ended without a token
        live.keep(slots[drawn], tokens[drawn])
        ended = status != Status.RUNNING
        for index in np.flatnonzero(ended | live.streamed[slots]).tolist():
            self._tell(live.at(slots[index]), Status(status[index]))
        if ended.any():
            self._unseat(slots[ended])
            self._regrow(int(ended.sum()))

    def _finish(self, arrival: int, token: int, status: Status) -> None:
        sequence = self._finishing.pop(arrival, None)
        if sequence is not None and self._rows.get(sequence.row.id) is sequence:  # else it was cancelled
            if status <= Status.LENGTH:
                sequence.output.append(token)
            self._tell(sequence, status)
            self._regrow(1)

    def _regrow(self, ended: int) -> None:
        self.limit = min(self.limit + ended / self.limit, self.policy.max_batch)

    # -- after a failed step: the cache's contents are gone, the tokens are here

    def evict(self) -> None:
        """Every live row waits again, in its old place, with its tokens."""
        self._preempt(self._live.order)

    def fail(self, row_id: int, message: str) -> None:
        """Ends an evicted row."""
        sequence = self._rows[row_id]
        self._waiting.remove(sequence)
        self._tell(sequence, Status.FAILED, message)

    def shrink(self) -> None:
        """Halves the live rows admitted. They grow back by one with each batch of them that has ended."""
        self.limit = max(1.0, min(self.limit, len(self._rows)) // 2)

    # -- a row's ways out of its seat

    def _preempt(self, slots: Indices) -> None:
        """The rows in ``slots`` wait again, each before those that came after it."""
        for slot in slots.tolist():
            sequence = self._live.at(slot)
            assert self._live.known[slot] == self._live.length[slot], "preempted with a token under way"
            sequence.output = self._live.output(slot)
            newer = (place for place, one in enumerate(self._waiting) if one.arrival > sequence.arrival)
            self._waiting.insert(next(newer, len(self._waiting)), sequence)
        self._unseat(slots)

    def _unseat(self, slots: Indices) -> None:
        self._pool.free(self._live.leave(slots))
        self._left.extend(slots.tolist())

    def _tell(self, sequence: Sequence, status: Status, message: str = "") -> None:
        """Puts an Output of what is new. Unless it is RUNNING the row is no longer ours; its seat may be."""
        if status != Status.RUNNING:
            del self._rows[sequence.row.id]
        if sequence.slot >= 0:
            news = self._live.output(sequence.slot, since=sequence.num_sent)
        else:
            news = sequence.output[sequence.num_sent :]
        sequence.num_sent += len(news)
        self._outputs.append(Output(sequence.row.id, news, status, message))

    def _cut(self, row: Row) -> Row:
        """The row with no more output than the pool holds, if it may have so little."""
        cells = self._pool.num_usable * self._live.block_size
        room = cells + 1 - len(row.prompt)  # the last token is never run
        if row.params.max_tokens <= room:
            return row
        most = min(row.params.max_tokens, max(room, row.params.min_tokens, 1))
        return replace(row, params=replace(row.params, max_tokens=most))

    def _refusal(self, row: Row) -> tuple[Status, str] | None:
        num_prompt, max_tokens = len(row.prompt), row.params.max_tokens
        asked = f"{num_prompt} prompt tokens + max_tokens {max_tokens} = {num_prompt + max_tokens}"
        needs = blocks_for(num_prompt + max_tokens - 1, self._live.block_size)  # the last token is never run
        if not num_prompt or max_tokens < 1:
            return Status.FAILED, f"nothing to do: {asked} tokens"
        if num_prompt + max_tokens > self._context_length:
            return Status.TOO_LARGE, f"{asked}, the model's context is {self._context_length}"
        if needs > self._pool.num_usable:
            return (
                Status.TOO_LARGE,
                f"{asked} tokens need {needs} KV blocks, there are {self._pool.num_usable}",
            )
        return None

    def check(self) -> None:
        """Raises AssertionError where scheduler, live batch and pool contradict one another."""
        live = self._live
        live.check()
        seated = [live.at(slot) for slot in live.order.tolist()]
        self._pool.check(live.held(live.order))
        finishing = [one for one in self._finishing.values() if one.row.id in self._rows]
        everyone = [*seated, *self._waiting, *finishing]
        assert len(everyone) == len(self._rows), "a row is lost or there twice"
        assert all(self._rows[one.row.id] is one for one in everyone)
        assert all(one.slot == -1 for one in (*self._waiting, *finishing))
        arrivals = [one.arrival for one in self._waiting]
        assert arrivals == sorted(arrivals), "not in order of arrival"
        assert all(one.overtaken <= self.policy.max_overtakes for one in everyone), "overtaken too often"
        assert len(live) <= self.policy.max_batch
