"""Targets of several families with one byte tokenizer, corpora, and commands run as by a shell."""

import importlib
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dflash_offline.extract.worker import Worker

# A model's module chooses its kernels when it is imported, and takes a warning of theirs, which is
# an error in tests, for a broken package.
if torch.cuda.is_available():
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module("fla.ops.gated_delta_rule")

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 64}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3": lambda **ids: Qwen3Config(**SHAPE, **ids, tie_word_embeddings=False),
    # Whose products a GPU may sum in another order.
    "qwen3-wide": lambda **ids: Qwen3Config(**SHAPE | WIDE, **ids, tie_word_embeddings=False),
    "llama": lambda **ids: LlamaConfig(**SHAPE, **ids, tie_word_embeddings=True),
    "gemma3": lambda **ids: Gemma3TextConfig(
        **SHAPE, **ids, sliding_window=8, final_logit_softcapping=5.0
    ),
    "qwen3-moe": lambda **ids: Qwen3MoeConfig(**SHAPE, **MOE, **ids),
    # Its attention keeps scores, with a sink; every second layer slides.
    "gpt-oss": lambda **ids: GptOssConfig(
        **SHAPE, **ids, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    # Its norms have a bias.
    "stablelm": lambda **ids: StableLmConfig(**SHAPE, **ids, tie_word_embeddings=False),
    "qwen3.5-hybrid": lambda **ids: Qwen3_5TextConfig(**SHAPE, **LINEAR, **ids),
}


@pytest.fixture(scope="session")
def make_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory):
    """A saved model of a family, with the tokenizer of `tiny_target`; made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            tokenizer = AutoTokenizer.from_pretrained(tiny_target)
            ids = {"vocab_size": len(tokenizer), "bos_token_id": None}
            ids |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            config = FAMILIES[family](**ids)
            torch.manual_seed(0)
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture
def no_template(tiny_target: Path, tmp_path: Path) -> Path:
    """`tiny_target` without its chat template."""
    folder = tmp_path / "no-template"
    shutil.copytree(tiny_target, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture
def write_corpus(tmp_path: Path):
    """Write conversations of distinct lengths and contents; returns the file."""

    def write(count: int, name: str = "chat.jsonl") -> Path:
        rows = [
            {
                "id": f"row-{i}",
                "messages": [
                    {"role": "user", "content": f"Tell me about {i}."},
                    {"role": "assistant", "content": f"{i} is " + "very " * (i * 7 % 11) + "odd."},
                ],
            }
            for i in range(count)
        ]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def state_files() -> Callable[[Path], dict[str, bytes]]:
    """What a store holds of its samples, plan and target."""

    def read(store: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(store)): path.read_bytes()
            for name in ("features", "final", "tokens", "loss_mask", "plan", "target")
            for path in sorted((store / name).rglob("*"))
            if path.is_file()
        }

    return read


@pytest.fixture
def run():
    """Call a command with arguments as a shell would and return its exit code."""

    def call(command: Callable, *args: object) -> int:
        with pytest.raises(SystemExit) as end:
            command([str(arg) for arg in args])
        return end.value.code or 0

    return call


@pytest.fixture
def sigterm_at_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager]:
    """Inside, an extraction in this process gets SIGTERM before its nth batch.

    From the thread that runs the forwards: one of writers' may come when they are all done.
    """

    @contextmanager
    def sent(number: int) -> Iterator[None]:
        run, seen = Worker._run, []

        def run_batch(worker: Worker, batch: object) -> None:
            seen.append(batch)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            run(worker, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_run", run_batch)
            yield

    return sent
