"""Settings: what a person may type, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.errors import UsageError
from worker import settings
from worker.settings import QueueShare
from worker.shares import Shares


def read(**flags: Any) -> settings.Settings:
    return settings.read(**{"model": "dummy", "redis_url": "redis://h", **flags})


def test_defaults() -> None:
    made = read()
    assert made.queues == (QueueShare("livebatch", 1),)
    assert (made.engine.max_batch, made.room, made.engine.device) == (32, 64, "cpu")
    assert (made.burst, made.grace_seconds, made.sampling_defaults) == (False, 30.0, "openai")


def test_a_gpu_has_other_defaults() -> None:
    engine = read(model="mine", device="cuda").engine
    assert (engine.device, engine.gpu, engine.max_batch, engine.loop) == ("cuda:0", 0, 256, "overlapped")
    told = read(model="mine", device="cuda:3", max_batch=8, loop="plain", deterministic=True).engine
    assert (told.gpu, told.max_batch, told.loop, told.deterministic) == (3, 8, "plain", True)
    assert (read().engine.gpu, read().engine.loop) == (None, "plain")


def test_the_dummy_model_computes_on_the_cpu_whatever_the_device() -> None:
    """It cannot find tokens that are still promised, which the overlapped loop hands it."""
    assert read(model="dummy", device="cuda").engine.loop == "plain"


def test_what_was_typed() -> None:
    made = read(
        queues=["a=3", "b"], max_batch=8, threads=2, kv_memory="1.5G", grace=0.0, sampling_defaults="model"
    )
    assert made.queues == (QueueShare("a", 3), QueueShare("b", 1))
    assert made.engine.kv_bytes == 3 << 29
    assert made.room == 16


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_batch": 0}, "--max-batch must be at least 1"),
        ({"threads": 0}, "--threads must be at least 1"),
        ({"max_tokens_default": 0}, "--max-tokens-default must be"),
        ({"grace": -1.0}, "--grace wants"),
        ({"grace": float("nan")}, "--grace wants"),
        ({"kv_memory": "lots"}, "--kv-memory wants a size"),
        ({"kv_memory": "0"}, "--kv-memory wants a size"),
        ({"device": "tpu"}, "--device is cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "--device is cpu, cuda or cuda:N"),
        ({"device": "cuda", "loop": "fast"}, "--loop is plain or overlapped"),
        ({"model": "mine", "loop": "overlapped"}, "--loop overlapped wants a model on a GPU"),
        ({"device": "cuda", "loop": "overlapped"}, "--loop overlapped wants a model on a GPU"),
        ({"sampling_defaults": "mine"}, "--sampling-defaults is openai or model"),
        ({"engine_timeout": 0.0}, "--engine-timeout wants seconds"),
        ({"queues": ["a", "a=2"]}, "twice"),
        ({"queues": [""]}, "--queue wants NAME"),
        ({"queues": ["a b"]}, "--queue wants NAME"),
        ({"queues": ["=3"]}, "--queue wants NAME"),
        ({"queues": ["a=0"]}, "from 1 to 1000"),
        ({"queues": ["a=x"]}, "from 1 to 1000"),
        ({"queues": ["a=²"]}, "from 1 to 1000"),
    ],
)
def test_what_cannot_be(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(**flags)


def test_names_differ() -> None:
    assert read().name != read().name


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
)
def test_full_queues_get_their_weights_share(weights: list[int], rooms: list[int]) -> None:
    shares = Shares([QueueShare(str(index), weight) for index, weight in enumerate(weights)])
    taken = dict.fromkeys((str(index) for index in range(len(weights))), 0)
    for room in rooms:
        quotas = shares.split(room)
        left, got = room, {}
        for name, quota in quotas:  # as the claim does: quotas in order, as far as the room goes
            got[name] = min(quota, left)
            left -= got[name]
        assert left == 0, "the quotas leave room unused"
        for name, count in got.items():
            taken[name] += count
        shares.took(got)
    for index, weight in enumerate(weights):
        fair = sum(rooms) * weight / sum(weights)
        assert abs(taken[str(index)] - fair) <= len(weights) + 1


def test_an_empty_queue_does_not_save_up() -> None:
    shares = Shares([QueueShare("a"), QueueShare("b")])
    for _ in range(100):
        shares.split(10)
        shares.took({"a": 10})
    assert dict(shares.split(10))["b"] <= 7
