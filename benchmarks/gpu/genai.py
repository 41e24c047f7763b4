"""onnxruntime-genai's Engine on the same rows. A process of its own: it takes a share of the GPU's memory.

    python -m benchmarks.gpu.genai --model DIR --cases a,b,e --report FILE

Its API as of 0.18: requests of one turn each, an event a token. An EOS may end a row early (its chance is one
in the vocabulary a token with random weights): tokens are counted as they come, and early ends are told.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime_genai as og

from benchmarks.gpu import load
from benchmarks.gpu.findings import Findings
from worker.folder import ModelFolder
from worker.sequence import Row

TOKEN = int(og.EngineEventFlags.TOKEN.value)
FINISHED = int(og.EngineEventFlags.TURN_FINISHED.value)
FAILED = int(og.EngineEventFlags.FAILED.value)
TOP_K = 50  # where a row has none: sampling the whole vocabulary is not what this engine is good at
SPARE = 8  # tokens of a session beyond those needed


@dataclass(slots=True)
class Progress:
    """Of one batch of rows."""

    begun: float
    tokens: int = 0
    done: int = 0
    decoding: tuple[float, int] | None = None  # when all rows decoded, and the tokens until then
    ended: float = 0.0

    def book(self, events: Any, rows: int) -> None:
        flags = [int(event.flags.value) for event in events]
        drawn = sum(bool(flag & TOKEN) for flag in flags)
        self.tokens += drawn
        self.done += sum(bool(flag & FINISHED) for flag in flags)
        self.ended = perf_counter()
        if any(flag & FAILED for flag in flags):
            raise RuntimeError("a request failed")
        all_decode = drawn >= rows or self.tokens >= 4 * rows  # the latter if it never draws for all at once
        if self.decoding is None and all_decode:
            self.decoding = self.ended, self.tokens

    @property
    def total(self) -> float:
        return self.tokens / (self.ended - self.begun)

    @property
    def decode(self) -> float | None:
        """None where nothing was decoded after that step."""
        since, before = self.decoding or (self.ended, self.tokens)
        return (self.tokens - before) / (self.ended - since) if self.ended > since else None


class Peer:
    """A model and its engine."""

    def __init__(self, folder: Path) -> None:
        config = og.Config(str(folder))
        config.clear_providers()
        config.append_provider("cuda")
        self._model = og.Model(config)
        self._engine = og.Engine(self._model)

    def run(self, rows: Sequence[Row], limit: float) -> Progress:
        """All rows at once, until done or for ``limit`` seconds; after the latter this peer is spent."""
        progress = Progress(perf_counter())
        requests = [self._request(row) for row in rows]
        buffer = self._engine.create_event_buffer(4 * len(rows) + 16)
        while progress.done < len(rows) and self._engine.has_pending_requests():
            events = self._engine.run(buffer)
            progress.book(buffer if events is None else events, len(rows))
            if progress.ended - progress.begun > limit:
                return progress
        for request in requests:
            request.close()
        return progress

    def _request(self, row: Row) -> Any:
        params = row.params
        options = og.RequestOptions()
        options.set_max_session_tokens(len(row.prompt) + params.max_tokens + SPARE)
        request = self._engine.create_request(options=options)
        turn = og.TurnOptions(request)
        turn.set_max_generated_tokens(params.max_tokens)
        turn.set_do_sample(not params.greedy)
        if not params.greedy:
            turn.set_temperature(params.temperature)
            turn.set_top_k(params.top_k or TOP_K)
            turn.set_top_p(params.top_p)
            turn.set_seed(params.seed)
        request.begin_turn(np.array(row.prompt, np.int32), turn)
        return request


def decode(peer: Peer, findings: Findings, vocab: int, about: dict[str, Any]) -> None:
    """(a), a round each: a batch of 256 takes it several seconds."""
    for mix in load.MIXES:
        for batch in load.BATCHES:
            rows = load.decode(mix, batch, vocab)
            if mix == load.DISTINCT:
                peer.run([load.lengthened(row, 8) for row in rows], 60)
            run = peer.run(rows, 60)
            figures = {"decode_tok_s": run.decode, "total_tok_s": run.total, "tokens": run.tokens}
            asked = {"asked_tokens": load.num_tokens(rows)}
            findings.add("a", "genai", batch=batch, mix=mix, **figures, **asked, **about)


def prefill(peer: Peer, findings: Findings, vocab: int, about: dict[str, Any]) -> None:
    """(e)"""
    prompts = sum(len(row.prompt) for row in load.prefill(vocab, 0))
    runs = [peer.run(load.prefill(vocab, seed), 30) for seed in range(4)][1:]
    rounds = {"prompt_tok_s": [prompts / (run.ended - run.begun) for run in runs]}
    findings.add("e", "genai", rounds, **about)


def offline(peer: Peer, findings: Findings, vocab: int, about: dict[str, Any], limit: float) -> None:
    """(b), cut off after ``limit`` seconds. The last case: a peer that was cut off is spent."""
    rows = load.offline(vocab)
    run = peer.run(rows, limit)
    figures = {"tokens": run.tokens, "rows_done": run.done, "finished": run.done == len(rows)}
    findings.add("b", "genai", total_tok_s=run.total, **figures, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default="a,b,e")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for (b)")
    parser.add_argument("--report", type=Path, required=True)
    told = parser.parse_args()
    vocab = ModelFolder.load(told.model).vocab_size
    findings, about = Findings(told.report), {"folder": told.model.name}
    begun = perf_counter()
    peer = Peer(told.model)
    findings.add("load", "genai", seconds=perf_counter() - begun, **about)
    cases = told.cases.split(",")
    if "a" in cases:
        decode(peer, findings, vocab, about)
    if "e" in cases:
        prefill(peer, findings, vocab, about)
    if "b" in cases:
        offline(peer, findings, vocab, about, told.limit)
    os._exit(0)  # no teardown of an engine that may have been cut off


if __name__ == "__main__":
    main()
