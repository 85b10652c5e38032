"""dflash-cache on object storage: copies both ways, verification and repair."""

import numpy as np
import pytest

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import CopyConfig, RemoveConfig, RepairConfig, VerifyConfig
from dflash_offline.common.cache_copy import copy
from dflash_offline.common.cache_edit import remove, repair
from dflash_offline.common.cache_verify import verify
from dflash_offline.common.errors import FoundProblems, MissingStore
from dflash_offline.common.store import FEATURES, shard_key


def features_of(url: str, options: tuple[str, ...] = ()) -> np.ndarray:
    cache = open_cache(url, storage_options=options)
    return np.concatenate([d.features for d in cache.read_many(cache.samples)], axis=1)


def test_copies_there_and_back_are_the_same(small_store, s3_server, s3_url, tmp_path):
    url, _ = small_store
    options = s3_server.options
    copy(CopyConfig(source=url, destination=s3_url, storage_option=options))
    back = str(tmp_path / "back")
    copy(CopyConfig(source=s3_url, destination=back, storage_option=options))
    verify(VerifyConfig(url=s3_url, deep=True, storage_option=options))
    verify(VerifyConfig(url=back, deep=True))
    for each, given in [(s3_url, options), (back, ())]:
        np.testing.assert_array_equal(features_of(each, given), features_of(url))
    smaller = f"{s3_url}-lossless"
    copy(CopyConfig(source=s3_url, destination=smaller, codec="lossless", storage_option=options))
    np.testing.assert_array_equal(features_of(smaller, options), features_of(url))


def test_damage_is_found_and_repaired(s3_server, s3_url, corpus_maker, capsys):
    options = s3_server.options
    corpus = corpus_maker()
    corpus.write(s3_url, storage_options=options)
    blobs = blobs_at(s3_url, options)
    content = bytearray(blobs.read(shard_key(FEATURES, 1)))
    content[10] ^= 1
    blobs.replace(shard_key(FEATURES, 1), bytes(content))
    verify(VerifyConfig(url=s3_url, storage_option=options))
    with pytest.raises(FoundProblems, match="1 problem"):
        verify(VerifyConfig(url=s3_url, deep=True, storage_option=options))
    assert "pack 1, array features" in "".join(capsys.readouterr())
    repair(RepairConfig(url=s3_url, storage_option=options))
    with corpus.open(s3_url, storage_options=options) as store:
        assert store.committed == {0, 2, 3}
        corpus.commit(store, [1])
    verify(VerifyConfig(url=s3_url, deep=True, storage_option=options))
    remove(RemoveConfig(url=s3_url, yes=True, storage_option=options))
    assert blobs.list("") == []
    with pytest.raises(MissingStore):
        open_cache(s3_url, storage_options=options)
