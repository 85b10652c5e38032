"""Extraction in bfloat16 on a GPU: the self-check's bounds hold there, and still find faults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_offline.common.cache import open_cache
from dflash_offline.common.target import Target, load_target
from dflash_offline.extract import forward as forward_module
from dflash_offline.extract import state_ring
from dflash_offline.extract.batch_decode import Sampling, decode_batch
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.self_check import self_check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = (0, 1, 4)


def samples() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 250, length).astype(np.int32) for length in (3, 40, 17, 29, 200)]


@pytest.fixture(params=["qwen3", "gemma3", "qwen3-moe", "qwen3.5-hybrid"])
def target(request, make_target) -> Target:
    folder: Path = make_target(request.param)
    return load_target(folder, dtype=torch.bfloat16, device="cuda", head=False)


def test_self_check(target: Target):
    checks = self_check(target, LAYERS, samples())
    assert [check for check in checks if not check.is_good] == []


def test_layer_off_by_one_is_found(target: Target, monkeypatch):
    init = forward_module.Capture.__init__
    monkeypatch.setattr(
        forward_module.Capture,
        "__init__",
        lambda capture, given, layers, **kwargs: init(
            capture, given, tuple(i + 1 for i in layers), **kwargs
        ),
    )
    checks = self_check(target, LAYERS, samples())
    assert any(not check.is_good for check in checks)


def test_no_logits_exist(tmp_path):
    """A forward of 32,768 tokens takes a fraction of what their logits would."""
    config = Qwen3Config(
        vocab_size=150_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=torch.bfloat16, device="cuda", head=False)
    batch = [np.full(512, 7, np.int32)] * 64
    with StateForward(target, LAYERS, keep_final=True) as forward:
        forward(batch[:1])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward(batch)
    logits_bytes = 64 * 512 * 2 * target.vocab_size
    assert torch.cuda.max_memory_allocated() - before < logits_bytes / 20


def test_store_of_a_gpu_run(make_target, write_corpus, run, tmp_path):
    folder, out = make_target("qwen3"), tmp_path / "store"
    args = ("--target", folder, "--data", write_corpus(12), "--out", out, "--layers", "0,1,4")
    assert run(extract_command, *args, "--pack-tokens", 256, "--teacher", "final") == 0
    cache = open_cache(str(out))
    assert cache.identity.target["compute_dtype"] == "bfloat16"
    target = load_target(folder, dtype=torch.float32, device="cpu", head=False)
    with StateForward(target, (0, 1, 4), keep_final=False) as forward:
        for document in cache.read_many(cache.samples):
            exact = forward([document.tokens]).features
            close = [_floats(each) for each in (document.features, exact)]
            # bfloat16 rounds every step of five layers.
            error = (close[0] - close[1]).norm() / close[1].norm()
            assert error < 0.02


def _floats(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns).view(np.int16)).view(torch.bfloat16).float()


def test_answers_in_fp32_do_not_depend_on_the_batch(make_target):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cuda", head=True)
    prompts = [sample.tolist() for sample in samples()]
    sampling = Sampling(max_new_tokens=16)
    together = decode_batch(target, prompts, [0] * 5, stop_ids=[], sampling=sampling)
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = decode_batch(target, [prompt], [0], stop_ids=[], sampling=sampling)
        assert alone == expected


def test_padded_states_die_at_once(tmp_path):
    """Rows of the captured layers are all that a batch holds beyond the bare forward."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=torch.bfloat16, device="cuda", head=False)
    batch, layers = [np.full(1024, 7, np.int32)] * 16, (0, 2, 4, 6, 8, 10)
    ids = torch.full((16, 1024), 7, device="cuda")

    def peak_of(work) -> int:
        work()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.inference_mode():
        bare = peak_of(lambda: target.base(input_ids=ids, use_cache=False))
    with StateForward(target, layers, keep_final=True) as forward:
        rows = forward.new_rows(16 * 1024)
        ours = peak_of(lambda: forward.states(batch, rows))
    state_bytes = 16 * 1024 * 512 * 2
    assert ours < bare + state_bytes


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_no_race_for_memory(codec, make_target, write_corpus, run, tmp_path, monkeypatch):
    """A buffer that goes back to the ring is overwritten at once."""
    folder, data = make_target("qwen3"), write_corpus(300)
    args = ("--target", folder, "--data", data, "--layers", "0,1,4", "--pack-tokens", 256)
    args = (*args, "--batch-tokens", 1024, "--codec", codec)
    assert run(extract_command, *args, "--out", tmp_path / "sound") == 0
    release = state_ring.StateRing.release

    @torch.inference_mode()
    def poison(ring, buffer):
        # Behind everything that was launched, and so before the next forward's rows.
        buffer.rows.fill_(torch.nan)
        for memory in buffer.host.values():
            memory.fill_(0xFF)
        release(ring, buffer)

    monkeypatch.setattr(state_ring.StateRing, "release", poison)
    assert run(extract_command, *args, "--out", tmp_path / "poisoned") == 0
    assert content(tmp_path / "poisoned") == content(tmp_path / "sound")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_are_found(bad):
    rows = torch.randn(64, 4096, device="cuda").to(torch.bfloat16)
    rows[7, 4095] = bad
    is_finite = torch.linalg.vector_norm(rows, torch.inf, dim=1).isfinite()
    assert is_finite.logical_not().nonzero().tolist() == [[7]]


def content(store: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(store.glob("*/c/**/*")) if path.is_file()]
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}
