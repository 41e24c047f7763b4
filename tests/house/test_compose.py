"""compose.yaml and what stands beside it hold what the documentation says of them; no Docker is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sizes
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from producer.embedded import EmbeddedRedis
from worker import settings
from worker.metrics import Measured

ROOT = sizes.ROOT
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = ("worker", "worker-cpu")
DEFAULTS = dict(
    line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if re.match(r"\w+=", line)
)


def plain(text: str) -> str:
    """``${NAME:-value}`` with the value in its place."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_a_bare_up_starts_redis_and_a_gpu_worker() -> None:
    assert DEFAULTS["COMPOSE_PROFILES"] == "gpu"
    started = [name for name, service in SERVICES.items() if "gpu" in service.get("profiles", ["gpu"])]
    assert started == ["redis", "worker"]


def test_defaults_are_the_same_in_both_files() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "compose.yaml").read_text()))
    assert used == {name: value for name, value in DEFAULTS.items() if name != "COMPOSE_PROFILES"}


@pytest.mark.parametrize("name", WORKERS)
def test_workers_scale(name: str) -> None:
    assert not {"container_name", "hostname", "ports"} & SERVICES[name].keys()


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_drain(name: str) -> None:
    grace = SERVICES[name]["environment"]["LIVEBATCH_GRACE"]
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= grace + 10


@pytest.mark.parametrize("name", WORKERS)
def test_variables_of_the_worker_are_those_of_its_command_line(name: str) -> None:
    known = set(re.findall(r'envvar="(\w+)"', (ROOT / "worker" / "cli.py").read_text()))
    assert SERVICES[name]["environment"].keys() <= known


@pytest.mark.parametrize("name", SERVICES)
def test_containers_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", SERVICES.keys() - WORKERS)
def test_images_are_pinned(name: str) -> None:
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+[a-z-]*@sha256:[0-9a-f]{64}", SERVICES[name]["image"])


def test_the_image_is_pinned_and_runs_as_nobody() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert "USER 10001:10001" in text


def test_redis_is_set_as_our_own_is() -> None:
    """Where it lives and listens is the container's business; what it keeps is not."""
    words = [plain(word) for word in SERVICES["redis"]["command"]]
    composed = dict(zip(words[1::2], words[2::2], strict=True))
    ours = EmbeddedRedis(Path("nowhere"))._command(Path("redis-server"))
    own = dict(zip(ours[1::2], ours[2::2], strict=True))
    kept = {flag: value for flag, value in own.items() if flag not in ("--bind", "--port", "--dir")}
    assert kept.items() <= composed.items()


def test_the_board_asks_for_what_a_worker_tells() -> None:
    registry = CollectorRegistry()
    Measured(settings.read(model="dummy", redis_url="redis://nowhere"), registry)
    told = set(re.findall(r"^(\w+)[ {]", generate_latest(registry).decode(), re.MULTILINE))
    board = json.loads((ROOT / "docs" / "monitoring" / "boards" / "livebatch.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 15
    names = set(re.findall(r"\b(?:livebatch|process)_\w+", " ".join(asked)))
    assert names <= told
