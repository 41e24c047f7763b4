from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_text

from kernels.cpu import BatchedSampler
from kernels.rows import RowParams, Status
from producer.errors import RowError, UsageError
from producer.wire import Choice, Request, Result, Sampling, Usage, derived_seed
from worker.rows import LIKELY_LENGTH, Defaults, PreparedRow, RowPreparer
from worker.sequence import Output
from worker.tokenizer import Tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_text.write_folder(tmp_path_factory.mktemp("tiny"), tiny_text.byte_level()))


@pytest.fixture
def preparer(tokenizer: Tokenizer) -> RowPreparer:
    return RowPreparer(tiny_text.TinyModel(), tokenizer, Defaults())


def request(prompt: Any = "hi", **fields: Any) -> Request:
    """A request with ``prompt`` (text, messages or ids); fields of Sampling among the others."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in Sampling.__dataclass_fields__}
    kind = (
        "prompt"
        if isinstance(prompt, str)
        else "messages"
        if isinstance(prompt[0], dict)
        else "prompt_token_ids"
    )
    return Request(
        custom_id="c",
        batch_id="b",
        file=0,
        line=7,
        endpoint="chat" if kind == "messages" else "completions",
        sampling=Sampling(**sampling),
        **{kind: prompt},
        **fields,
    )


def refused(preparer: RowPreparer, *args: Any, **fields: Any) -> tuple[str, str | None, str]:
    with pytest.raises(RowError) as caught:
        preparer.prepare(request(*args, **fields), 1)
    return caught.value.code, caught.value.param, caught.value.message


class TestPrompt:
    def test_text(self, preparer: RowPreparer, tokenizer: Tokenizer) -> None:
        prepared = preparer.prepare(request("hi"), 5)
        assert (prepared.row.id, prepared.row.prompt) == (5, tokenizer.encode("hi"))

    def test_ids_are_taken_as_they_are(self, preparer: RowPreparer) -> None:
        assert list(preparer.prepare(request((0, 0, 1, 2)), 1).row.prompt) == [0, 0, 1, 2]

    def test_messages(self, preparer: RowPreparer, tokenizer: Tokenizer) -> None:
        row = preparer.prepare(request([{"role": "user", "content": ""}]), 1).row
        shown = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(row.prompt, skip_special=False) == shown

    def test_nothing_to_start_from(self, preparer: RowPreparer) -> None:
        assert refused(preparer, "")[:2] == ("invalid_request", "prompt")

    def test_bos_is_enough_to_start_from(self, tmp_path: Path) -> None:
        folder = tiny_text.write_folder(tmp_path / "m", tiny_text.byte_level(), add_bos_token=True)
        preparer = RowPreparer(tiny_text.TinyModel(), Tokenizer.load(folder), Defaults())
        assert list(preparer.prepare(request(""), 1).row.prompt) == [1]

    def test_no_template(self, tmp_path: Path) -> None:
        folder = tiny_text.write_folder(tmp_path / "m", tiny_text.byte_level(), template=None)
        preparer = RowPreparer(tiny_text.TinyModel(), Tokenizer.load(folder), Defaults())
        code, param, message = refused(preparer, [{"role": "user", "content": "x"}])
        assert (code, param) == ("invalid_request", "messages")
        assert "no chat template" in message

    def test_a_token_the_model_lacks(self, tokenizer: Tokenizer) -> None:
        preparer = RowPreparer(tiny_text.TinyModel(vocab_size=100), tokenizer, Defaults())
        assert refused(preparer, "\x00")[:2] == ("invalid_request", "prompt")


class TestModel:
    @pytest.mark.parametrize("name", [None, "tiny", "tiny-alias"])
    def test_known(self, preparer: RowPreparer, name: str | None) -> None:
        assert preparer.prepare(request(model=name), 1).row.prompt

    def test_unknown(self, preparer: RowPreparer) -> None:
        code, param, message = refused(preparer, model="gpt-9")
        assert (code, param) == ("model_not_found", "model")
        assert message == "this queue serves tiny, tiny-alias, not gpt-9"


class TestVocabulary:
    @pytest.mark.parametrize(
        "fields",
        [{"stop_token_ids": (320,)}, {"allowed_token_ids": (1, 320)}, {"logit_bias": ((320, 1.0),)}],
    )
    def test_ids_beyond_it(self, preparer: RowPreparer, fields: dict[str, Any]) -> None:
        assert refused(preparer, **fields)[:2] == ("invalid_value", next(iter(fields)))

    def test_prompt_ids_beyond_it(self, preparer: RowPreparer) -> None:
        assert refused(preparer, (1, 320))[:2] == ("invalid_request", "prompt_token_ids")


class TestContext:
    def test_what_is_left_by_default(self, preparer: RowPreparer) -> None:
        assert preparer.prepare(request((5,) * 60), 1).row.params.max_tokens == 4

    @pytest.mark.parametrize(
        ("cap", "fields", "expected"), [(10, {}, 10), (10, {"min_tokens": 20}, 20), (99, {}, 63)]
    )
    def test_capped_by_the_workers_default(
        self, tokenizer: Tokenizer, cap: int, fields: dict[str, Any], expected: int
    ) -> None:
        preparer = RowPreparer(tiny_text.TinyModel(), tokenizer, Defaults(max_tokens=cap))
        assert preparer.prepare(request((5,), **fields), 1).row.params.max_tokens == expected

    @pytest.mark.parametrize(("fields", "is_open"), [({}, True), ({"max_tokens": 9}, False)])
    @pytest.mark.parametrize("cap", [None, 10])
    def test_the_engine_may_cut_what_the_row_did_not_ask_for(
        self, tokenizer: Tokenizer, cap: int | None, fields: dict[str, Any], is_open: bool
    ) -> None:
        preparer = RowPreparer(tiny_text.TinyModel(), tokenizer, Defaults(max_tokens=cap))
        assert preparer.prepare(request((5,), **fields), 1).row.open_ended is is_open

    def test_the_rows_own_is_not_capped(self, tokenizer: Tokenizer) -> None:
        preparer = RowPreparer(tiny_text.TinyModel(), tokenizer, Defaults(max_tokens=10))
        assert preparer.prepare(request((5,), max_tokens=63), 1).row.params.max_tokens == 63

    @pytest.mark.parametrize(
        ("prompt", "fields", "param", "numbers"),
        [
            ((5,) * 60, {"max_tokens": 5}, "max_tokens", "60 tokens and max_tokens is 5;"),
            ((5,) * 64, {}, "prompt_token_ids", "64 tokens and at least 1 more"),
            ("x" * 60, {"min_tokens": 5}, "prompt", "60 tokens and at least 5 more"),
            ([{"role": "user", "content": "x" * 60}], {}, "messages", "tokens and at least 1 more"),
        ],
    )
    def test_exceeded(
        self, preparer: RowPreparer, prompt: Any, fields: dict[str, Any], param: str, numbers: str
    ) -> None:
        code, its_param, message = refused(preparer, prompt, **fields)
        assert (code, its_param) == ("context_length_exceeded", param)
        assert numbers in message
        assert "the model's context is 64 tokens" in message

    @pytest.mark.parametrize(
        "prompt", ["x" * 10**6, [{"role": "user", "content": "x" * 10**6}]], ids=["text", "message"]
    )
    def test_far_too_long_is_refused_before_it_is_encoded(
        self, preparer: RowPreparer, tokenizer: Tokenizer, prompt: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokenizer, "_encode", None)
        code, _, message = refused(preparer, prompt)
        assert code == "context_length_exceeded"
        least, context = map(int, re.findall(r"\d+", message))
        assert least > context == 64

    @pytest.mark.parametrize(
        "prompt", ["x" * 2000, [{"role": "user", "content": "x" * 1500}]], ids=["text", "message"]
    )
    def test_what_may_fit_is_not_encoded_further_than_shows_that_it_does_not(
        self, preparer: RowPreparer, tokenizer: Tokenizer, prompt: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lengths, encode = [], tokenizer._encode
        monkeypatch.setattr(tokenizer, "_encode", lambda text: lengths.append(len(text)) or encode(text))
        code, _, message = refused(preparer, prompt)
        assert code == "context_length_exceeded"
        assert lengths == [LIKELY_LENGTH * 64]
        assert int(re.findall(r"\d+", message)[0]) > 64

    def test_long_tokens_fit_though_they_are_many_characters(
        self, preparer: RowPreparer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokenizer, "_encode", lambda text: [5] * (len(text) // 40))
        assert len(preparer.prepare(request("x" * 2000), 1).row.prompt) == 50

    def test_too_many_messages_are_refused_before_they_are_rendered(
        self, preparer: RowPreparer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokenizer.template, "render", None)
        assert refused(preparer, [{"role": "user", "content": ""}] * 65) == (
            "context_length_exceeded",
            "messages",
            "the prompt has at least 65 tokens; the model's context is 64 tokens",
        )


class TestParams:
    def test_openais_defaults(self, preparer: RowPreparer) -> None:
        given = request()
        expected = RowParams(max_tokens=62, seed=derived_seed(given), eos_ids=(EOS,))
        assert preparer.prepare(given, 1).row.params == expected

    def test_every_field_arrives(self, preparer: RowPreparer) -> None:
        given = request(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            no_repeat_ngram_size=4,
            seed=0,
            stop_token_ids=(7, 8),
            logit_bias=((9, -1.5),),
            allowed_token_ids=(7, 8, 9),
        )
        assert preparer.prepare(given, 1).row.params == RowParams(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            no_repeat_ngram_size=4,
            seed=0,
            eos_ids=(EOS,),
            stop_ids=(7, 8),
            logit_bias=((9, -1.5),),
            allowed_ids=(7, 8, 9),
        )

    def test_greedy_is_not_unset(self, tokenizer: Tokenizer) -> None:
        preparer = RowPreparer(
            tiny_text.TinyModel(), tokenizer, Defaults(temperature=0.7, min_p=0.1, top_k=40)
        )
        params = preparer.prepare(request(temperature=0.0, min_p=0.0, top_k=0), 1).row.params
        assert (params.temperature, params.min_p, params.top_k) == (0.0, 0.0, 0)

    @pytest.mark.parametrize("top_k", [-1, 0])
    def test_top_k_off(self, preparer: RowPreparer, top_k: int) -> None:
        assert preparer.prepare(request(top_k=top_k), 1).row.params.top_k == 0

    def test_ignored_eos_is_still_held_back(self, preparer: RowPreparer) -> None:
        params = preparer.prepare(request(ignore_eos=True), 1).row.params
        assert (params.eos_ids, params.held_ids) == ((), (EOS,))

    @pytest.mark.parametrize(("fields", "streamed"), [({}, False), ({"stop": ("x",)}, True)])
    def test_only_rows_with_stop_strings_are_streamed(
        self, preparer: RowPreparer, fields: dict[str, Any], streamed: bool
    ) -> None:
        assert preparer.prepare(request(**fields), 1).row.streamed is streamed


SEARCH = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": None, "num_beams": 1, "max_length": 9}


class TestDefaults:
    def test_the_models_own(self) -> None:
        assert Defaults.read("model", SEARCH, 5) == Defaults(max_tokens=5, temperature=0.7, top_k=40)

    def test_a_model_that_does_not_sample_is_greedy(self) -> None:
        assert Defaults.read("model", {**SEARCH, "do_sample": False}).temperature == 0

    def test_openais(self) -> None:
        assert Defaults.read("openai", SEARCH, 5) == Defaults(max_tokens=5)

    @pytest.mark.parametrize(
        ("search", "said"),
        [
            ({"top_k": 40.0}, "search.top_k must be an integer from -1 to 2147483647, not 40.0"),
            ({"top_k": 2**31}, "search.top_k must be an integer"),
            ({"temperature": -1}, "search.temperature must be a number from 0 to 2, not -1"),
            ({"temperature": True}, "search.temperature must be a number"),
            ({"temperature": float("nan")}, "search.temperature must be a number"),
            ({"top_p": 0}, "search.top_p must be a number above 0"),
            ({"min_p": 1.5}, "search.min_p must be a number from 0 to 1"),
            ({"repetition_penalty": 0}, "search.repetition_penalty must be a number above 0"),
            ({"do_sample": 0}, "search.do_sample must be true or false"),
        ],
    )
    def test_what_no_row_may_ask_for_is_no_default_either(self, search: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=rf"^genai_config\.json: {re.escape(said)}.*sampling-defaults"):
            Defaults.read("model", {**SEARCH, **search})
        assert Defaults.read("openai", {**SEARCH, **search}) == Defaults()

    def test_whole_numbers_are_numbers(self) -> None:
        assert Defaults.read("model", {"temperature": 1, "top_p": 1, "top_k": -1}) == Defaults(top_k=-1)


class TestEos:
    def test_a_row_may_have_its_stop_ids_beside_all_of_the_models(self, tokenizer: Tokenizer) -> None:
        model = tiny_text.TinyModel(eos_ids=tuple(range(64)))
        row = RowPreparer(model, tokenizer, Defaults()).prepare(
            request("hi", stop_token_ids=tuple(range(64, 128))), 1
        )
        BatchedSampler(1, model.vocab_size, 64, threads=1).admit(0, row.row.params, row.row.prompt)

    def test_more_than_a_row_carries_are_refused_at_once(self, tokenizer: Tokenizer) -> None:
        model = tiny_text.TinyModel(eos_ids=tuple(range(65)))
        with pytest.raises(UsageError, match=r"model\.eos_token_id names 65 tokens; at most 64"):
            RowPreparer(model, tokenizer, Defaults())


class Ending:
    """A row of ``fields`` whose engine gives the tokens of ``pieces``, one Output each, and then ends."""

    def __init__(self, preparer: RowPreparer, tokenizer: Tokenizer, **fields: Any) -> None:
        self.prepared: PreparedRow = preparer.prepare(request(**fields), 1)
        self.tokenizer = tokenizer
        self.told: list[bool] = []

    def feed(self, *pieces: str | int, status: Status = Status.RUNNING) -> Ending:
        tokens: list[int] = []
        for piece in pieces:
            tokens += [piece] if isinstance(piece, int) else self.tokenizer.encode(piece)
        self.told.append(self.prepared.feed(Output(1, tokens, status)))
        return self

    def end(self, status: Status) -> Choice:
        (choice,) = self.result(status).choices
        return choice

    def result(self, status: Status) -> Result:
        return self.prepared.result(status)


@pytest.fixture
def ending(preparer: RowPreparer, tokenizer: Tokenizer) -> Any:
    return lambda **fields: Ending(preparer, tokenizer, **fields)


class TestResult:
    def test_of_a_row_that_ended_by_itself(self, ending: Any) -> None:
        before = int(time.time())
        result = ending(seed=11).feed("low", EOS, status=Status.EOS).result(Status.EOS)
        assert before <= result.created <= time.time()
        assert result == Result(
            custom_id="c",
            job_id="b-0-7",
            created=result.created,
            endpoint="completions",
            model="tiny",
            choices=(Choice(0, "low", "stop", None),),
            usage=Usage(2, 2),
            seed=11,
        )
        assert Result.decode(result.encode()) == result

    def test_derived_seeds_are_echoed(self, ending: Any) -> None:
        row = ending()
        assert row.feed("a").result(Status.LENGTH).seed == derived_seed(row.prepared.request)

    def test_cut_at_max_tokens(self, ending: Any, tokenizer: Tokenizer) -> None:
        row = ending().feed(*tokenizer.encode("a漢")[:3])
        assert row.end(Status.LENGTH) == Choice(0, "a\ufffd", "length", None)

    def test_an_eos_text_is_never_shown(self, ending: Any) -> None:
        row = ending(skip_special_tokens=False, include_stop_str_in_output=True, stop=("zz",))
        assert row.feed(1, "a", EOS, status=Status.EOS).end(Status.EOS) == Choice(0, "<|im_start|>a", "stop")

    def test_special_tokens_are_left_out(self, ending: Any) -> None:
        assert ending().feed(1, "a", EOS).end(Status.LENGTH).text == "a"

    @pytest.mark.parametrize(("fields", "text"), [({}, "a"), ({"include_stop_str_in_output": True}, "ab")])
    @pytest.mark.parametrize("stop", [None, ("zz",), ("ab",)])
    def test_a_stop_id(self, ending: Any, tokenizer: Tokenizer, fields: Any, text: str, stop: Any) -> None:
        """Its text is no text that a stop string could match: the id came first."""
        (b,) = tokenizer.encode("b")
        row = ending(stop_token_ids=(b,), stop=stop, **fields).feed("a", b, status=Status.STOP)
        assert row.end(Status.STOP) == Choice(0, text, "stop", b)
        assert row.result(Status.STOP).usage.completion_tokens == 2

    @pytest.mark.parametrize(
        ("status", "code", "status_code"),
        [
            (Status.INVALID_LOGITS, "invalid_logits", 500),
            (Status.NO_ALLOWED_TOKEN, "no_allowed_token", 400),
            (Status.TOO_LARGE, "context_length_exceeded", 400),
            (Status.FAILED, "internal_error", 500),
            (Status.CANCELLED, "batch_cancelled", None),
        ],
    )
    def test_failures(self, ending: Any, status: Status, code: str, status_code: int | None) -> None:
        result = ending().feed("a", status=status).result(status)
        assert (result.failure.code, result.failure.status_code) == (code, status_code)
        assert result.failure.message
        assert (result.choices, result.usage) == ((), None)
        assert Result.decode(result.encode()) == result

    def test_the_engines_reason_is_told(self, ending: Any) -> None:
        row = ending()
        row.prepared.feed(Output(1, (), Status.TOO_LARGE, "9 blocks of 4"))
        assert row.result(Status.TOO_LARGE).failure.message == "line 7: 9 blocks of 4"

    def test_a_row_that_has_not_ended_is_our_bug(self, ending: Any) -> None:
        with pytest.raises(AssertionError, match="has not ended"):
            ending().feed("a").result(Status.RUNNING)


class TestStopStrings:
    def test_end_the_row_and_are_not_shown(self, ending: Any) -> None:
        row = ending(stop=("D E F",)).feed(" C").feed(" D").feed(" E").feed(" F").feed(" G", " H")
        assert row.told == [False, False, False, True, False]
        assert row.end(Status.CANCELLED) == Choice(0, " C ", "stop", "D E F")
        assert row.result(Status.CANCELLED).usage == Usage(2, 8)

    def test_whatever_the_engine_made_of_the_row_meanwhile(self, ending: Any) -> None:
        for status in Status:
            assert ending(stop=("b",)).feed("ab", "cd").end(status) == Choice(0, "a", "stop", "b")

    def test_count_to_the_completing_token(self, ending: Any) -> None:
        row = ending(stop=("b",), include_stop_str_in_output=True).feed("a", "b", "c", EOS, status=Status.EOS)
        assert row.told == [True]
        assert row.end(Status.EOS) == Choice(0, "ab", "stop", "b")
        assert row.result(Status.EOS).usage.completion_tokens == 2

    def test_are_held_back_by_min_tokens(self, ending: Any) -> None:
        row = ending(stop=("\n",), min_tokens=3).feed("1", "2", "\n").feed("\n")
        assert row.told == [False, True]
        assert row.end(Status.CANCELLED) == Choice(0, "12\n", "stop", "\n")

    def test_see_what_is_shown(self, ending: Any) -> None:
        hidden = ending(stop=("ab",)).feed("a", 1, "b")
        shown = ending(stop=("ab", "<|im_start|>"), skip_special_tokens=False).feed("a", 1, "b")
        assert hidden.end(Status.CANCELLED) == Choice(0, "", "stop", "ab")
        assert shown.end(Status.CANCELLED) == Choice(0, "a", "stop", "<|im_start|>")

    def test_a_row_that_meets_none(self, ending: Any, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("z漢z")
        row = ending(stop=("zz",)).feed(*ids[:2]).feed(*ids[2:])
        assert row.end(Status.LENGTH) == Choice(0, "z漢z", "length", None)

    def test_a_match_leaves_whole_characters(self, ending: Any) -> None:
        row = ending(stop=("字",)).feed("漢字")
        assert row.end(Status.CANCELLED).text == "漢"
