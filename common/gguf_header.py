"""The header of a GGUF file, parsed once: transformers parses it for config, tokenizer and weights.

It holds the whole vocabulary, in pieces that gguf reads one at a time, so each pass takes seconds.
So does the table of tensor names, which transformers has gguf make anew for every module.
"""

import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import gguf
from gguf import GGUFReader, get_tensor_name_map


@contextmanager
def gguf_header_parsed_once() -> Iterator[None]:
    """Let what transformers loads inside share one parsed header for each file.

    Raises:
        ValueError: a file ends inside its header; transformers lets the error of `struct` through.
    """
    # transformers imports these names at every call, and takes no reader that is there already.
    with (
        patch.object(gguf, "GGUFReader", _reader_of),
        patch.object(gguf, "get_tensor_name_map", _tensor_names),
    ):
        try:
            yield
        except struct.error as problem:
            raise ValueError("the file ends inside its header; download it again") from problem


def _reader_of(path: str) -> GGUFReader:
    file = Path(path).stat()
    return _parsed(str(path), file.st_size, file.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parsed(path: str, _size: int, _changed: int) -> GGUFReader:
    return GGUFReader(path)


_tensor_names = functools.lru_cache(maxsize=4)(get_tensor_name_map)
