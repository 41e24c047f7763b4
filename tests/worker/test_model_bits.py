"""A row's logits are the same bits alone and in any company: every batch size, chunk, block and table width.

Once thoroughly, on one layer with the real model's matrix shapes (which choose the kernels), in float32 and
in 8 bits; and once with the real model. If a CPU or a runtime should break the promise, it breaks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from model_batches import Part, make_batch
from numpy.typing import NDArray
from tiny_gguf import TOKENS, TinyLlama

from worker.build import build_model
from worker.folder import ModelFolder
from worker.model import OrtModel

NUM_BLOCKS = 700
Floats = NDArray[np.float32]


@dataclass
class Stage:
    """A model, scattered blocks to lend, and rows with a past."""

    model: OrtModel
    vocab_size: int
    dice: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def __post_init__(self) -> None:
        self.free = self.dice.permutation(np.arange(1, NUM_BLOCKS)).tolist()

    def ids(self, count: int) -> list[int]:
        return self.dice.integers(3, self.vocab_size, count).tolist()

    def lend(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.model.block_size))]

    def run(self, *parts: Part, spare_width: int = 0) -> Floats:
        return self.model.run(make_batch(parts, self.model.block_size, spare_width)).copy()

    def prefill(self, ids: list[int], blocks: list[int], chunk: int) -> Floats:
        """Logits behind the last token, computed ``chunk`` tokens a step."""
        for start in range(0, len(ids), chunk):
            logits = self.run(Part(ids[start : start + chunk], start, blocks))
        return logits[0]

    def decode_part(self, length: int) -> Part:
        """A row with ``length`` tokens in the cache, about to decode."""
        ids, blocks = self.ids(length + 1), self.lend(length + 1)
        self.prefill(ids[:-1], blocks, 64)
        return Part(ids[-1:], length, blocks)


@pytest.fixture(scope="module", params=["fp32", "q8"])
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """One layer as wide as SmolLM2-135M's."""
    path = tmp_path_factory.mktemp("wide")
    wide = TinyLlama(layers=1, hidden=576, ffn=1536, heads=9, kv_heads=3, context=1024)
    build_model(wide.write(path / "wide.gguf"), path / "wide", request.param)
    return Stage(OrtModel(ModelFolder.load(path / "wide"), num_blocks=NUM_BLOCKS), len(TOKENS))


def test_any_number_of_neighbours_and_of_logits(layer: Stage) -> None:
    lengths = layer.dice.integers(1, 100, 63)
    probe, *others = [layer.decode_part(length) for length in (37, *lengths.tolist())]
    alone = layer.run(probe)[0]
    silent = [Part(part.ids, part.past, part.blocks, False) for part in others]
    for size in range(1, 65):
        place = size // 3
        company = others[: size - 1]
        together = layer.run(*company[:place], probe, *company[place:])
        assert np.array_equal(together[place], alone), size
    for num_logits in range(1, 33):
        size = 33 if num_logits % 2 else 64
        parts = [*others[: num_logits - 1], *silent[num_logits:size], probe]
        assert np.array_equal(layer.run(*parts)[-1], alone), num_logits


def test_any_chunk_blocks_and_table_width(layer: Stage) -> None:
    for length in (1, 16, 17, 64, 130, 300):
        ids = layer.ids(length)
        blocks = layer.lend(length)
        alone = layer.prefill(ids, blocks, 64)
        for chunk in (7, 16, 31, 200):
            elsewhere = layer.dice.permutation(blocks).tolist()
            assert np.array_equal(layer.prefill(ids, elsewhere, chunk), alone), (length, chunk)
            blocks = elsewhere
        for spare_width in range(1, 12):
            last = layer.run(Part(ids[-1:], length - 1, blocks), spare_width=spare_width)
            assert np.array_equal(last[0], alone), (length, spare_width)
        layer.free += blocks


