"""One line an event, in two forms, and never a password in either."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from worker import settings
from worker.logs import Json, Lines, named, redact

FORMS = (Lines(), Json())
URLS = {
    "rediss://user:secret@queue:6379/0": "rediss://user:***@queue:6379/0",
    "redis://:secret@queue": "redis://:***@queue",
    "redis://user:se@c/r?e:t#secret@queue:1": "redis://user:***@queue:1",
}


def record(text: str, *values: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("worker.service", logging.INFO, "file.py", 1, text, values, None)
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize("url", URLS)
def test_a_urls_password_is_taken_out(url: str) -> None:
    assert redact(f"Error connecting to {url}, again") == f"Error connecting to {URLS[url]}, again"
    for form in FORMS:
        assert "secret" not in form.format(record("Redis at %s is away", url))


def test_what_is_no_password_stays() -> None:
    for text in ("redis://queue:6379/0", "redis://user@queue", "a: b@c", "http://127.0.0.1:9100/metrics"):
        assert redact(text) == text


@pytest.mark.parametrize("form", FORMS)
def test_a_tracebacks_password_is_taken_out(form: logging.Formatter) -> None:
    try:
        raise ValueError("rediss://user:secret@queue is wrong")
    except ValueError:
        made = record("it failed")
        made.exc_info = sys.exc_info()
    line = form.format(made)
    assert "ValueError: rediss://user:***@queue is wrong" in line
    assert "secret" not in line


def test_settings_do_not_show_their_url() -> None:
    told = settings.read(model="dummy", redis_url="rediss://user:secret@queue")
    assert "secret" not in repr(told)


def test_a_line_of_text_is_one_line() -> None:
    assert Lines().format(record("batch %s", "a\nb")).endswith(" INFO service: batch a\\nb")


def test_a_line_of_json_has_the_events_fields() -> None:
    made = record("batch %s cancelled", "b\n", **named("batch_cancelled", batch="b\n", rows=3))
    line = Json().format(made)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "INFO",
        "logger": "service",
        "message": "batch b\n cancelled",
        "event": "batch_cancelled",
        "batch": "b\n",
        "rows": 3,
    }


def test_only_two_forms() -> None:
    with pytest.raises(settings.UsageError, match="--log-format"):
        settings.read(model="dummy", redis_url="redis://x", log_format="xml")
