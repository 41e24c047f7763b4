"""A model folder on an NVIDIA GPU: one session, prefills eager, decodes as captured graphs, on one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.packed import MAX_VOCABULARY
from producer.errors import UsageError

if TYPE_CHECKING:
    from kernels.cuda import BatchedSampler
    from kernels.cuda_code import LogitsType
    from worker.cuda.model import CudaModel
    from worker.folder import ModelFolder
    from worker.settings import EngineSettings

PREFILL_LAUNCH = 0.5  # steps of the live batch; 1.0 ms, and a step takes 1.5 to 2.7 (H200, a model of 1 B)
LOGITS: dict[str, LogitsType] = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def build_parts(folder: ModelFolder, settings: EngineSettings) -> tuple[CudaModel, BatchedSampler]:
    """Model and sampler on the GPU that ``settings`` names, on one stream. UsageError where it cannot be."""
    try:
        import cupy as cp
        import onnxruntime as ort

        cp.cuda.Device(settings.gpu).use()
    except Exception as error:  # neither package, or no driver, or no such GPU: the doctor tells them apart
        raise UsageError(
            f"--device {settings.device}: {error}. "
            f"`worker check --device {settings.device}` says what is missing."
        ) from error
    check(folder, settings.max_batch)
    from kernels.cuda import BatchedSampler
    from kernels.feed import Feed
    from worker.cuda.model import CudaModel

    ort.preload_dlls()
    sampler = BatchedSampler(
        settings.max_batch, folder.vocab_size, folder.context_length, logits=LOGITS[folder.logits_dtype]
    )
    model = CudaModel(
        folder,
        Feed(sampler),
        device_id=settings.gpu or 0,
        max_batch=settings.max_batch,
        kv_memory_bytes=settings.kv_bytes,
        deterministic=settings.deterministic,
    )
    return model, sampler


def check(folder: ModelFolder, max_batch: int) -> None:
    """Raises UsageError for what no GPU can run, before anything is made of its size."""
    if folder.kind != "cuda-paged":
        raise UsageError(
            f"{folder.path} is a {folder.kind} model and the device is a GPU: build one with "
            "`worker build SOURCE --device cuda --precision fp16`."
        )
    if folder.max_batch and max_batch > folder.max_batch:
        raise UsageError(f"--max-batch {max_batch}: this graph's attention takes {folder.max_batch} rows.")
    if folder.vocab_size > MAX_VOCABULARY:
        raise UsageError(
            f"{folder.path}: a vocabulary of {folder.vocab_size:,} tokens; on a GPU it can have at most "
            f"{MAX_VOCABULARY:,}."
        )
