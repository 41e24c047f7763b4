"""Graph: the ONNX Runtime session of a paged CUDA folder, its KV cache, and how runs are bound to both.

Owns the session's options and the cache's memory. Must not know rows, steps or when to capture what.
"""

from __future__ import annotations

import math
import os
from typing import Any

import cupy as cp
import numpy as np
import onnx
import onnxruntime as ort

from producer.errors import UsageError
from worker.folder import ModelFolder

CUDA = "CUDAExecutionProvider"
EAGER = -1  # graph id of runs that are neither captured nor replayed
CUDNN_ATTENTION = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"
AUTO_TUNE = "ep.cuda.enable_gemm_auto_tune"
ITEM_BYTES = {"FLOAT": 4, "FLOAT16": 2, "BFLOAT16": 2}
INDEX_TYPES = {"INT32": np.int32, "INT64": np.int64}


class Graph:
    """Runs bindings on ``stream``, in order and without waiting for them."""

    def __init__(
        self, folder: ModelFolder, device_id: int, stream: Any, *, deterministic: bool = False
    ) -> None:
        """UsageError where ONNX Runtime cannot run the folder on that GPU.

        ``deterministic``: neither the attention whose results vary from run to run nor kernels chosen by
        timing them. It holds for the process: the runtime reads the first from the environment, once.
        """
        os.environ[CUDNN_ATTENTION] = str(int(not deterministic))
        self.folder = folder
        self.stream = stream
        self.captures = folder.has_attention_metadata  # without it, every attention node waits for the device
        self.index_type = INDEX_TYPES[folder.step_inputs.get("logits_indices", "INT64")]
        self.logits_bytes = folder.vocab_size * ITEM_BYTES[folder.logits_dtype]  # of one row
        self.block_bytes = _block_items(folder) * ITEM_BYTES[folder.kv_dtype]  # of one layer's keys or values
        self._device_id = device_id
        config = dict(folder.session_config) | ({AUTO_TUNE: "0"} if deterministic else {})
        self._session = _open(folder, device_id, stream, config, self.captures)
        self._options: dict[int, ort.RunOptions] = {}
        self.allocate(1)

    @property
    def num_blocks(self) -> int:
        return int(self._cache.shape[2])

    def allocate(self, num_blocks: int) -> None:
        """A KV cache [layers, 2 (keys, values), blocks, bytes]. Bindings made before are void."""
        shape = (self.folder.num_layers, 2, num_blocks, self.block_bytes)
        self._cache: Any = None
        cp.get_default_memory_pool().free_all_blocks()
        try:
            self._cache = cp.empty(shape, cp.uint8)
        except cp.cuda.memory.OutOfMemoryError as error:
            raise UsageError(
                f"no memory on the GPU for a KV cache of {math.prod(shape):,} bytes: lower --kv-memory."
            ) from error

    def new_binding(self) -> Any:
        """With the cache bound as input and, the same memory, as output."""
        binding, folder = self._session.io_binding(), self.folder
        shape = (self.num_blocks, folder.block_size, folder.num_kv_heads, folder.head_size)
        for kind, word in enumerate(("key", "value")):
            past, present = (folder.layer_names(f"{side}_{word}_names") for side in ("past", "present"))
            for layer, names in enumerate(zip(past, present, strict=True)):
                address = self._cache[layer, kind].data.ptr
                for bind, name in zip((binding.bind_input, binding.bind_output), names, strict=True):
                    bind(name, "cuda", self._device_id, _onnx(folder.kv_dtype), shape, address)
        return binding

    def bind(self, binding: Any, word: str, address: int, shape: tuple[int, ...]) -> None:
        """A step's input on the device, under the config's word for it, if the graph takes it."""
        if dtype := self.folder.step_inputs.get(word):
            name = self.folder.names[word]
            binding.bind_input(name, "cuda", self._device_id, _onnx(dtype), shape, address)

    def bind_bounds(self, binding: Any, num_tokens: int, length: int) -> None:
        """A row's most new tokens and most tokens in the run, in CPU memory; a capture keeps them."""
        if self.folder.has_attention_metadata:
            bounds = np.array([num_tokens, length, 0], np.int32)
            binding.bind_ortvalue_input(
                self.folder.names["attention_metadata"], ort.OrtValue.ortvalue_from_numpy(bounds)
            )

    def bind_logits(self, binding: Any, address: int, rows: int) -> None:
        dtype, shape = _onnx(self.folder.logits_dtype), (rows, self.folder.vocab_size)
        binding.bind_output(self.folder.names["logits"], "cuda", self._device_id, dtype, shape, address)

    def run(self, binding: Any, graph_id: int = EAGER) -> None:
        """Enqueues a run. The first one of a graph id captures it, and takes as long as several."""
        if graph_id not in self._options:
            self._options[graph_id] = _run_options(graph_id)
        self._session.run_with_iobinding(binding, self._options[graph_id])


def _open(
    folder: ModelFolder, device_id: int, stream: Any, config: dict[str, str], captures: bool
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors
    options.enable_mem_pattern = False  # keeps a plan for every shape, and hardly two prefills are alike
    for name, value in config.items():
        options.add_session_config_entry(name, value)
    provider = {
        "device_id": str(device_id),
        "user_compute_stream": str(stream.ptr),
        "enable_cuda_graph": str(int(captures)),
        "arena_extend_strategy": "kNextPowerOfTwo",  # larger pieces, which later shapes fit into
    }
    try:
        session = ort.InferenceSession(folder.graph.path, options, providers=[(CUDA, provider)])
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise UsageError(f"ONNX Runtime cannot load {folder.graph.path} on the GPU: {error}") from error
    if CUDA not in session.get_providers():  # it falls back to the CPU in silence
        raise UsageError(
            f"ONNX Runtime {ort.__version__} does not use the GPU (it offers {session.get_providers()}). "
            "`worker check --device cuda` says why."
        )
    return session


def _run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _block_items(folder: ModelFolder) -> int:
    return math.prod((folder.block_size, folder.num_kv_heads, folder.head_size))


def _onnx(dtype: str) -> int:
    return int(onnx.TensorProto.DataType.Value(dtype))
