"""Chunks of logits: how rows are cut and which buffers they use.

The loss heads hold logits of a chunk or two at a time, in buffers that are kept between calls.
Letters: N rows, C rows of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Rows of a chunk are a multiple of the GEMM tile's height where more than one chunk is needed.
ROW_MULTIPLE = 128
# Rows of the buffer start at multiples of 128 bytes: cuBLAS and 16-byte vector loads need 16.
COLUMN_MULTIPLE = 64

_buffers: dict[tuple, Tensor] = {}


def chunk_bounds(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """Cut `num_rows` into the fewest chunks of at most `chunk_rows`, of nearly equal size.

    Equal sizes keep a ragged batch from ending in a chunk too small to fill the GPU.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1 (4096 is the default)")
    if num_rows == 0:
        return []
    num_chunks = -(-num_rows // chunk_rows)
    rows = -(-num_rows // num_chunks)
    if num_chunks > 1:
        rows = min(chunk_rows, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)
    return [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def chunk_buffer(
    name: str,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
) -> Tensor:
    """Return an uninitialised [rows, columns] buffer, rows at multiples of 64 elements.

    One buffer is kept per name, dtype, device and CUDA stream (the current one by default); it
    grows to the largest size asked for and is never given back before `release_buffers`. Its
    contents hold until the next call with the same name on the same stream.
    """
    stride = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    if device.type == "cuda" and stream is None:
        stream = torch.cuda.current_stream(device)
    key = (name, dtype, device, stream.cuda_stream if stream else 0)
    stored = _buffers.get(key)
    if stored is None or stored.numel() < rows * stride:
        # Dropped first, so that the old and the new buffer never exist together.
        _buffers.pop(key, None)
        stored = None
        stored = _buffers[key] = torch.empty(rows * stride, dtype=dtype, device=device)
    return stored[: rows * stride].view(rows, stride)[:, :columns]


def release_buffers() -> None:
    """Give back every chunk buffer, for example before an evaluation that needs the memory."""
    _buffers.clear()


@contextmanager
def full_precision_sums() -> Iterator[None]:
    """Keep cuBLAS from adding split-K partial sums in bf16: the dX product sums over V terms."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
