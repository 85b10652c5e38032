"""What a benchmark of the training step checks first: a small step's gradient."""

import numpy as np
import torch

from dflash_offline.kernels.coded_states import CodedStates
from dflash_offline.train.anchors import AnchoredDocument
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.objective import Objective
from dflash_offline.train.step import accumulate
from dflash_offline.train.stream import LoadedDocument, StreamOptions, assemble
from dflash_offline.train.target_head import TargetHead


def check_gradient(device: torch.device) -> None:
    """Compare a small step's gradient, in the device's dtype, with that of float64 on the CPU."""
    shape = DrafterConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=999,
        rope_theta=1e6,
        block_size=16,
        mask_token_id=998,
        target_layer_ids=(1, 3),
        num_target_layers=6,
    )
    rng, is_cuda = np.random.default_rng(0), device.type == "cuda"
    documents = [
        LoadedDocument(
            anchored=AnchoredDocument(
                tokens=rng.integers(0, 998, length).astype(np.int32),
                supervised=np.ones(length, bool),
                anchors=np.sort(rng.choice(length - 1, 24, replace=False)),
            ),
            features=CodedStates(
                codec="raw", values=torch.randn(2, length, 256, dtype=torch.bfloat16)
            ),
        )
        for length in (300, 500)
    ]
    options = StreamOptions(
        layout=shape.layout,
        layers=(1, 3),
        num_anchors=24,
        rows_per_pass=16 * 24,
        seed=0,
        pinned=is_cuda,
    )
    passes = [assemble([document], options) for document in documents]
    weight = torch.randn(999, 256, dtype=torch.float64) / 16
    found = []
    dtype = torch.bfloat16 if is_cuda else torch.float32
    for place, master, compute in (
        (torch.device("cpu"), torch.float64, torch.float64),
        (device, torch.float32, dtype),
    ):
        drafter = Drafter(shape).initialise(0).to(place, master)
        for parameter in drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)
        head = TargetHead(embed=weight, weight=weight).to(place, compute)
        accumulate(drafter, head, Objective(loss="decay", gamma=7.0), passes)
        grads = [each.grad.double().cpu().flatten() for each in drafter.parameters()]
        found.append(torch.cat(grads))
    error = ((found[1] - found[0]).norm() / found[0].norm()).item()
    print(f"gradient of a small step within {error:.1e} of float64")
    assert error < (2e-2 if is_cuda else 1e-5), error
