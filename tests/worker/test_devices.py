"""What the doctor says of CUDA: every way in which it cannot be used has its own words and its next step."""

from __future__ import annotations

import ctypes
import re
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from producer.errors import UsageError
from worker import devices, doctor, settings


class Driver:
    """libcuda.so.1, as far as it is asked."""

    def __init__(self, *, status: int = 0, version: int = 13000, count: int = 2) -> None:
        self.status, self.version, self.count = status, version, count

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, into: Any) -> int:
        into._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, into: Any) -> int:
        into._obj.value = self.count
        return 0

    def cuDeviceGet(self, into: Any, ordinal: int) -> int:
        into._obj.value = 40 + ordinal
        return 0

    def cuDeviceGetName(self, into: Any, size: int, handle: ctypes.c_int) -> int:
        into.value = f"Device {handle.value}".encode()
        return 0


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where all is well: each test breaks one thing."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(devices, "_runtime_cuda", lambda: 13)
    monkeypatch.setattr(devices, "_driver", Driver)
    monkeypatch.setattr(devices, "_wrong_libraries", lambda ordinal: None)
    monkeypatch.setattr(devices, "_wrong_cupy", lambda: None)


@pytest.mark.usefixtures("gpu_build")
def test_nothing_in_the_way() -> None:
    assert devices.cuda_obstacle(1) is None
    assert devices.cuda_name(1) == "Device 41"


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(status=999), r"does not start \(error 999\).*nvidia-smi"),
        (Driver(version=12080), r"knows CUDA 12, .* for CUDA 13.*Update .*cuda12"),
        (Driver(count=1), r"no device 1: the driver shows 1 .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_the_driver_lacks(driver: Driver, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_driver", lambda: driver)
    assert re.search(said, str(devices.cuda_obstacle(1)))


@pytest.mark.usefixtures("gpu_build")
def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Driver:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(devices, "_driver", missing)
    assert "no NVIDIA driver found" in str(devices.cuda_obstacle(0))


def test_cupy_of_another_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(devices, "_runtime_cuda", lambda: 13)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert re.search("CuPy is built for CUDA 12, .* for CUDA 13.*new environment", str(devices._wrong_cupy()))
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert re.search(r"cannot be imported.*'\.\[cuda13\]'", str(devices._wrong_cupy()))


@pytest.mark.parametrize(("device", "verdict"), [("cpu", "note"), ("cuda", "error")])
def test_only_who_asks_for_cuda_has_an_error(
    device: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    told = settings.read(model="models/any", redis_url="redis://127.0.0.1:1", device=device)
    first, second = (found for found in doctor.examine(told) if found.subject == "device")
    assert (first.verdict, second.verdict) == ("ok", verdict)
    assert "can use the CPU" in first.text and "CUDA cannot be used" in second.text


def test_a_runtime_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert re.search(r"is for CPUs.*uninstall.*'\.\[cuda13\]'", str(devices.cuda_obstacle(0)))


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"onnxruntime", "onnxruntime-gpu"}, "both installed.*pip uninstall -y onnxruntime onnxruntime-gpu"),
        (set(), r"no ONNX Runtime.*'\.\[cpu\]'"),
    ],
)
def test_one_runtime_and_no_other(installed: set[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in installed:
            return "1.31.1"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UsageError, match=said):
        devices.runtime()


def test_the_runtime_has_a_name() -> None:
    assert re.fullmatch(r"onnxruntime(-gpu)? \d+\.\d+\.\d+", devices.runtime())
