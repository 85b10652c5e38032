"""The target's own answers to prompts, by the target in this process or by a chat server.

A conversation of several questions is answered turn by turn. What an answer depends on stands in
every row, and a second run goes on only under the same settings.
"""

import sys
import time
from collections.abc import Sequence

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.device_memory import told_of_memory
from dflash_offline.common.errors import BadInput
from dflash_offline.common.options import print_config
from dflash_offline.common.plain_console import plain_console
from dflash_offline.common.progress import ProgressLine
from dflash_offline.extract.answers_file import AnswersFile
from dflash_offline.extract.generate_config import GenerateConfig
from dflash_offline.extract.jobs import Job, read_jobs
from dflash_offline.extract.local_answers import LocalAnswers
from dflash_offline.extract.server_answers import ServerAnswers

FIELDS = ("answers", "tokens", "tok/s", "cut")


def generate(config: GenerateConfig) -> None:
    """Run `dflash-generate`.

    Raises:
        BadInput: anything the user gave that cannot be used.
        Stopped: a signal, a full disk or a server that fails; finished rows are safe.
    """
    print_config(config, out=str(config.out), title="dflash-generate")
    _refuse_idle_options(config)
    options = ChatOptions.from_options(
        config.chat_template, config.chat_template_arg, config.system_prompt
    )
    prompts = read_jobs(config.data, config.num_samples, config.num_answers)
    jobs = prompts.jobs
    kind = ServerAnswers if config.endpoint else LocalAnswers
    source = kind(config, options)
    settings = {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": config.seed,
        **source.identity,
    }
    answers = AnswersFile(config.out, target=config.target, settings=settings)
    todo = [job for job in jobs if job.key not in answers.done]
    if todo:
        with told_of_memory("the target's device", "finished rows are safe, lower --batch-tokens"):
            _write(source, todo, answers, total=len(jobs))
    console = plain_console(sys.stderr)
    console.print(
        f"{len(jobs)} answers in {config.out}, {len(jobs) - len(todo)} of them from before"
    )
    for line in prompts.lines():
        console.print(line)


def _refuse_idle_options(config: GenerateConfig) -> None:
    """Refuse what would have no effect."""
    if config.temperature == 0 and config.num_answers > 1:
        raise BadInput(
            f"--num-answers {config.num_answers} at --temperature 0 would be the same answer each "
            "time; give a temperature above 0"
        )
    if config.temperature == 0 and config.top_p < 1:
        raise BadInput(
            f"--top-p {config.top_p} has no effect at --temperature 0; give a temperature above 0"
        )
    if config.api_key and not config.endpoint:
        raise BadInput("--api-key is for a server; give its --endpoint too, or leave the key out")


def _write(
    source: LocalAnswers | ServerAnswers, todo: Sequence[Job], answers: AnswersFile, *, total: int
) -> None:
    began, tokens, num_cut = time.monotonic(), 0, 0
    done = total - len(todo)
    with answers, ProgressLine(total, FIELDS, done=done) as progress:

        def show(under_way: float, tokens_under_way: int) -> None:
            written = tokens + tokens_under_way
            speed = written / (time.monotonic() - began)
            shown = (f"{done}/{total}", f"{written:,}", f"{speed:,.0f}", str(num_cut))
            progress.update(done + under_way, dict(zip(FIELDS, shown, strict=True)))

        for job in source.answer(todo, show):
            answers.append(job.key, job.row())
            done += 1
            tokens += job.num_tokens
            num_cut += job.finish_reason == "length"
            show(0.0, 0)
