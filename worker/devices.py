"""What ONNX Runtime can compute on here, and for CUDA the first reason why not, with what to do next.

ONNX Runtime itself falls back to the CPU in silence, and the packages can be installed in ways that cannot
work. Every question is asked of the thing itself: packages, driver, libraries, a session. Runs no model.
"""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

from producer.errors import UsageError

_CUDA = "CUDAExecutionProvider"
_ANY_EXTRA = "pip install '.[cuda13]' in livebatch's folder ('.[cuda12]' if the driver knows CUDA 12 only)"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def runtime() -> str:
    """Name and version of the installed ONNX Runtime. UsageError when there is none, or two in one place."""
    installed = [name for name in _RUNTIMES if _has(name)]
    if len(installed) > 1:
        raise UsageError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            f"pip uninstall -y {' '.join(_RUNTIMES)}, then install livebatch with one extra again"
        )
    if not installed or importlib.util.find_spec("onnxruntime") is None:
        raise UsageError(
            f"no ONNX Runtime: pip install '.[cpu]' in livebatch's folder, or for a GPU {_ANY_EXTRA}"
        )
    return f"{installed[0]} {metadata.version(installed[0])}"


def cuda_obstacle(ordinal: int) -> str | None:
    """Why device ``ordinal`` cannot be used, and what to do; None when it can."""
    return _wrong_build() or _wrong_driver(ordinal) or _wrong_libraries(ordinal) or _wrong_cupy()


def cuda_name(ordinal: int) -> str:
    """The device's own name, such as "NVIDIA H200"; only where there is no obstacle."""
    driver, handle, name = _driver(), ctypes.c_int(), ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(handle), ordinal)
    driver.cuDeviceGetName(name, len(name), handle)
    return name.value.decode()


def _wrong_build() -> str | None:
    import onnxruntime

    if _CUDA in onnxruntime.get_available_providers():
        return None
    return f"this build of onnxruntime is for CPUs. pip uninstall -y onnxruntime, then {_ANY_EXTRA}"


def _wrong_driver(ordinal: int) -> str | None:
    """No driver, one older than the runtime's CUDA, or no such device."""
    try:
        driver = _driver()
    except OSError:
        return (
            "no NVIDIA driver found (libcuda.so.1). Install NVIDIA's driver; give a container the GPUs "
            "(docker run --gpus all)"
        )
    if (status := driver.cuInit(0)) != 0:
        return f"NVIDIA's driver does not start (error {status}). See what nvidia-smi says"
    count, version = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    known, built_for = version.value // 1000, _runtime_cuda()
    if known < built_for:
        return (
            f"the driver knows CUDA {known}, onnxruntime-gpu is built for CUDA {built_for}. "
            "Update NVIDIA's driver, or pip install '.[cuda12]' in a new environment"
        )
    if ordinal >= count.value:
        return f"there is no device {ordinal}: the driver shows {count.value} (see CUDA_VISIBLE_DEVICES)"
    return None


def _wrong_libraries(ordinal: int) -> str | None:
    """A session that was to use CUDA and does not; the loader says what is missing."""
    import onnxruntime
    from onnx import TensorProto, helper

    load_libraries()
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    onnxruntime.set_default_logger_severity(4)  # the runtime's own words come without a next step
    try:
        with redirect_stdout(StringIO()):
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=[(_CUDA, {"device_id": str(ordinal)})]
            )
        used = session.get_providers()
    except Exception as error:  # the runtime's exceptions share no base class of their own
        return f"{error}. See what nvidia-smi says"
    finally:
        onnxruntime.set_default_logger_severity(2)
    return None if _CUDA in used else f"{_loader_error()}. {_ANY_EXTRA} brings NVIDIA's libraries"


def _wrong_cupy() -> str | None:
    """CuPy is needed for the sampler, and of the same CUDA: both share the process's libraries."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}). {_ANY_EXTRA}"
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if major != _runtime_cuda():
        return (
            f"CuPy is built for CUDA {major}, onnxruntime-gpu for CUDA {_runtime_cuda()}: "
            "make a new environment with one of the extras cuda13 and cuda12"
        )
    return None


def load_libraries() -> None:
    """Loads CUDA's libraries out of NVIDIA's wheels, where ONNX Runtime would not look for them."""
    import onnxruntime

    with redirect_stdout(StringIO()):  # it prints what it does not find, needed or not
        onnxruntime.preload_dlls()


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _runtime_cuda() -> int:
    """The major CUDA version that ONNX Runtime was built for."""
    from onnxruntime.capi import build_and_package_info

    return int(str(build_and_package_info.cuda_version).partition(".")[0])


def _loader_error() -> str:
    """What the dynamic loader says of ONNX Runtime's CUDA library: the name of a missing one, mostly."""
    import onnxruntime

    folder: Any = Path(onnxruntime.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"a library cannot be loaded: {error}"
    return "ONNX Runtime does not take the device"


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
