"""Tests of the GPU engine: skipped where there is no GPU. The model is SmolLM2 in float16, built for CUDA:

worker build SmolLM2-135M-Instruct.gguf --device cuda --out models/smollm2-135m-fp16
LIVEBATCH_CUDA_MODEL names it where it lies elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no GPU
        pytest.skip(f"no GPU: {error}")


@pytest.fixture(scope="session")
def cuda_model(gpu: None) -> Path:
    path = Path(os.environ.get("LIVEBATCH_CUDA_MODEL", ROOT / "models" / "smollm2-135m-fp16"))
    if not path.is_dir():
        pytest.skip(f"{path} is not built: see tests/gpu/conftest.py")
    return path
