"""Shared by the engine's tests: a model and a sampler that mind every token, rows, solo runs, a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.pending import Done
from kernels.rows import RowParams, Status
from worker.batch import Batch
from worker.dummy import EMPTY, Cells, TokenCache, one_hot, token_positions
from worker.engine import Engine
from worker.live import PROMISED
from worker.scheduler import Policy
from worker.sequence import Ints, Output, Row

MASK = 2**64 - 1


class HashModel:
    """The next token is a hash of every cached token and its position.

    One wrong block, stale cell, wrong position or missing token, and the row's output is another one.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        context_length: int = 128,
        block_size: int = 4,
        num_blocks: int = 65,
        max_step_tokens: int = 64,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_step_tokens = max_step_tokens
        self._cache = TokenCache(num_blocks, block_size)
        odd = np.random.default_rng(0).integers(1 << 62, size=context_length + block_size) * 2 + 1
        self._weights = odd.astype(np.uint64)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """One-hot logits [n, vocab_size]."""
        assert 0 < len(batch.input_ids) <= self.max_step_tokens
        positions = token_positions(batch)
        self._cache.write(batch, batch.input_ids << 24 | positions, positions)
        return one_hot(self._hash(*self._cache.read(batch)), self.vocab_size)

    def poison(self, blocks: Ints) -> None:
        """Overwrites blocks nobody holds: whoever still reads them answers wrong."""
        self._cache.cells[blocks] = EMPTY

    def _hash(self, cells: Cells, lengths: Cells) -> Cells:
        known = np.arange(cells.shape[1]) < lengths[:, None]
        assert (cells[known] != EMPTY).all(), "a row reads a position that nobody wrote"
        mixed = (cells + 1).astype(np.uint64) * self._weights[: cells.shape[1]]
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        total = np.where(known, mixed, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        total = (total ^ (total >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        tokens: Cells = (total >> np.uint64(40)).astype(np.int64) % self.vocab_size
        return tokens


class WatchfulSampler:
    """Greedy, then shifted by the row's seed and everything it has seen: lost or foreign state shows at once.

    Asserts that slots are taken free and given back taken.
    """

    def __init__(self, max_batch: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: list[tuple[RowParams, list[int], int] | None] = [None] * max_batch
        self.calls = 0

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        assert self.rows[slot] is None, f"slot {slot} still holds a row"
        self.rows[slot] = (params, [*prompt, *output], len(prompt))

    def release(self, slot: int) -> None:
        assert self.rows[slot] is not None, f"slot {slot} holds no row"
        self.rows[slot] = None

    def enqueue(self, logits: NDArray[np.float32], slots: NDArray[np.int32]) -> Done:
        assert logits.shape == (len(slots), self.vocab_size)
        assert len(set(slots.tolist())) == len(slots)
        self.calls += bool(len(slots))
        drawn = [self.draw(logits[i], slot) for i, slot in enumerate(slots.tolist())]
        return Done(np.array([t for t, _ in drawn], np.int32), np.array([s for _, s in drawn], np.uint8))

    def draw(self, logits: NDArray[np.float32], slot: int) -> tuple[int, Status]:
        row = self.rows[slot]
        assert row is not None, f"slot {slot} holds no row"
        params, history, num_prompt = row
        if np.isnan(logits).any():
            return -1, Status.INVALID_LOGITS
        token = (int(logits.argmax()) + params.seed + sum(history) + len(history)) % self.vocab_size
        history.append(token)
        return token, ending(params, token, len(history) - num_prompt)


class DeviceModel(HashModel):
    """Knows by itself what was drawn last for a slot, like a device."""

    def __init__(self, max_batch: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.drawn = np.zeros(max_batch, np.int64)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        slots = np.repeat(batch.slots, np.diff(batch.cumulative))
        fed = np.where(batch.input_ids == PROMISED, self.drawn[slots], batch.input_ids)
        return super().run(replace(batch, input_ids=fed))


class DeviceSampler(WatchfulSampler):
    """Draws at once into the model's memory; says what only when it is waited for. Ended rows stay ended."""

    def __init__(self, model: DeviceModel) -> None:
        super().__init__(len(model.drawn), model.vocab_size)
        self.model = model
        self.ended: dict[int, Status] = {}
        self.most_on_their_way = self.on_their_way = 0

    def release(self, slot: int) -> None:
        super().release(slot)
        self.ended.pop(slot, None)

    def draw(self, logits: NDArray[np.float32], slot: int) -> tuple[int, Status]:
        if slot in self.ended:
            return -1, self.ended[slot]
        token, status = super().draw(logits, slot)
        if status != Status.RUNNING:
            self.ended[slot] = status
        return token, status

    def enqueue(self, logits: NDArray[np.float32], slots: NDArray[np.int32]) -> Awaited:  # type: ignore[override]
        done = super().enqueue(logits, slots)
        self.model.drawn[slots] = done.tokens
        self.on_their_way += 1
        self.most_on_their_way = max(self.most_on_their_way, self.on_their_way)
        return Awaited(done, self)


class Awaited(NamedTuple):
    """A draw that counts how many others were under way when it was waited for."""

    done: Done
    sampler: DeviceSampler

    def wait(self) -> Done:
        self.sampler.on_their_way -= 1
        return self.done


def ending(params: RowParams, token: int, num_output: int) -> Status:
    if token in params.eos_ids:
        return Status.EOS
    if token in params.stop_ids:
        return Status.STOP
    return Status.LENGTH if num_output == params.max_tokens else Status.RUNNING


def row(id: int, prompt: Iterable[int], max_tokens: int, streamed: bool = False, **params: object) -> Row:
    return Row(id, tuple(prompt), RowParams(max_tokens=max_tokens, **params), streamed)  # type: ignore[arg-type]


def engine_over(model: HashModel, **policy: int) -> Engine:
    numbers = Policy(**{"max_batch": 4, "prefill_tokens": 16, **policy})
    return Engine(model, WatchfulSampler(numbers.max_batch, model.vocab_size), numbers)


def solo(one: Row) -> tuple[list[int], Status]:
    """What the row gives with the machine to itself: one slot, all blocks, its prompt in one chunk."""
    *partial, last = lonely_engine().generate([one])
    return [token for output in (*partial, last) for token in output.tokens], last.status


def by_hand(one: Row) -> tuple[list[int], Status]:
    """The same, stated without engine, cache or sampler."""
    tokens, num_prompt, status = list(one.prompt), len(one.prompt), Status.RUNNING
    while status == Status.RUNNING:
        shift = one.params.seed + sum(tokens) + len(tokens)
        tokens.append((hashed(tokens) + shift) % 64)
        status = ending(one.params, tokens[-1], len(tokens) - num_prompt)
    return tokens[num_prompt:], status


def hashed(tokens: list[int]) -> int:
    """HashModel's next token, one Python integer at a time."""
    total = 0
    for position, token in enumerate(tokens):
        mixed = ((token << 24 | position) + 1) * weights()[position] & MASK
        total += (mixed ^ (mixed >> 29)) * 0x9E3779B97F4A7C15
    total &= MASK
    total = (total ^ (total >> 32)) * 0xD6E8FEB86659FD93 & MASK
    return (total >> 40) % 64


@cache
def weights() -> list[int]:
    drawn = np.random.default_rng(0).integers(1 << 62, size=256).tolist()
    return [2 * number + 1 for number in drawn]


@cache
def lonely_engine() -> Engine:
    model = HashModel(block_size=16, num_blocks=9, max_step_tokens=129)
    return engine_over(model, max_batch=1, prefill_tokens=128)


class Ledger:
    """Collects Outputs and holds them to the contract: one ending a row, partial ones if streamed."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.endings: dict[int, Output] = {}

    def book(self, outputs: Iterable[Output], rows: dict[int, Row]) -> None:
        for output in outputs:
            assert output.id not in self.endings, "an Output after the end"
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            if output.status == Status.RUNNING:
                assert rows[output.id].streamed
                assert len(output.tokens) == 1
            else:
                self.endings[output.id] = output


def drain(
    engine: Engine, ledger: Ledger, rows: dict[int, Row], each: Callable[[], None] = lambda: None
) -> int:
    """Steps until nothing is left, checking after each; the number of steps."""
    steps = 0
    while engine.has_work:
        ledger.book(engine.step(), rows)
        engine.check()
        each()
        steps += 1
        assert steps < 10_000, "the engine does not come to an end"
    return steps


def run_all(engine: Engine, rows: Iterable[Row]) -> Ledger:
    """Adds all rows, steps to the end."""
    by_id = {one.id: one for one in rows}
    for one in by_id.values():
        engine.add(one)
    ledger = Ledger()
    drain(engine, ledger, by_id)
    return ledger
