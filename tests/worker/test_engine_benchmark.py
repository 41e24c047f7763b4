"""benchmarks/engine.py as far as it needs no GPU: what every peer is asked, how it is timed and shown."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from engine_fakes import DeviceModel, DeviceSampler, HashModel, engine_over

from benchmarks.gpu import load, timing
from benchmarks.gpu.findings import Findings, find
from benchmarks.gpu.tables import tables
from benchmarks.plot_engine import plot
from producer.errors import LivebatchError
from worker.bench import is_decoding
from worker.engine import Engine
from worker.scheduler import Policy

VOCAB = 64


def overlapped(max_batch: int, context: int = 256) -> Engine:
    sizes = {"block_size": 16, "num_blocks": 200, "max_step_tokens": 64, "context_length": context}
    model = DeviceModel(max_batch, **sizes)
    policy = Policy(max_batch=max_batch, prefill_tokens=48, apart=True, prefill_launch=0.5)
    return Engine(model, DeviceSampler(model), policy, overlap=True)


def test_the_offline_workload_is_the_known_one() -> None:
    rows = load.offline(128_256)
    assert len(rows) == 256
    assert load.num_tokens(rows) == load.OFFLINE_TOKENS
    assert all(100 <= len(row.prompt) <= 1024 and 100 <= row.params.max_tokens <= 1024 for row in rows)


def test_the_tail_spreads_its_long_rows() -> None:
    rows = load.tail(VOCAB)
    long = [row.id for row in rows if row.params.max_tokens == 2_000]
    assert (len(rows), len(long)) == (2_020, 20)
    assert {after - before for before, after in pairwise(long)} == {101}
    assert {row.params.max_tokens for row in rows} == {16, 2_000}


def test_all_different_means_all() -> None:
    params = [row.params for row in load.decode(load.DISTINCT, 256, VOCAB)]
    assert len({(one.temperature, one.top_k, one.top_p) for one in params}) == 256


def test_a_padded_batch_is_as_long_as_its_longest_row() -> None:
    rows = load.offline(VOCAB)[:5]
    padded = load.padded(rows)
    assert {len(row.prompt) for row in padded} == {max(len(row.prompt) for row in rows)}
    assert {row.params.max_tokens for row in padded} == {max(row.params.max_tokens for row in rows)}
    assert all(new.prompt[: len(old.prompt)] == old.prompt for new, old in zip(padded, rows, strict=True))


def test_a_worker_makes_the_same_rows_of_the_texts() -> None:
    lines = list(load.texts(3))
    rows = load.tokenised(iter(lines), lambda text: list(text.encode()))
    assert [bytes(row.prompt).decode() for row in rows] == [line["prompt"] for line in lines]
    assert [row.params.top_k for row in rows] == [line["top_k"] for line in lines]
    assert {row.params.max_tokens for row in rows} == {load.TEXT_TOKENS}


@pytest.mark.parametrize("prompt", [5, 20])
def test_decoding_begins_when_the_last_prompt_is_through(prompt: int) -> None:
    """Prompts come in several runs, and the first rows decode meanwhile."""
    engine, rows = overlapped(8), load.decode("greedy", 8, VOCAB, prompt=prompt, output=12)
    for row in rows:
        engine.add(row)
    steps = 0
    while not is_decoding(engine, rows):
        engine.step()
        steps += 1
        behind = engine.load.tokens_computed < 8 * prompt
        assert not (behind and is_decoding(engine, rows))
    assert engine.load.waiting == 0
    assert engine.load.tokens_sampled >= 8
    assert steps < 12


def test_a_batch_is_timed_whole_and_gives_its_slots_back() -> None:
    engine = overlapped(4)
    for _ in range(2):
        rates = timing.batch(engine, load.decode("greedy", 4, VOCAB, prompt=5, output=6))
        assert rates.total > 0
        assert rates.decode > 0
        assert engine.load.live == 0
    assert engine.load.tokens_sampled == 2 * 4 * 6


def test_the_tail_can_be_cut_off() -> None:
    rows = load.decode("greedy", 12, VOCAB, prompt=5, output=4)
    rows = [load.lengthened(row, 100) if row.id % 6 == 3 else row for row in rows]
    cut, whole = overlapped(4), overlapped(4)
    until, _ = timing.until_last(cut, rows, 2, to_the_end=False)
    _, total = timing.until_last(whole, rows, 2, to_the_end=True)
    assert min(until, total) > 0
    assert cut.load.live == whole.load.live == 0
    assert cut.load.tokens_sampled < whole.load.tokens_sampled == load.num_tokens(rows)


def test_a_row_that_does_not_run_to_its_end_is_no_figure() -> None:
    engine = engine_over(HashModel())
    with pytest.raises(LivebatchError, match="context"):
        timing.whole(engine, load.decode("greedy", 1, VOCAB, prompt=100, output=100))


def test_findings_keep_rounds_and_show_as_tables(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "findings.jsonl")
    findings.add("a", "ours", {"decode_tok_s": [30_000.4, 10_000.0, 20_000.0]}, batch=32, mix=load.DISTINCT)
    findings.add("a", "raw", {"decode_tok_s": [25_000.0]}, batch=32)
    findings.add("d", "ours", total_tok_s=900.0, memory_mb={"gpu": [1.0, 2.0]})
    findings.add("d", "direct", total_tok_s=1000.0)
    findings.add("part", "genai", ended="exit code 1")
    found = findings.read()
    assert find(found, peer="ours", batch=32)["decode_tok_s_rounds"] == [30_000, 10_000, 20_000]
    text = tables(found)
    assert "| 32 | 20,000 | 25,000 | 0.80 |" in text
    assert "| d / direct | 0.90 |" in text
    assert "gpu MB: 1, 2" in text
    assert "not done: genai: exit code 1" in text


def test_the_plot_has_a_line_for_each_peer_that_ran(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "findings.jsonl")
    for batch in load.BATCHES:
        findings.add("a", "ours", decode_tok_s=700.0 * batch, batch=batch, mix=load.DISTINCT)
        findings.add("a", "raw", decode_tok_s=800.0 * batch, batch=batch)
    drawn = plot(findings.read(), "title")
    assert drawn.count("<polyline") == 2
