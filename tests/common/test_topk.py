"""Best tokens of a teacher: computed in chunks, stored, read back, copied, edited and verified."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_verify import find_problems
from dflash_offline.common.store import LossMask, Schema
from dflash_offline.common.topk import HEAD_ROWS, TopK, predicts, top_logprobs

K, VOCAB = 5, 97


@pytest.fixture
def topk_store(tmp_path: Path, corpus_maker):
    """A complete store with best tokens, and what it holds."""

    def make(codec: str = "raw") -> tuple:
        corpus = corpus_maker(codec=codec, teacher=f"topk:{K}")
        corpus.write(tmp_path / "store")
        return str(tmp_path / "store"), corpus

    return make


def assert_same(found: TopK | None, expected: TopK) -> None:
    assert found is not None
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_stored_is_what_is_read(topk_store, codec: str):
    url, corpus = topk_store(codec)
    cache = open_cache(url)
    assert cache.schema.num_topk == K
    assert cache.schema.num_slots == len(cache.schema.layers)
    for document in cache.read_many(cache.samples):
        assert_same(document.topk, corpus.topk[document.index])
        assert document.final is None
        np.testing.assert_array_equal(document.topk.is_kept(), predicts(document.loss_mask))
        np.testing.assert_array_equal(document.features, corpus.features[document.index])
    assert find_problems(cache, deep=True) == []


def test_rows_that_predict_nothing():
    """The last token of a prompt predicts the answer's first; the last of all predicts nothing."""
    mask = np.array([0, 0, LossMask.ASSISTANT, LossMask.END_OF_TURN, 0, LossMask.OTHER], np.uint8)
    assert predicts(mask).tolist() == [False, True, True, False, True, False]
    assert not TopK.zeros(3, K).is_kept().any()


def test_copy_and_remove_keep_them(run, topk_store, tmp_path: Path):
    url, corpus = topk_store()
    copied = str(tmp_path / "copied")
    assert run("copy", url, copied, "--codec", "lossless") == 0
    assert run("copy", url, str(tmp_path / "int8"), "--codec", "int8") == 0
    for place in (copied, str(tmp_path / "int8")):
        cache = open_cache(place)
        for document in cache.read_many(cache.samples):
            assert_same(document.topk, corpus.topk[int(document.id.split(":")[1])])
    for document in open_cache(str(tmp_path / "int8")).read_codes([0, 1]):
        assert_same(document.topk, corpus.topk[int(document.id.split(":")[1])])
    assert run("rm", url, "--where", "length < 30", "--yes") == 0
    cache = open_cache(url)
    assert len(cache.samples) < len(corpus.tokens)
    for document in cache.read_many(cache.samples):
        assert_same(document.topk, corpus.topk[document.index])


@pytest.mark.parametrize(
    ("array", "value", "words"),
    [
        ("ids", VOCAB, "best tokens outside"),
        ("logprobs", 0.5, "log-probabilities that are none"),
        ("logprobs", np.nan, "log-probabilities that are none"),
        ("logprobs", -np.inf, "log-probabilities that are none"),
    ],
)
def test_verify_finds_nonsense(tmp_path: Path, corpus_maker, array: str, value, words: str):
    corpus = corpus_maker(teacher=f"topk:{K}")
    getattr(corpus.topk[0], array)[9, 1] = value
    corpus.write(tmp_path / "store")
    (problem,) = find_problems(open_cache(str(tmp_path / "store")), deep=True)
    assert words in problem


def test_info_counts_them_apart_from_states(run, topk_store, capsys):
    url, _ = topk_store()
    assert run("info", "--json", url) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["states_bytes"] == summary["stored_bytes"]["features"]
    assert run("info", url) == 0
    assert "best tokens" in capsys.readouterr().out


def test_wrong_shape_is_not_stored(tmp_path: Path, corpus_maker):
    corpus = corpus_maker(teacher=f"topk:{K}")
    with corpus.open(tmp_path / "store") as store:
        corpus.topk = [TopK.zeros(len(tokens), K + 1) for tokens in corpus.tokens]
        with pytest.raises(AssertionError, match="topk_ids"):
            corpus.commit(store, [0])


class Sizes(TorchDispatchMode):
    """Remember the largest number of rows of a vocabulary that a tensor had."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.rows = max(self.rows, result.untyped_storage().nbytes() // 4 // self.vocab)
        return result


def test_logits_exist_in_chunks():
    """The same as on all rows at once, and never more than 2,048 rows of logits."""
    vocab, hidden, rows = 3000, 8, 2 * HEAD_ROWS + 17
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(rows, hidden, generator=generator)
    head = torch.randn(vocab, hidden, generator=generator)
    whole = torch.log_softmax(final @ head.T, dim=1).topk(K, dim=1)
    with Sizes(vocab) as sizes:
        ids, logprobs = top_logprobs(final, lambda some: some @ head.T, K)
    assert sizes.rows == HEAD_ROWS
    assert ids.dtype == torch.int32
    torch.testing.assert_close(logprobs, whole.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ids.long(), whole.indices)


def test_schema_counts_them():
    schema = Schema(layers=(1,), hidden=64, vocab_size=10, pack_tokens=64, teacher="topk:16")
    assert schema.num_topk == 16
    assert schema.arrays["topk_ids"].shard == (64, 16)
    assert Schema.from_dict(schema.as_dict()) == schema
