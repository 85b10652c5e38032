"""Small drafters, documents and passes with random states, in any dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.train.anchors import AnchoredDocument, BlockLayout
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.stream import LoadedDocument, PassInput, StreamOptions, assemble
from dflash_offline.train.target_head import TargetHead

VOCAB, HIDDEN, MASK = 53, 32, 52


def make_config(**changes) -> DrafterConfig:
    """A drafter of two layers for two captured layers, B = 4."""
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rope_theta": 1e4,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "initializer_range": 0.2,
    }
    return DrafterConfig(**values | changes)


class Toy:
    """A drafter with a head, and documents to run it on."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.config = config
        self.dtype = dtype
        self.drafter = Drafter(config).initialise(1).to(dtype)
        embed = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        self.head = TargetHead(embed=embed, weight=embed)

    @property
    def layout(self) -> BlockLayout:
        return self.config.layout

    def options(self, **changes) -> StreamOptions:
        """Stream options that fit the drafter."""
        values = {
            "layout": self.layout,
            "layers": self.config.target_layer_ids,
            "num_anchors": 8,
            "rows_per_pass": 4096,
            "seed": 0,
            "dtype": self.dtype,
        }
        return StreamOptions(**values | changes)

    def given(self, documents, **changes) -> PassInput:
        """One pass over documents, decoded in the drafter's dtype."""
        return assemble(documents, self.options(**changes)).to(torch.device("cpu"), self.dtype)

    def document(self, length: int, *, prompt: int = 3, seed: int = 0, anchors=None):
        """A document of random tokens and states; all candidates are anchors by default."""
        rng = np.random.default_rng(seed)
        mask = np.arange(length) >= prompt
        return LoadedDocument(
            anchored=AnchoredDocument(
                tokens=rng.integers(0, VOCAB - 1, length).astype(np.int32),
                supervised=mask,
                anchors=np.asarray(
                    anchors if anchors is not None else np.arange(prompt, length - 1), np.int64
                ),
            ),
            features=CodedStates(
                codec="raw",
                values=torch.from_numpy(
                    rng.standard_normal((self.config.num_features, length, HIDDEN))
                ).bfloat16(),
            ),
        )


def run_config(url: str | Path, out: Path, **changes) -> TrainConfig:
    values = {
        "cache": (str(url),),
        "out": out,
        "draft_layers": 1,
        "block_size": 4,
        "mask_token_id": 96,
        "num_anchors": 6,
        "samples_per_step": 3,
        "num_steps": 6,
        "lr": 1e-3,
        "device": "cpu",
        "log_every": 1,
        "eval_every": 100,
        "checkpoint_every": "100",
    }
    return TrainConfig(**values | changes)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch):
    """Options of a run that takes a moment; its report, which takes seconds, is left out."""
    monkeypatch.setattr("dflash_offline.train.loop.write_report", lambda out: out / "report.html")
    return run_config


@pytest.fixture
def toy_maker():
    """Return `Toy(make_config(...), dtype)`."""

    def make(dtype: torch.dtype = torch.float64, **changes) -> Toy:
        return Toy(make_config(**changes), dtype)

    return make


@pytest.fixture
def config_maker():
    """`make_config`."""
    return make_config
