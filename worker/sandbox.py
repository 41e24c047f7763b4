"""Where a chat template runs: jinja's sandbox, which also ends what would not end by itself.

Owns what a template may reach and how long it may run. Must not know messages or control tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sized
from datetime import datetime
from math import inf
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 2.0  # of this thread's own time: one that was frozen meanwhile has not looped
LARGEST_PRODUCT = 1 << 20  # characters, items or bits
REPEATED = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)  # their bodies may run any number of times


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, which is what templates are written for; with a clock, so one each.

    What was compiled of a tree that ``limit`` saw raises TemplateError RENDER_SECONDS after ``start``.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        del self.globals["lipsum"]  # nobody's template; it writes as much as it is asked for
        self._deadline = inf

    def limit(self, tree: nodes.Template) -> None:
        """Make whatever may repeat look at the clock first, by a call that a template cannot name."""
        for node in tree.find_all(nodes.Stmt):
            if isinstance(node, REPEATED):
                node.body.insert(0, nodes.ExprStmt(_tick(), lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:  # asked also of items it passes over
                node.test = nodes.And(_tick(), node.test)

    def start(self) -> None:
        """The template begins to run."""
        self._deadline = time.thread_time() + RENDER_SECONDS

    def tick(self) -> bool:
        """True while there is time."""
        if time.thread_time() > self._deadline:
            raise TemplateError(f"it runs for more than {RENDER_SECONDS:g} s")
        return True

    def call_filter(self, *args: Any, **named: Any) -> Any:
        """What ``map`` and its like do to each item: they are loops that no tree shows."""
        self.tick()
        return super().call_filter(*args, **named)

    def call_test(self, *args: Any, **named: Any) -> Any:
        """What ``select``, ``reject`` and their like ask of each item."""
        self.tick()
        return super().call_test(*args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power that is not absurd: nothing looks at the clock while one is made."""
        if (_product if operator == "*" else _power)(left, right) > LARGEST_PRODUCT:
            raise TemplateError(
                f"it makes something of more than {LARGEST_PRODUCT} characters, items or bits"
            )
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here its body simply stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick() -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)


def _product(left: Any, right: Any) -> int:
    """How large ``left * right`` gets: bits of a number, items of a sequence."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    many, times = (right, left) if isinstance(left, int) else (left, right)
    return len(many) * times if isinstance(many, Sized) and isinstance(times, int) else 0


def _power(left: Any, right: Any) -> int:
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
