"""OrtModel over the tiny graph: every cached cell counts, the pool's size, errors, the engine on top."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import WatchfulSampler, row
from model_batches import Part, make_batch
from tiny_graph import CONTEXT, VOCAB, write_tiny_folder

from producer.errors import UsageError
from worker import model as model_module
from worker.engine import Engine
from worker.folder import ModelFolder
from worker.memory import available_bytes
from worker.model import Floats, OrtModel, count_blocks
from worker.scheduler import Policy
from worker.sequence import Row
from worker.token_rows import Ids, TokenRows

PROMPT = [5, 17, 60, 2, 2, 33, 41, 9, 28, 54, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.load(write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def model(folder: ModelFolder) -> OrtModel:
    return OrtModel(folder, num_blocks=40)


def next_token(model: OrtModel, *parts: Part) -> list[int]:
    return model.run(make_batch(parts, model.block_size)).argmax(axis=1).tolist()


def test_chunks_and_scattered_blocks_give_the_same_token(model: OrtModel) -> None:
    whole = next_token(model, Part(PROMPT, 0, [1, 2, 3]))
    for chunk in (1, 2, 3, 5, 7):
        for blocks in ([9, 4, 30], [3, 2, 1]):
            for start in range(0, len(PROMPT), chunk):
                last = next_token(model, Part(PROMPT[start : start + chunk], start, blocks))
            assert last == whole


def test_every_cached_cell_changes_the_token(model: OrtModel) -> None:
    """The graph's own promise, without which the tests below would prove little."""
    blocks, spare = [9, 4, 30], 7
    right = next_token(model, Part(PROMPT, 0, blocks))
    wrong_table = 0
    for place in range(3):
        table = [spare if i == place else block for i, block in enumerate(blocks)]
        wrong_table += next_token(model, Part(PROMPT[-1:], len(PROMPT) - 1, table)) != right
        next_token(model, Part(PROMPT, 0, blocks))
    assert wrong_table == 3
    others = [[*PROMPT[:i], PROMPT[i] + 1, *PROMPT[i + 1 :]] for i in range(len(PROMPT))]
    changed = [next_token(model, Part([t % VOCAB for t in other], 0, blocks)) != right for other in others]
    assert sum(changed) >= len(PROMPT) - 1  # two hashes may meet by chance


def test_logits_come_in_the_order_asked_for_though_the_step_runs_in_parts(
    model: OrtModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Part(PROMPT * 9, 0, range(1, 26)),
        Part([8], 0, [26]),
        Part([9, 1], 0, [27], False),
        Part([3], 0, [28]),
    ]
    alone = [next_token(model, part)[0] for part in rows if part.wants_logits]
    run, sizes = model._run, []

    def counted(rows: TokenRows, wanted: Ids, logits: Floats) -> None:
        sizes.append(len(wanted))
        run(rows, wanted, logits)

    monkeypatch.setattr(model, "_run_cost", 0)
    monkeypatch.setattr(model, "_run", counted)
    assert next_token(model, *rows) == alone
    assert len(sizes) > 5
    assert sum(sizes) == 3


def test_a_step_without_logits(model: OrtModel) -> None:
    assert model.run(make_batch([Part(PROMPT, 0, [1, 2, 3], False)], 4)).shape == (0, VOCAB)


def test_garbage_left_in_blocks_reaches_no_row(model: OrtModel) -> None:
    right = next_token(model, Part(PROMPT, 0, [1, 2, 3]))
    model._pool[:, :, 1:] = np.nan
    assert next_token(model, Part(PROMPT, 0, [9, 4, 30])) == right


def test_an_error_leaves_the_model_usable(model: OrtModel) -> None:
    right = next_token(model, Part(PROMPT, 0, [1, 2, 3]))
    with pytest.raises(Exception, match="out of data bounds"):
        model.run(replace(make_batch([Part([1], 0, [9])], 4), logits_rows=np.array([5])))
    assert next_token(model, Part(PROMPT, 0, [1, 2, 3])) == right


