"""The composition root: which flag is blamed for what cannot be built."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from kernels.cpu import BatchedSampler
from producer.errors import UsageError
from worker import compose
from worker.dummy import DummyModel
from worker.dummy_folder import DummyFolder
from worker.settings import DUMMY, EngineSettings


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


PARTS = pytest.mark.parametrize("part", ["kernels.cpu.BatchedSampler", "worker.engine.Engine"])


@PARTS
def test_what_the_live_batch_sizes_names_its_flag(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(part, failing(MemoryError("no room")))
    with pytest.raises(UsageError, match="--max-batch 7 is more than this model takes: no room"):
        compose.build_engine(EngineSettings(model=DUMMY, max_batch=7))


@PARTS
def test_what_is_wrong_beside_its_size_keeps_its_own_words(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(part, failing(ValueError("shapes differ")))
    with pytest.raises(ValueError, match=r"^shapes differ") as raised:
        compose.build_engine(EngineSettings(model=DUMMY, max_batch=7))
    assert raised.type is ValueError


@pytest.mark.parametrize("max_batch", [4096, 10**18])
def test_more_rows_than_a_step_takes_are_refused_before_anything_is_made_for_them(max_batch: int) -> None:
    with pytest.raises(UsageError, match=rf"--max-batch {max_batch}: a step .* 1 to 4095\."):
        compose.build_parts(EngineSettings(model=DUMMY, max_batch=max_batch))


def test_what_is_wrong_with_the_model_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "build_dummy", failing(ValueError("the file is damaged")))
    with pytest.raises(ValueError, match=r"^the file is damaged"):
        compose.build_engine(EngineSettings(model=DUMMY))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_sampler_keeps_to_the_threads_it_is_given(threads: int) -> None:
    """Several workers on a machine share its cores; each thread has memory of its own, too."""
    _, sampler = compose.build_parts(EngineSettings(model=DUMMY, max_batch=8, threads=threads))
    assert isinstance(sampler, BatchedSampler)
    assert sampler.threads == threads


@pytest.mark.parametrize(("num_blocks", "said"), [(101, ["1600", "8192"]), (513, None)])
def test_a_cache_smaller_than_a_rows_context_is_told(
    num_blocks: int, said: list[str] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that name no max_tokens are cut to it, and end as if they had named it."""
    folder = DummyFolder
    sizes = {"vocab_size": folder.vocab_size, "echo_id": folder.echo_id, "eos_id": folder.eos_id}
    monkeypatch.setattr(compose, "build_dummy", lambda: DummyModel(**sizes, num_blocks=num_blocks))
    with caplog.at_level(logging.WARNING):
        compose.build_engine(EngineSettings(model=DUMMY, max_batch=2, threads=1))
    (message,) = [record.message for record in caplog.records] or ("",)
    assert re.findall(r"\d+", message) == (said or [])
