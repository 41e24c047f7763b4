"""Tests of the GPU engine. The model is SmolLM2 in float16, built for CUDA:

worker build SmolLM2-135M-Instruct.gguf --device cuda --out models/smollm2-135m-fp16
LIVEBATCH_CUDA_MODEL names it where it lies elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def cuda_model() -> Path:
    path = Path(os.environ.get("LIVEBATCH_CUDA_MODEL", ROOT / "models" / "smollm2-135m-fp16"))
    if not path.is_dir():
        pytest.skip(f"{path} is not built: see tests/gpu/conftest.py")
    return path
