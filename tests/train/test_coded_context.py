"""Training from an int store: the codes become, on the device, what the store's reader gives."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import CopyConfig
from dflash_offline.common.cache_copy import copy
from dflash_offline.train.anchors import BlockLayout
from dflash_offline.train.coded_context import CodedContext
from dflash_offline.train.order import Draw, StreamState
from dflash_offline.train.stream import StepBuilder, StreamOptions

OPTIONS = StreamOptions(
    layout=BlockLayout(block_size=4, mask_token_id=96),
    layers=(3, 1),
    num_anchors=6,
    rows_per_pass=4096,
    seed=0,
    with_final=True,
)


@pytest.fixture
def stores(tmp_path: Path, corpus_maker):
    """The same states in a raw and an int4 store."""
    corpus_maker(teacher="final").write(tmp_path / "raw")
    copy(CopyConfig(source=f"{tmp_path}/raw", destination=f"{tmp_path}/int4", codec="int4"))
    return open_cache(str(tmp_path / "raw")), open_cache(str(tmp_path / "int4"))


def built(caches, draws, device="cpu", dtype=torch.float32):
    builder = StepBuilder(caches, OPTIONS, [cache.training_samples for cache in caches])
    (given,) = builder.build(draws, StreamState()).passes
    return given, given.to(torch.device(device), dtype)


def draw(store: int, index: int) -> Draw:
    return Draw(store=store, index=index, epoch=0, occurrence=0)


def expected(cache, given, document: int, index: int) -> torch.Tensor:
    """Rows of one document of a pass, [T, K*H], from the store's reader."""
    length = given.tables.context_lengths[document]
    features = cache.read(index, (3, 1)).features_torch()
    return features[:, :length].transpose(0, 1).flatten(1)


def test_codes_become_the_readers_rows(stores):
    raw, coded = stores
    given, moved = built([coded], [draw(0, 2), draw(0, 0)])
    assert isinstance(given.features, CodedContext)
    rows = [expected(coded, given, place, index) for place, index in enumerate((2, 0))]
    assert torch.equal(moved.features, torch.cat(rows).float())
    plain, _ = built([raw], [draw(0, 2), draw(0, 0)])
    assert torch.equal(plain.tables.labels, given.tables.labels)
    # The final state is int8: close to what the raw store gives.
    error = (plain.final.float() - given.final.float()).abs().max()
    assert 0 < error < 0.05 * plain.final.float().abs().max()


def test_stores_with_and_without_codes_mix(stores):
    raw, coded = stores
    given, moved = built([raw, coded], [draw(0, 1), draw(1, 4)])
    rows = [expected(raw, given, 0, 1), expected(coded, given, 1, 4)]
    assert torch.equal(moved.features, torch.cat(rows).float())
    assert np.prod(moved.features.shape) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_rows_on_a_gpu(stores):
    raw, coded = stores
    given, moved = built([raw, coded], [draw(0, 1), draw(1, 4)], "cuda", torch.bfloat16)
    rows = [expected(raw, given, 0, 1), expected(coded, given, 1, 4)]
    assert torch.equal(moved.features.cpu(), torch.cat(rows))


def test_documents_that_are_decoded_alike_share_their_buffers(stores):
    raw, coded = stores
    draws = [draw(1, 0), draw(1, 2), draw(0, 1), draw(0, 3), draw(1, 4)]
    given, _ = built([raw, coded], draws)
    assert [part.codec for part in given.features.parts] == ["int4", "raw", "int4"]
    lengths = given.tables.context_lengths
    assert [part.num_tokens for part in given.features.parts] == [
        sum(lengths[:2]),
        sum(lengths[2:4]),
        lengths[4],
    ]
