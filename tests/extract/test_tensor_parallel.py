"""A target over several processes: what is refused, and states as those of one process."""

import re

import pytest
from transformers import Qwen3Config

from dflash_offline.common.errors import BadInput
from dflash_offline.extract.tensor_parallel import check_group_size, check_tensor_parallel

CONFIG = Qwen3Config(num_attention_heads=12, num_key_value_heads=6)


def test_any_target_by_itself() -> None:
    check_tensor_parallel(1, "model.gguf", CONFIG)
    check_group_size(1, 3)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_sizes_that_divide_the_heads(size: int) -> None:
    check_tensor_parallel(size, "folder", CONFIG)


@pytest.mark.parametrize(
    ("size", "target", "message"),
    [
        (4, "folder", "--tp 4 does not divide .* 12 attention and 6 .* allowed are 1, 2, 3, 6"),
        (2, "model.gguf", "--tp 2 needs a Hugging Face checkpoint; --target model.gguf is GGUF"),
    ],
)
def test_refused_targets(size: int, target: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_tensor_parallel(size, target, CONFIG)


def test_refused_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=re.escape("pip install 'dflash-offline[tp]'")):
        check_tensor_parallel(2, "folder", CONFIG)


def test_refused_number_of_processes() -> None:
    with pytest.raises(BadInput, match="--tp 2 cannot be had with 3 worker process"):
        check_group_size(2, 3)
