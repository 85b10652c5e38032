"""Fixtures that several packages' tests share: a small store with random states, a tiny target."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from dflash_offline.common.identity import Identity
from dflash_offline.common.store import LossMask, Plan, Sample, Schema
from dflash_offline.common.store_writer import Store
from dflash_offline.common.topk import TopK, predicts

# Kernels run on the device where there is one, else in Triton's interpreter. Triton reads the
# variable when a kernel is defined, so it must stand before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

VOCAB, HIDDEN, LAYERS = 97, 64, (1, 3)
TARGET_CONFIG = b"""{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
 "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": true}"""
# It reads `deep`, which changes nothing.
CHAT_TEMPLATE = (
    "{% if deep %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=0, help="Kills of the writer for each storage in test_kills."
    )
    parser.addoption("--flips", type=int, default=200, help="Damaged files in test_flips.")
    parser.addoption(
        "--decoded", type=int, default=5, help="Prompts that test_decode asks the real target."
    )


@dataclass
class Corpus:
    """Samples with random tokens and states, laid out in packs."""

    schema: Schema
    plan: Plan
    identity: Identity
    tokens: list[np.ndarray]
    masks: list[np.ndarray]
    features: list[np.ndarray]
    final: list[np.ndarray]
    topk: list[TopK]  # empty without such a teacher
    target_files: dict[str, bytes]

    def open(
        self, url: Path | str, *, append: bool = False, storage_options: tuple[str, ...] = ()
    ) -> Store:
        return Store.create_or_resume(
            str(url),
            schema=self.schema,
            identity=self.identity,
            plan=self.plan,
            tokens=self.tokens,
            masks=self.masks,
            target_files=self.target_files,
            options={"note": "made by a test"},
            append=append,
            storage_options=storage_options,
        )

    def write(self, url: Path | str, **options: Any) -> None:
        """Make a complete store, or add to one; options as for `open`."""
        with self.open(url, **options) as store:
            self.commit(store)

    def commit(
        self,
        store: Store,
        packs: Sequence[int] | None = None,
        *,
        first_pack: int = 0,
        quarantined: Mapping[int, str] | None = None,
    ) -> None:
        """Commit packs of this corpus, which stand behind `first_pack` packs of earlier plans."""
        for pack in range(self.plan.num_packs) if packs is None else packs:
            members = [i for i, s in enumerate(self.plan.samples) if s.pack == pack]
            features = np.concatenate([self.features[i] for i in members], axis=1)
            final = np.concatenate([self.final[i] for i in members])
            has_final = self.schema.teacher == "final"
            store.commit_pack(
                first_pack + pack,
                features,
                final if has_final else None,
                topk=TopK.joined([self.topk[i] for i in members]) if self.topk else None,
                quarantined=quarantined,
            )


def random_topk(masks: list[np.ndarray], k: int, seed: int) -> list[TopK]:
    """Predictions of a teacher wherever the next token is supervised."""
    rng = np.random.default_rng(seed)
    found = []
    for mask in masks:
        kept = predicts(mask)[:, None]
        ids = np.argsort(rng.random((len(mask), VOCAB - 1)), axis=1)[:, :k].astype(np.int32)
        # Half of the probability at most is theirs.
        logprobs = -np.sort(rng.exponential(2.0, ids.shape), axis=1) - np.log(2 * k)
        found.append(TopK(ids=ids * kept, logprobs=logprobs.astype(np.float32) * kept))
    return found


def random_bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal values as bfloat16 bit patterns (truncated)."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_corpus(
    *,
    lengths: tuple[int, ...] = (40, 70, 25, 64, 90, 33),
    pack_tokens: int = 128,
    codec: str = "raw",
    teacher: str = "none",
    num_held_out: int = 1,
    prompt_tokens: int = 8,
    seed: int = 0,
    source: str = "test",
    layers: tuple[int, ...] = LAYERS,
    hidden: int = HIDDEN,
) -> Corpus:
    """Cut random samples into packs; the last `num_held_out` of them are held out."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    pack, start = 0, 0
    for index, length in enumerate(lengths):
        held_out = index >= len(lengths) - num_held_out
        if samples and (start + length > pack_tokens or held_out != samples[-1].held_out):
            pack, start = pack + 1, 0
        samples.append(
            Sample(
                id=f"{source}:{index}",
                source=source,
                licence="",
                content_hash=f"{seed}-{index}",
                length=length,
                supervised=length - prompt_tokens,
                pack=pack,
                start=start,
                held_out=held_out,
            )
        )
        start += length
    num_packs = pack + 1
    plan = Plan(
        samples=samples,
        batches=[[[i for i, s in enumerate(samples) if s.pack == p]] for p in range(num_packs)],
        num_packs=num_packs,
        num_held_out_packs=len({s.pack for s in samples if s.held_out}),
        unit_packs=1,
        report={"rows": len(samples)},
    )
    masks = []
    for length in lengths:
        mask = np.zeros(length, np.uint8)
        mask[prompt_tokens:] = LossMask.ASSISTANT | LossMask.LAST_TURN
        mask[-1] = LossMask.END_OF_TURN | LossMask.LAST_TURN
        masks.append(mask)
    tensors = {
        "embed_tokens.weight": rng.standard_normal((VOCAB, hidden), np.float32),
        "norm.weight": np.ones(hidden, np.float32),
    }
    schema = Schema(
        layers=layers,
        hidden=hidden,
        vocab_size=VOCAB,
        pack_tokens=pack_tokens,
        codec=codec,
        teacher=teacher,
    )
    return Corpus(
        schema=schema,
        plan=plan,
        identity=Identity(
            target={"weights": "0" * 8, "layers": ",".join(map(str, layers))},
            store={"codec": codec, "pack_tokens": pack_tokens},
            plan={"seed": seed, "sources": source},
        ),
        tokens=[rng.integers(0, VOCAB - 1, n).astype(np.int32) for n in lengths],
        masks=masks,
        features=[random_bfloat16(rng, (len(layers), n, hidden)) for n in lengths],
        final=[random_bfloat16(rng, (n, hidden)) for n in lengths],
        topk=random_topk(masks, schema.num_topk, seed) if schema.num_topk else [],
        target_files={"config.json": TARGET_CONFIG, "tensors.safetensors": save(tensors)},
    )


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    """Whether a process still runs; a zombie that nobody has waited for counts as gone."""

    def read(pid: int) -> bool:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return text.rpartition(")")[2].split()[0] != "Z"

    return read


@pytest.fixture
def corpus_maker():
    """`make_corpus`, for tests that choose lengths, codec or teacher."""
    return make_corpus


@pytest.fixture
def small_store(tmp_path: Path) -> tuple[str, Corpus]:
    """A complete raw store of six short samples, one held out, with the corpus it holds."""
    corpus = make_corpus()
    corpus.write(tmp_path / "store")
    return str(tmp_path / "store"), corpus


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of some MiB and return its folder; skips where that is not allowed."""
    folders: list[Path] = []

    def mount(size_mib: int) -> Path:
        folder = tmp_path / f"disk-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs (run as root)")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Qwen3 model of 8 layers with random weights, byte tokens and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # Logits of zero are never the best: an answer of white space alone has no text to train on.
    blank = [i for i in range(len(tokenizer)) if not tokenizer.decode([i]).strip()]
    with torch.no_grad():
        model.get_input_embeddings().weight[blank] = 0.0
    model.save_pretrained(folder)
    return folder