def test_a_wide_neighbour(layer: Stage) -> None:
    """The table is as wide as the longest row needs, or the step is cut in two: neither shows."""
    probe, long = layer.decode_part(37), layer.decode_part(900)
    alone = layer.run(probe)[0]
    limits = layer.model._run_cost, layer.model._max_blocks
    for run_cost, max_blocks in ((10**9, 10**9), (0, 10**9), (10**9, 1)):
        layer.model._run_cost, layer.model._max_blocks = run_cost, max_blocks
        assert np.array_equal(layer.run(long, probe)[1], alone)
        assert np.array_equal(layer.run(probe, long)[0], alone)
    layer.model._run_cost, layer.model._max_blocks = limits


def test_what_others_leave_in_blocks_is_never_seen(layer: Stage) -> None:
    """NaN everywhere but in the row's own past: in free blocks, in blocks lent ahead, behind the end."""
    ids = layer.ids(100)
    right = [layer.run(Part(ids[:30], 0, table := layer.lend(160)))[0]]
    right += [layer.run(Part(ids[at : at + 35], at, table))[0] for at in (30, 65)]
    neighbour = layer.decode_part(200)
    layer.model._pool[:, :, [b for b in range(1, NUM_BLOCKS) if b not in neighbour.blocks]] = np.nan
    layer.free += table
    table = layer.lend(160)
    found = [layer.run(Part(ids[:30], 0, table), neighbour)[0]]
    found += [layer.run(Part(ids[at : at + 35], at, table), neighbour)[0] for at in (30, 65)]
    for one, other in zip(found, right, strict=True):
        assert np.array_equal(one, other)
    layer.model._pool[:] = 0


@pytest.fixture(scope="module")
def stage(model_folder: Path) -> Iterator[Stage]:
    yield Stage(OrtModel(ModelFolder.load(model_folder), num_blocks=NUM_BLOCKS), 49152)


@pytest.mark.model
def test_the_real_model_is_the_same_bits_in_any_schedule(stage: Stage) -> None:
    """Two rows prefilled and decoded alone, then in company that joins, chunks and leaves differently."""
    lengths, num_decodes = (21, 90), 2
    rows = [stage.ids(length + num_decodes) for length in lengths]
    alone = []
    for ids, length in zip(rows, lengths, strict=True):
        blocks = stage.lend(len(ids))
        alone.append([stage.prefill(ids[:length], blocks, 64)])
        alone[-1] += [stage.run(Part([ids[at]], at, blocks))[0] for at in range(length, len(ids))]
        stage.free[:0] = blocks
    stage.model._pool[:] = np.nan
    stage.model._pool[:, :, 0] = 0  # the bin, which nobody writes
    others = [stage.decode_part(length) for length in (5, 300, 16)]
    for chunk, company in ((31, 0), (64, 3)):
        found = in_company(stage, rows, lengths, chunk, others[:company])
        for one, right in zip(found, alone, strict=True):
            assert all(map(np.array_equal, one, right)), (chunk, company)


def in_company(
    stage: Stage, rows: list[list[int]], lengths: tuple[int, ...], chunk: int, others: list[Part]
) -> list[list[Floats]]:
    """Each row's logits from its last prompt token on; every step holds a part of each unfinished row."""
    tables, done = [stage.lend(len(ids)) for ids in rows], [0] * len(rows)
    found: list[list[Floats]] = [[] for _ in rows]
    while any(at < len(ids) for at, ids in zip(done, rows, strict=True)):
        live = [i for i, ids in enumerate(rows) if done[i] < len(ids)]
        ends = {i: min(done[i] + chunk, lengths[i]) if done[i] < lengths[i] else done[i] + 1 for i in live}
        parts = [Part(rows[i][done[i] : ends[i]], done[i], tables[i], ends[i] >= lengths[i]) for i in live]
        logits = iter(stage.run(*others, *parts)[len(others) :])
        for i in live:
            done[i] = ends[i]
            if done[i] >= lengths[i]:
                found[i].append(next(logits))
    for table in tables:
        stage.free[:0] = table
    return found
