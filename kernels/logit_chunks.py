"""Chunks of logits: how rows are cut, which buffers they use, and the two products around them.

The loss heads hold logits of one chunk at a time, in a buffer that is kept between calls. Letters:
N rows, C rows of a chunk, H hidden, V vocabulary.
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
    name: str, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an uninitialised [rows, columns] buffer, rows at multiples of 64 elements.

    One buffer is kept per name, dtype, device and CUDA stream; it grows to the largest size asked
    for and is never given back before `release_buffers`. Its contents hold until the next call
    with the same name on the same stream.
    """
    stride = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (name, dtype, device, stream)
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
