"""A store of random packs for benchmarks of training: in a folder or on S3, cold if wanted.

Packs share the states of a few, which are drawn, and coded, once; each is written, and read, on its
own all the same.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from random_plans import random_samples
from safetensors.numpy import save
from step_shapes import DEVICE, LAYERS

from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.identity import Identity
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.quantize import EncodedStates, encode_states
from dflash_offline.common.store import LossMask, Plan, Schema
from dflash_offline.common.store_writer import Store

_KINDS, _WRITERS = 3, 8


@dataclass(frozen=True, kw_only=True)
class RandomPacks:
    """What is in the store."""

    codec: str
    packs: int
    tokens: int  # of a pack
    document: int  # tokens of a document
    hidden: int
    vocab: int

    @property
    def documents_of_a_pack(self) -> int:
        return self.tokens // self.document

    @property
    def schema(self) -> Schema:
        return Schema(
            layers=LAYERS,
            hidden=self.hidden,
            vocab_size=self.vocab,
            pack_tokens=self.tokens,
            codec=self.codec,
        )


def write_store(url: str, wanted: RandomPacks, storage_options: tuple[str, ...] = ()) -> None:
    """Write packs of whole documents with normal states, every token supervised."""
    rng, plan = np.random.default_rng(0), _plan(wanted)
    mask = np.full(wanted.document, LossMask.ASSISTANT, np.uint8)
    with Store.create_or_resume(
        url,
        schema=wanted.schema,
        identity=Identity(target={}, store={}, plan={}),
        plan=plan,
        tokens=[rng.integers(0, wanted.vocab - 1, s.length).astype(np.int32) for s in plan.samples],
        masks=[mask] * len(plan.samples),
        target_files={"config.json": b"{}", "tensors.safetensors": save({"norm.weight": mask})},
        options={},
        storage_options=storage_options,
    ) as store:
        shape = (len(LAYERS), wanted.tokens, wanted.hidden)
        if wanted.schema.is_coded:
            _calibrate(store, shape)
        kinds = [
            _coded(store, _random_states(shape, kind), wanted.document)
            for kind in range(min(_KINDS, wanted.packs))
        ]
        with ThreadPoolExecutor(_WRITERS) as pool:
            numbers = range(wanted.packs)
            list(pool.map(lambda pack: store.commit_pack(pack, kinds[pack % len(kinds)]), numbers))


def drop_from_page_cache(folder: Path) -> None:
    """Have the next reads of a folder's files come from its disk; they are on it already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plan(wanted: RandomPacks) -> Plan:
    per_pack = wanted.documents_of_a_pack
    packs, places = np.divmod(np.arange(per_pack * wanted.packs), per_pack)
    return Plan(
        samples=random_samples(
            np.full(len(packs), wanted.document), packs, places * wanted.document
        ),
        batches=[[list(range(p * per_pack, (p + 1) * per_pack))] for p in range(wanted.packs)],
        num_packs=wanted.packs,
        num_held_out_packs=0,
        unit_packs=1,
    )


def _random_states(shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    states = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return states.view(torch.int16).cpu().numpy().view(np.uint16)


def _coded(store: Store, states: np.ndarray, document: int) -> np.ndarray | EncodedStates:
    """Encode states where the store holds codes; on the device, as an extraction does."""
    if store.calibration is None:
        return states
    is_first = torch.arange(states.shape[1], device=DEVICE) % document == 0
    calibration = store.calibration.to(DEVICE)
    return encode_states(as_bfloat16(states).to(DEVICE), None, is_first, calibration).to("cpu")


def _calibrate(store: Store, shape: tuple[int, ...]) -> None:
    rows = CalibrationRows()
    for seed in range(64):
        rows.add(as_bfloat16(_random_states((shape[0], 128, shape[2]), 100 + seed)))
    store.write_calibration(rows.fit(store.schema.codec), {})
