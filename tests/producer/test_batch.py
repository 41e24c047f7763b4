"""A batch in one word, and a worker's report as JSON."""

from __future__ import annotations

import json

import pytest

from producer.batch import BatchStatus, Phase, State, WorkerReport


def status(state: State, ended: int) -> BatchStatus:
    return BatchStatus(
        id="m",
        queue="q",
        state=state,
        created=0.0,
        rows=10,
        completed=ended,
        failed=0,
        cancelled=0,
        prompt_tokens=0,
        completion_tokens=0,
        busy_seconds=0.0,
        queued_at=0.0,
    )


SERVING = [WorkerReport("w", {"queues": "p,q"})]
ELSEWHERE = [WorkerReport("w", {"queues": "p,qq"})]


@pytest.mark.parametrize(
    ("state", "ended", "workers", "phase"),
    [
        ("open", 0, [], "queueing"),
        ("open", 10, SERVING, "queueing"),
        ("closed", 0, [], "waiting"),
        ("closed", 5, ELSEWHERE, "waiting"),
        ("closed", 5, SERVING, "running"),
        ("closed", 5, [*ELSEWHERE, WorkerReport("x", {})], "running"),
        ("closed", 10, [], "done"),
        ("cancelled", 5, SERVING, "cancelled"),
        ("cancelled", 10, [], "cancelled"),
    ],
)
def test_a_batch_in_one_word(state: State, ended: int, workers: list[WorkerReport], phase: Phase) -> None:
    assert status(state, ended).phase(workers) == phase
    assert status(state, ended).to_dict(workers)["state"] == phase


def test_a_workers_numbers_are_numbers_and_its_names_are_not() -> None:
    fields = {
        "pid": "17",
        "tokens_per_second": "0.5",
        "live": "3/32",
        "model": "7",
        "queues": "1",
        "x": "1e5",
    }
    shown = WorkerReport("9", fields).to_dict()
    assert shown == {"name": "9", **fields, "pid": 17, "tokens_per_second": 0.5}
    assert type(shown["pid"]) is int
    assert json.dumps(WorkerReport("w", {"pid": "9" * 5000}).to_dict()), "a hostile report is text"