def schedule(seed: int) -> list[Row]:
    dice = np.random.default_rng(seed)
    return [
        row(
            i,
            dice.integers(1, VOCAB, dice.integers(1, 40)).tolist(),
            max_tokens=int(dice.integers(1, 40)),
            seed=i,
        )
        for i in range(12)
    ]


def outputs(
    folder: ModelFolder, rows: Sequence[Row], max_batch: int, num_blocks: int
) -> dict[int, list[int]]:
    """Each row's tokens, with the engine's books checked after every step."""
    model = OrtModel(folder, num_blocks=num_blocks)
    policy = Policy(max_batch=max_batch, prefill_tokens=9, reserve_tokens=0)
    engine = Engine(model, WatchfulSampler(max_batch, VOCAB), policy)
    for one in rows:
        engine.add(one)
    found: dict[int, list[int]] = {one.id: [] for one in rows}
    while engine.has_work:
        for output in engine.step():
            found[output.id] += output.tokens
        engine.check()
    if num_blocks < 40 and max_batch > 1:
        assert engine.load.preemptions > 0
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_on_a_real_graph_batched_equals_isolated(seed: int, folder: ModelFolder) -> None:
    rows = schedule(seed)
    alone = outputs(folder, rows, max_batch=1, num_blocks=24)
    assert outputs(folder, rows, max_batch=4, num_blocks=24) == alone  # a small pool: rows are preempted
    assert outputs(folder, rows[::-1], max_batch=12, num_blocks=400) == alone


def test_the_pool_takes_what_it_is_given(folder: ModelFolder) -> None:
    block = 2 * 4 * 2 * 4 * 1 * 2  # keys and values, float32, layers, slots, heads, head size
    assert count_blocks(folder, 10 * block + 5, max_batch=32) == 10
    assert count_blocks(folder, None, max_batch=3) == 1 + 3 * CONTEXT // 4
    assert OrtModel(folder, kv_memory_bytes=10 * block).num_blocks == 10
    with pytest.raises(UsageError, match="--kv-memory"):
        count_blocks(folder, 2 * block - 1, max_batch=1)


def test_the_pool_takes_at_most_half_of_the_free_memory(folder: ModelFolder) -> None:
    large = replace(folder, context_length=10**9)
    size = count_blocks(large, None, max_batch=32) * 128
    assert math.isclose(size, available_bytes() / 2, rel_tol=0.2)


def test_an_old_runtime_is_refused(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module.ort, "__version__", "1.27.1")
    with pytest.raises(UsageError, match=r"ONNX Runtime 1\.27\.1 .* at least 1\.28"):
        OrtModel(folder, num_blocks=4)


def test_a_graph_the_runtime_cannot_load_is_a_usage_error(tmp_path: Path) -> None:
    path = write_tiny_folder(tmp_path / "tiny")
    graph = path / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"ScatterND", b"ScatterNX"))
    with pytest.raises(UsageError, match=r"cannot load .*model\.onnx.*ScatterNX"):
        OrtModel(ModelFolder.load(path), num_blocks=4)


def test_the_kind_must_fit(folder: ModelFolder) -> None:
    with pytest.raises(UsageError, match="cuda-paged"):
        OrtModel(replace(folder, kind="cuda-paged"))


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 3145728", MemoryError),
        (
            "Non-zero status code returned while running Gather node. Status Message: std::bad_alloc",
            MemoryError,
        ),
        ("CUDA failure 2: out of memory", MemoryError),
        (
            "Non-zero status code returned while running Gather node. indices element out of data bounds",
            RuntimeError,
        ),
    ],
)
def test_a_run_that_lacks_memory_says_so_by_its_type(
    model: OrtModel, monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    """The words of ONNX Runtime under RLIMIT_AS: it raises RuntimeError for everything."""

    class Session:
        def run_with_iobinding(self, binding: object) -> None:
            raise RuntimeError(said)

    monkeypatch.setattr(model, "_session", Session())
    with pytest.raises(raised, match=said) as caught:
        model.run(make_batch([Part(PROMPT, 0, [1, 2, 3])], model.block_size))
    assert caught.type is raised
