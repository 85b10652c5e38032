"""The top-k teacher: best tokens of the target's own prediction, in chunks, where they count."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_offline.common.cache import open_cache
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.target import load_target
from dflash_offline.common.topk import HEAD_ROWS, predicts
from dflash_offline.extract import forward as forward_module
from dflash_offline.extract import run as run_module
from dflash_offline.extract.best_tokens import BestTokens
from dflash_offline.extract.cli import main as extract_command

K = 6


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gpt-oss"])
def test_best_tokens_are_the_targets_own(make_target, family: str):
    """Tied and untied heads, and gemma's soft-cap; rows that are not wanted stay zero."""
    folder: Path = make_target(family)
    target = load_target(folder, dtype=torch.float32, device="cpu", head=True)
    ids = torch.randint(5, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        final = target.base(input_ids=ids, use_cache=False).last_hidden_state[0]
    own = target.own_logits(ids)[0].float().log_softmax(dim=1).topk(K, dim=1)
    is_wanted = torch.arange(40) % 3 == 1
    found_ids, found = BestTokens(target, K)(final, is_wanted)
    torch.testing.assert_close(found[is_wanted], own.values[is_wanted], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_ids[is_wanted].long(), own.indices[is_wanted])
    assert not found[~is_wanted].any()
    assert not found_ids[~is_wanted].any()
    none_ids, none = BestTokens(target, K)(final, torch.zeros(40, dtype=torch.bool))
    assert not none.any()
    assert not none_ids.any()


class LargestLogits(TorchDispatchMode):
    """Remember the most rows of a vocabulary that one allocation had room for."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and self.vocab in result.shape:
            self.rows = max(self.rows, result.numel() // self.vocab)
        return result


def test_no_logits_beyond_a_chunk(make_target):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=True)
    rows = 2 * HEAD_ROWS + 5
    final = torch.randn(rows, target.hidden_size)
    with LargestLogits(target.vocab_size) as largest:
        BestTokens(target, K)(final, torch.ones(rows, dtype=torch.bool))
    assert largest.rows == HEAD_ROWS


SMALL = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4")


@pytest.mark.parametrize(
    ("family", "codec"), [("gemma3", "raw"), ("qwen3", "lossless"), ("llama", "int8")]
)
def test_extraction_stores_them(family, codec, make_target, write_corpus, run, tmp_path):
    """Through batches, packs and codecs, equal to what an unbatched forward predicts."""
    folder, out = make_target(family), tmp_path / "store"
    args = ("--target", folder, "--data", write_corpus(70), "--out", out, *SMALL)
    assert run(extract_command, *args, "--codec", codec, "--teacher", f"topk:{K}") == 0
    assert run(cache_command, "verify", "--deep", out) == 0
    cache = open_cache(str(out))
    target = load_target(folder, dtype=torch.float32, device="cpu", head=True)
    for document in cache.read_many(cache.samples[:12]):
        kept = predicts(document.loss_mask)
        assert document.topk is not None
        np.testing.assert_array_equal(document.topk.is_kept(), kept)
        ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
        own = target.own_logits(ids)[0].float().log_softmax(dim=1)
        best = own.topk(K, dim=1).values.numpy()
        # From a final state rounded to bfloat16.
        np.testing.assert_allclose(document.topk.logprobs[kept], best[kept], atol=0.05)
        chosen = own.gather(1, torch.from_numpy(document.topk.ids.astype(np.int64))).numpy()
        np.testing.assert_allclose(document.topk.logprobs[kept], chosen[kept], atol=0.05)
        assert document.final is None


def test_final_state_that_is_not_finite_is_quarantined(
    make_target, write_corpus, run, tmp_path, monkeypatch
):
    """It is not stored, but what is made of it would be nonsense."""
    monkeypatch.setattr(run_module, "self_check", lambda *_args: [])
    keep = forward_module.StateForward._keep

    def spoiled(forward, slot, state):
        rows = keep(forward, slot, state)
        if slot == 3:
            rows[:60] = torch.nan  # of each batch, best tokens' rows among them
        return rows

    monkeypatch.setattr(forward_module.StateForward, "_keep", spoiled)
    out = tmp_path / "store"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(12), "--out", out, *SMALL)
    more = ("--codec", "raw", "--teacher", f"topk:{K}", "--max-bad", 100)
    assert run(extract_command, *args, *more) == 0
    cache = open_cache(str(out))
    reasons = {r for p in cache.packs for r in cache.record(p)["quarantined"].values()}
    assert reasons == {"not finite in final state at position 0"}
    assert run(cache_command, "verify", "--deep", out) == 0
