"""Golden bytes: what crosses the wire changes only together with wire.VERSION, and outputs only on purpose.

A new wire version gets a folder of its own; the old folder stays, and its messages must be refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producer import jsonl, wire
from producer.errors import WireError

HERE = Path(__file__).parent
CURRENT = HERE / f"v{wire.VERSION}"

REQUESTS = {
    "request-least": wire.Request(
        custom_id="a", batch_id="b", file=0, line=1, endpoint="completions", prompt=""
    ),
    "request-chat": wire.Request(
        custom_id="frage-7 漢",
        batch_id="2025-11-29_x",
        file=2,
        line=41,
        endpoint="chat",
        messages=(
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": 'say "hé" 🦙\u2028', "name": "ann"},
        ),
        model="smollm2-135m",
        timeout_s=60.0,
        sampling=wire.Sampling(max_tokens=16, temperature=0.0),
    ),
    "request-full": wire.Request(
        custom_id="7",
        batch_id="b",
        file=0,
        line=3,
        endpoint="completions",
        prompt_token_ids=(0, 1, 49151),
        sampling=wire.Sampling(
            max_tokens=64,
            min_tokens=2,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            no_repeat_ngram_size=3,
            seed=2**64 - 1,
            stop=("\n\n", "終"),
            include_stop_str_in_output=False,
            stop_token_ids=(2, 0),
            ignore_eos=True,
            skip_special_tokens=False,
            logit_bias=((5, 1.5), (0, -100.0)),
            allowed_token_ids=(260, 28),
        ),
    ),
}
RESULTS = {
    "result-chat": wire.Result(
        custom_id="a",
        job_id="b-0-1",
        created=1_764_000_000,
        endpoint="chat",
        model="smollm2-135m",
        choices=(wire.Choice(0, 'hé "🦙"\n', "stop", "\n\n"),),
        usage=wire.Usage(12, 5),
        seed=8_127_450_000_000_000,
    ),
    "result-completion": wire.Result(
        custom_id="7",
        job_id="b-0-3",
        created=1_764_000_000,
        endpoint="completions",
        model="m",
        choices=(wire.Choice(0, "", "length"), wire.Choice(1, "x", "stop", 2)),
        usage=wire.Usage(3, 128),
        seed=0,
    ),
    "result-refused": wire.Result(
        custom_id="a",
        job_id="b-0-1",
        created=1_764_000_000,
        failure=wire.Failure.of("invalid_value", "line 1: top_p must be ...", "top_p"),
    ),
    "result-lost": wire.Result(
        custom_id="a",
        job_id="b-0-1",
        created=1_764_000_000,
        failure=wire.Failure.of("worker_lost", "its engine died twice"),
    ),
}
NOUNS: dict[str, wire.Request | wire.Result] = {**REQUESTS, **RESULTS}


def as_file(obj: dict[str, Any]) -> bytes:
    return wire.dumps(obj).encode() + b"\n"


@pytest.mark.parametrize("name", sorted(NOUNS))
def test_the_bytes_are_those_of_this_version(name: str) -> None:
    golden = (CURRENT / f"{name}.json").read_bytes()
    assert as_file(NOUNS[name].encode()) == golden, "the wire's bytes changed: VERSION must change with them"
    assert type(NOUNS[name]).decode(json.loads(golden)) == NOUNS[name]


def test_no_golden_file_is_forgotten() -> None:
    assert {path.stem for path in CURRENT.iterdir()} == NOUNS.keys()


@pytest.mark.parametrize(
    "path", sorted(HERE.glob("v*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_other_version_is_refused(path: Path) -> None:
    message = json.loads(path.read_bytes())
    assert f"v{message['v']}" == path.parent.name
    noun = wire.Request if path.stem.startswith("request") else wire.Result
    for version in {message["v"], wire.VERSION + 1} - {wire.VERSION}:
        with pytest.raises(WireError, match="same release"):
            noun.decode(message | {"v": version})


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_output_lines(name: str) -> None:
    written = jsonl.encode_line(jsonl.result_line(RESULTS[name])) + jsonl.encode_line(
        jsonl.flat_line(RESULTS[name])
    )
    assert written == (HERE / "output" / f"{name}.jsonl").read_bytes()
