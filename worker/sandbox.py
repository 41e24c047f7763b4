"""Where a chat template runs: jinja's sandbox, which also ends what would not end by itself.

Owns what a template may reach, how long it may run and how large it may get what it makes by a number. Memory
is not bounded, nor the time of one step over what a template has built: say, the text of lists within lists.
Must not know messages or control tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sized
from datetime import datetime
from functools import wraps
from json import JSONEncoder
from math import inf
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 2.0  # of this thread's own time: one that was frozen meanwhile has not looped
LARGEST_SIZE = 1 << 20  # characters or items, of a product or of what is filled up to a width
LARGEST_NUMBER = 1 << 14  # bits; Python writes none that is longer in decimal
LARGEST_INDENT = 64
IN_TIME = "in time"  # no name in a template
REPEATED = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)  # their bodies may run any number of times
SIZED_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
PERCENT = re.compile(r"[%)][-#+ .*0-9]*")  # "%5d" or "%(key)5d" from where its width may be
FIELD, NESTED = re.compile(r"\{[^{}]*"), re.compile(r"\{[^{}]*\{")  # of "{:5}"
DIGITS = re.compile("[0-9]+")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, which is what templates are written for; with a clock, so one each.

    What was compiled of a tree that ``limit`` saw raises TemplateError RENDER_SECONDS after ``start``: each
    loop's turn, filter, test, call, operator, output, assignment and condition looks at the clock first.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._output,
        )
        self._deadline = self._look_at = inf
        self.filters["tojson"] = self._tojson
        self.filters = {name: self._timed(made, CHECKS.get(name)) for name, made in self.filters.items()}
        self.tests = {name: self._timed(made, CHECKS.get(name)) for name, made in self.tests.items()}
        self.tests[IN_TIME] = self._in_time
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        del self.globals["lipsum"]  # nobody's template; it writes as much as it is asked for

    def limit(self, tree: nodes.Template) -> None:
        """Make whatever may repeat look at the clock first, by a test that a template cannot redefine."""
        for node in tree.find_all((nodes.If, nodes.Assign, *REPEATED)):
            if isinstance(node, REPEATED):
                node.body.insert(0, nodes.ExprStmt(_tick(), lineno=node.lineno))
            if isinstance(node, nodes.Assign):
                node.node = nodes.And(_tick(), node.node)
            elif isinstance(node, (nodes.For, nodes.If)) and node.test is not None:
                node.test = nodes.And(_tick(), node.test)  # a loop's is asked also of items it passes over

    def start(self) -> None:
        """The template begins to run, or to be compiled, which works out what is constant."""
        self._deadline = time.thread_time() + RENDER_SECONDS
        self._look_at = time.perf_counter() + RENDER_SECONDS

    def tick(self) -> bool:
        """True while there is time. The thread's clock takes ten times as long to read as the wall's."""
        if time.perf_counter() > self._look_at:
            left = self._deadline - time.thread_time()
            if left < 0:
                raise TemplateError(f"it runs for more than {RENDER_SECONDS:g} s")
            self._look_at = time.perf_counter() + left
        return True

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """A call of anything, with jinja's own names: a template may use all others."""
        __self.tick()
        if getattr(__obj, "__name__", None) in SIZED_METHODS:
            _check_arguments(__obj, *args, **named)
        return super().call(__context, __obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation whose result is not absurd: nothing looks at the clock while it is made."""
        self.tick()
        if operator == "+":  # most of what templates do
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            _check_numbers(left, right, operator)
        elif operator == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, Sized) and isinstance(times, int):
                _check_size(len(many) * times)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent(left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, of text that asks for no absurd width."""
        made = super().wrap_str_format(value)
        return made and self._timed(made, lambda *_, **__: _check_fields(value.__self__))

    def _timed(self, function: Any, check: Callable[..., None] | None = None) -> Callable[..., Any]:
        """The function, behind a look at the clock and a ``check`` of what it is given."""

        @wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            self.tick()
            if check is not None:
                check(*args, **named)
            return function(*args, **named)

        return timed

    @pass_context
    def _output(self, context: Context, value: Any) -> Any:
        """What is written, as it is: within macros and other text that is not yet a piece, too."""
        self.tick()
        return value

    @pass_context
    def _in_time(self, context: Context, value: Any) -> bool:
        """A test, which is called without ado; of the context, so that it is not worked out beforehand."""
        return self.tick()

    def _tojson(self, value: Any, indent: int | None = None) -> str:
        pieces = JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value)
        return "".join([piece for piece in pieces if self.tick()])


class GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here its body simply stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick() -> nodes.Expr:
    return nodes.Test(nodes.Const(None), IN_TIME, [], [], None, None)


def _check_size(size: int) -> None:
    if size > LARGEST_SIZE:
        raise TemplateError(f"it makes something of more than {LARGEST_SIZE} characters or items")


def _check_arguments(_: Any, /, *args: Any, **named: Any) -> None:
    """Of what is as large as its arguments say, whatever it is asked of."""
    for argument in (*args, *named.values()):
        if isinstance(argument, int):
            _check_size(argument)


def _check_numbers(left: int, right: int, operator: str) -> None:
    """No operation on numbers so long that it takes a while, nor a power that is one."""
    bits = max(left.bit_length(), right.bit_length())
    if bits > LARGEST_NUMBER or (operator == "**" and left.bit_length() * right > LARGEST_NUMBER):
        raise TemplateError(f"it reckons with numbers of more than {LARGEST_NUMBER} bits")


def _check_percent(text: Any, /, *values: Any, **_: Any) -> None:
    """Of ``text % values`` the widths and precisions, together."""
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    places = " ".join(PERCENT.findall(text))
    _check_size(sum(map(int, DIGITS.findall(places))))
    if "*" in places:  # it is among the values
        _check_arguments(text, *values)


def _check_fields(text: str) -> None:
    """Of ``text.format()`` the widths and precisions, together."""
    places = text.replace("{{", "")
    if NESTED.search(places):
        raise TemplateError("it formats with a width that is itself formatted")
    _check_size(sum(map(int, DIGITS.findall(" ".join(FIELD.findall(places))))))


def _check_indent(_: Any, /, width: int | str | None = None, *rest: Any, **named: Any) -> None:
    width = named.get("indent", width)
    if (len(width) if isinstance(width, str) else width or 0) > LARGEST_INDENT:
        raise TemplateError(f"it indents by more than {LARGEST_INDENT}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


# By filter or test: what its arguments must pass.
CHECKS: dict[str, Callable[..., None]] = {
    "format": _check_percent,
    "indent": _check_indent,
    "tojson": _check_indent,
    **dict.fromkeys(("batch", "center", "divisibleby", "round", "slice"), _check_arguments),
}
