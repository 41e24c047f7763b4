"""The scheduler's policy with integers: no model, no sampler; drawn tokens are made up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine_fakes import row

from kernels.rows import Status
from worker.blocks import BlockPool
from worker.live import LiveBatch
from worker.scheduler import MOST_HELD, Policy, Scheduler, deal, reserve
from worker.sequence import Output, Row, Step

CONTEXT = 256


class Bench:
    """A scheduler whose every step is checked. Each drawn token is 7; a row ends at its max_tokens."""

    def __init__(self, num_blocks: int = 65, block_size: int = 4, **policy: int) -> None:
        numbers = Policy(**{"max_batch": 4, "prefill_tokens": 8, "reserve_tokens": 0, **policy})
        self.pool = BlockPool(num_blocks)
        self.live = LiveBatch(numbers.max_batch, CONTEXT, block_size)
        self.scheduler = Scheduler(numbers, self.pool, self.live, CONTEXT)

    def add(self, *rows: Row) -> None:
        for one in rows:
            self.scheduler.add(one)

    def plan(self) -> Step:
        step = self.scheduler.plan()
        self.scheduler.check()
        return step

    def commit(self, step: Step) -> list[Output]:
        slots = step.slots[step.samples].tolist()
        outputs = [len(self.live.output(slot)) + 1 for slot in slots]
        limits = [self.live.at(slot).row.params.max_tokens for slot in slots]
        status = [Status.LENGTH if n == most else 0 for n, most in zip(outputs, limits, strict=True)]
        self.scheduler.launch(step)
        self.scheduler.land(step, np.full(len(slots), 7, np.int32), np.array(status, np.uint8))
        self.scheduler.check()
        return self.scheduler.take_outputs()

    def step(self) -> dict[int, tuple[int, int]]:
        """Runs one step; (start, count) by row id."""
        step = self.plan()
        ran = self.slices(step)
        self.commit(step)
        return ran

    def slices(self, step: Step) -> dict[int, tuple[int, int]]:
        columns = zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        return {self.live.at(slot).row.id: (start, count) for slot, start, count in columns}

    def ids(self) -> list[int]:
        """Live rows, oldest first."""
        return [self.live.at(slot).row.id for slot in self.live.order.tolist()]


@pytest.mark.parametrize(
    ("pending", "share", "counts"),
    [
        ([1, 1, 1], 8, [1, 1, 1]),
        ([5, 1, 9], 8, [5, 1, 3]),
        ([9, 5, 1], 8, [8, 0, 1]),
        ([2, 2, 2], 3, [2, 1, 0]),
        ([1] * 20, 1, [1] * 20),  # decodes are not rationed
        ([], 8, []),
    ],
)
def test_deal(pending: list[int], share: int, counts: list[int]) -> None:
    assert deal(np.array(pending, np.int64), share).tolist() == counts


@pytest.mark.parametrize(
    ("pending", "share", "counts"),
    [
        ([5, 1, 9, 3], 8, [5, 0, 0, 0]),  # who wants more than is left waits, all behind it, and decodes
        ([20, 4, 1], 8, [8, 0, 0]),  # more than the whole share: all of it
        ([4, 20, 1], 8, [4, 0, 0]),
        ([4, 4, 4], 8, [4, 4, 0]),
        ([1, 1], 8, [1, 1]),
    ],
)
def test_deal_apart(pending: list[int], share: int, counts: list[int]) -> None:
    assert deal(np.array(pending, np.int64), share, apart=True).tolist() == counts


def test_rows_that_end_at_once_do_not_keep_decodes_waiting() -> None:
    """They leave in the step that computes them, so that others could be seated in every step."""
    bench = Bench(apart=1)
    bench.add(row(0, range(3), max_tokens=20), row(1, range(3), max_tokens=20))
    bench.add(*(row(number, range(4), max_tokens=1) for number in range(2, 400)))
    ran = [bench.step() for _ in range(120)]
    decodes = [number for number, step in enumerate(ran) if 0 in step and step[0][0] > 0]
    assert len(decodes) == 19, "it ends, though prompts wait"
    assert max(b - a for a, b in pairwise(decodes)) <= MOST_HELD + 1
    assert bench.scheduler.num_waiting > 150


@pytest.mark.parametrize(
    ("num_live", "tokens", "block_size", "blocks"),
    [(0, 16, 16, 0), (5, 16, 16, 5), (5, 16, 256, 1), (3, 0, 4, 0)],
)
def test_reserve(num_live: int, tokens: int, block_size: int, blocks: int) -> None:
    assert reserve(num_live, tokens, block_size) == blocks


def test_a_prompt_runs_in_chunks_then_decodes() -> None:
    bench = Bench()
    bench.add(row(0, range(20), max_tokens=3))
    slices = [bench.step() for _ in range(5)]
    assert slices == [{0: (0, 8)}, {0: (8, 8)}, {0: (16, 4)}, {0: (20, 1)}, {0: (21, 1)}]
    assert not bench.scheduler.has_work


def test_decodes_never_wait_for_a_long_prompt_nor_it_for_them() -> None:
    bench = Bench(num_blocks=129)
    bench.add(*(row(i, [i], max_tokens=50) for i in range(3)))
    bench.step()
    bench.add(row(3, range(200), max_tokens=2))
    for chunk in range(25):
        assert bench.step() == {0: (chunk + 1, 1), 1: (chunk + 1, 1), 2: (chunk + 1, 1), 3: (8 * chunk, 8)}


def test_rows_join_as_far_as_the_prefill_share_goes() -> None:
    bench = Bench()
    bench.add(*(row(i, range(5), max_tokens=9) for i in range(4)))
    assert bench.step() == {0: (0, 5), 1: (0, 3)}
    assert bench.step() == {0: (5, 1), 1: (3, 2), 2: (0, 5), 3: (0, 1)}


def test_a_finished_row_leaves_at_once_and_its_slot_is_refilled_in_the_next_step() -> None:
    bench = Bench(max_batch=1)
    bench.add(row(0, [1], max_tokens=1), row(1, [2], max_tokens=1))
    assert [output.id for output in bench.commit(bench.plan())] == [0]
    assert len(bench.live) == 0
    assert bench.pool.num_free == bench.pool.num_usable
    step = bench.plan()
    assert step.left == (0,)
    assert [sequence.row.id for sequence in step.joined] == [1]
    assert bench.slices(step) == {1: (0, 1)}


def test_a_step_is_frozen() -> None:
    bench = Bench()
    bench.add(row(0, [1], max_tokens=1))
    with pytest.raises(ValueError, match="read-only"):
        bench.plan().counts[0] = 2


def test_growth_is_block_by_block() -> None:
    bench = Bench()
    bench.add(row(0, range(6), max_tokens=9))
    held = []
    while bench.scheduler.has_work:
        step = bench.plan()
        held.append(int(bench.live.num_blocks[0]))
        bench.commit(step)
    assert held == [2, 2, 2, 3, 3, 3, 3, 4, 4]  # cached tokens: 6, 7, ... 14


def test_the_newest_makes_way_and_resumes_with_its_tokens() -> None:
    bench = Bench(num_blocks=5)  # four blocks of four tokens
    bench.add(row(0, range(7), max_tokens=9), row(1, range(5), max_tokens=5))
    assert bench.step() == {0: (0, 7), 1: (0, 1)}
    assert bench.step() == {0: (7, 1), 1: (1, 4)}
    step = bench.plan()  # row 0 needs its third block
    assert bench.slices(step) == {0: (8, 1)}
    assert step.left == (1,)
    assert bench.scheduler.num_waiting == bench.scheduler.num_preemptions == 1
    bench.commit(step)
    ran = [bench.step() for _ in range(7)]
    assert all(list(slices) == [0] for slices in ran[:6])
    assert ran[6] == {1: (0, 6)}  # prompt and the one token it had
    outputs = [output for _ in range(3) for output in bench.commit(bench.plan())]
    assert [(output.id, output.tokens) for output in outputs] == [(1, [7] * 5)]


def test_a_preempted_row_waits_in_its_old_place() -> None:
    bench = Bench(num_blocks=5)
    bench.add(row(0, range(7), max_tokens=8), row(1, range(5), max_tokens=5))
    bench.step()
    bench.add(row(2, range(5), max_tokens=1), row(3, range(5), max_tokens=1))
    bench.step()
    bench.step()
    assert bench.ids() == [0]
    while bench.scheduler.num_waiting == 3:
        bench.step()
    assert bench.ids()[0] == 1


def test_the_oldest_row_is_never_preempted_and_everybody_ends() -> None:
    bench = Bench(num_blocks=9)
    rows = [row(i, range(3 + i), max_tokens=20) for i in range(8)]
    bench.add(*rows)
    ended: list[int] = []
    while bench.scheduler.has_work:
        oldest = bench.ids()[:1]
        step = bench.plan()
        assert bench.ids()[:1] == oldest or not oldest
        ended += [output.id for output in bench.commit(step)]
    assert sorted(ended) == list(range(8))
    assert bench.scheduler.num_preemptions > 0


def test_a_reserve_spares_preemptions() -> None:
    def preemptions(reserve_tokens: int) -> int:
        bench = Bench(num_blocks=17, max_batch=8, prefill_tokens=32, reserve_tokens=reserve_tokens)
        bench.add(*(row(i, range(8), max_tokens=16) for i in range(30)))
        while bench.scheduler.has_work:
            bench.step()
        return bench.scheduler.num_preemptions

    assert preemptions(8) < preemptions(0) / 2


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
def test_a_row_that_does_not_fit_is_overtaken_a_bounded_number_of_times(max_overtakes: int) -> None:
    bench = Bench(num_blocks=9, max_batch=8, max_overtakes=max_overtakes)
    bench.add(row(0, range(8), max_tokens=24))  # keeps blocks for 24 steps
    bench.step()
    bench.add(row(1, range(28), max_tokens=1))  # wants seven of the six left
    bench.add(*(row(i, [1], max_tokens=1) for i in range(2, 40)))
    before = []
    while 1 not in bench.ids():
        before += [output.id for output in bench.commit(bench.plan())]
    assert before == [*range(2, 2 + max_overtakes), 0]


def test_overtakers_keep_their_own_order_and_nobody_looks_too_far() -> None:
    bench = Bench(num_blocks=9, max_batch=8, lookahead=2)
    bench.add(row(0, range(8), max_tokens=24))
    bench.step()
    bench.add(*(row(i, range(28), max_tokens=1) for i in (1, 2)))
    bench.add(row(3, [1], max_tokens=9), row(4, [1], max_tokens=9))
    bench.step()
    assert bench.ids() == [0, 3, 4]
    bench.add(row(5, range(28), max_tokens=1), row(6, [1], max_tokens=9))
    bench.step()
    assert bench.ids() == [0, 3, 4]  # three rows that do not fit are one too many to look past


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "status", "words"),
    [
        (200, 57, Status.TOO_LARGE, ["200", "57", "257", "context is 256"]),
        (30, 20, Status.TOO_LARGE, ["30", "20", "50", "13 KV blocks", "there are 12"]),
        (0, 5, Status.FAILED, ["nothing to do"]),
        (5, 0, Status.FAILED, ["nothing to do"]),
    ],
)
def test_a_row_that_can_never_run_is_refused_at_once_with_the_numbers(
    prompt: int, max_tokens: int, status: Status, words: list[str]
) -> None:
    bench = Bench(num_blocks=13)
    bench.add(row(0, range(prompt), max_tokens))
    (output,) = bench.scheduler.take_outputs()
    assert (output.id, output.tokens, output.status) == (0, (), status)
    assert [word for word in words if word not in output.message] == []
    assert not bench.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "given", "least", "served"),
    [
        (29, 200, 0, 20),  # 48 cached positions, as below
        (48, 200, 0, 1),
        (29, 20, 0, 20),
        (29, 7, 0, 7),  # the worker's own default, say
        (29, 200, 19, 20),
        (29, 200, 21, None),  # what it has to say does not fit
        (49, 200, 0, None),  # nor does its prompt
    ],
)
def test_a_row_that_named_no_max_tokens_gets_what_the_pool_holds(
    prompt: int, given: int, least: int, served: int | None
) -> None:
    bench = Bench(num_blocks=13)
    one = row(0, range(prompt), given, min_tokens=least)
    bench.add(replace(one, open_ended=True))
    outputs = []
    while bench.scheduler.has_work:
        outputs += bench.commit(bench.plan())
    (output,) = outputs or bench.scheduler.take_outputs()
    if served is None:
        assert output.status == Status.TOO_LARGE
        assert f"{prompt} prompt tokens + max_tokens {max(1, least)} = " in output.message
    else:
        assert (list(output.tokens), output.status) == ([7] * served, Status.LENGTH)


def test_a_row_that_fills_the_pool_to_the_last_position_runs() -> None:
    bench = Bench(num_blocks=13)
    bench.add(row(0, range(29), max_tokens=20))  # 48 cached positions: 12 blocks of 4
    outputs = []
    while bench.scheduler.has_work:
        outputs += bench.commit(bench.plan())
    assert outputs == [Output(0, [7] * 20, Status.LENGTH)]
    assert bench.scheduler.num_preemptions == 0


def test_cancel_takes_effect_in_the_next_plan() -> None:
    bench = Bench(max_batch=2)
    bench.add(*(row(i, [i], max_tokens=9) for i in range(4)))
    bench.step()
    for row_id in (1, 2, 2, 77):
        bench.scheduler.cancel(row_id)
    step = bench.plan()
    assert bench.slices(step) == {0: (1, 1), 3: (0, 1)}  # the freed slot is refilled in the same plan
    outputs = bench.commit(step)
    assert [(output.id, output.tokens, output.status) for output in outputs] == [
        (1, [7], Status.CANCELLED),
        (2, [], Status.CANCELLED),
    ]


def test_a_cancelled_preempted_row_gives_what_it_had() -> None:
    bench = Bench(num_blocks=5)
    bench.add(row(0, range(7), max_tokens=9), row(1, range(5), max_tokens=5, streamed=True))
    for _ in range(3):
        bench.step()
    bench.scheduler.cancel(1)
    (output,) = bench.commit(bench.plan())
    assert (output.id, output.tokens, output.status) == (1, [], Status.CANCELLED)  # streamed: told already


def test_a_streamed_row_tells_every_token_once() -> None:
    bench = Bench()
    bench.add(row(0, [1], max_tokens=3, streamed=True), row(1, [1], max_tokens=3))
    told = [[(o.id, o.tokens, o.status) for o in bench.commit(bench.plan())] for _ in range(3)]
    assert told == [
        [(0, [7], Status.RUNNING)],
        [(0, [7], Status.RUNNING)],
        [(0, [7], Status.LENGTH), (1, [7] * 3, Status.LENGTH)],
    ]


@pytest.mark.parametrize("status", [Status.INVALID_LOGITS, Status.NO_ALLOWED_TOKEN])
def test_an_ending_without_a_token_adds_none(status: Status) -> None:
    bench = Bench()
    bench.add(row(0, [1], max_tokens=3))
    bench.step()
    step = bench.plan()
    bench.scheduler.launch(step)
    bench.scheduler.land(step, np.array([-1], np.int32), np.array([status], np.uint8))
    (output,) = bench.scheduler.take_outputs()
    assert (output.tokens, output.status) == ([7], status)


def test_rows_that_wait_and_cannot_run_are_an_error_not_an_end() -> None:
    bench = Bench()
    bench.pool.lend(64)  # a leak
    bench.add(row(0, [1], max_tokens=3))
    with pytest.raises(RuntimeError, match="1 rows wait and none can run"):
        bench.scheduler.plan()


def test_eviction_keeps_tokens_order_and_ids() -> None:
    bench = Bench(prefill_tokens=9)
    bench.add(*(row(i, [i, i, i], max_tokens=9) for i in range(3)))
    bench.step()
    bench.step()
    assert [bench.scheduler.computed(i) for i in (0, 1, 2, 3)] == [4, 4, 4, None]
    bench.scheduler.evict()
    bench.scheduler.check()
    assert bench.pool.num_free == bench.pool.num_usable
    assert [bench.scheduler.computed(i) for i in range(3)] == [0, 0, 0]
    bench.scheduler.fail(1, "why")
    assert bench.scheduler.take_outputs() == [Output(1, [7, 7], Status.FAILED, "why")]
    assert bench.step() == {0: (0, 5), 2: (0, 4)}


def test_a_trial_admits_its_own_rows_and_counts_no_overtakes() -> None:
    bench = Bench(max_overtakes=0)
    bench.add(*(row(i, [i], max_tokens=9) for i in range(4)))
    assert bench.slices(bench.scheduler.plan(only={1, 3})) == {1: (0, 1), 3: (0, 1)}
    bench.scheduler.check()
    bench.scheduler.evict()
    assert bench.slices(bench.scheduler.plan()) == dict.fromkeys(range(4), (0, 1))


def test_shrinking_halves_the_live_rows_and_each_ended_batch_gives_one_place_back() -> None:
    bench = Bench(max_batch=8)
    bench.add(*(row(i, [i], max_tokens=2) for i in range(50)))
    bench.step()
    bench.scheduler.evict()
    bench.scheduler.shrink()
    live = []
    while bench.scheduler.has_work:
        live.append(len(bench.step()))
    assert live[:6] == [4, 4, 5, 5, 6, 6]
    assert max(live) == 8


def sabotages() -> dict[str, object]:
    def table(bench: Bench) -> None:
        bench.live.table[0, 0] = bench.live.table[1, 0]

    def leak(bench: Bench) -> None:
        bench.pool.lend(1)

    def slot(bench: Bench) -> None:
        bench.live.free_slots.pop()

    def ahead(bench: Bench) -> None:
        bench.live.computed[0] = bench.live.length[0]

    def lost(bench: Bench) -> None:
        bench.scheduler._waiting.pop()

    def tail(bench: Bench) -> None:
        bench.live.table[0, 5] = 3

    return {act.__name__: act for act in (table, leak, slot, ahead, lost, tail)}


@pytest.mark.parametrize("name", sabotages())
def test_check_notices(name: str) -> None:
    bench = Bench()
    bench.add(*(row(i, range(3), max_tokens=9) for i in range(5)))
    bench.step()
    bench.scheduler.check()
    sabotages()[name](bench)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        bench.scheduler.check()
