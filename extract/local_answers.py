"""Answers by the target in this process, a batch of conversations at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from dflash_offline.common.chat import (
    ChatOptions,
    chat_identity,
    render_prompt,
    stop_token_ids,
)
from dflash_offline.common.device_choice import default_device, dtype_name, resolve_dtype
from dflash_offline.common.errors import BadInput
from dflash_offline.common.target import Target, load_config, load_target, load_tokenizer
from dflash_offline.extract.batch_decode import Sampling, decode_batch
from dflash_offline.extract.generate_config import GenerateConfig
from dflash_offline.extract.jobs import Answer, Job

# Called with what a batch under way amounts to: finished answers, and tokens.
Watch = Callable[[float, int], None]


class LocalAnswers:
    """The target's tokenizer at once, the target itself when answers are wanted.

    Raises:
        BadInput: no such target, or one without a chat template.
    """

    def __init__(self, config: GenerateConfig, options: ChatOptions) -> None:
        self._config = config
        self._options = options
        remote = config.trust_remote_code
        text_config = load_config(config.target, config.target_revision, trust_remote_code=remote)
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            config.target, config.target_revision, trust_remote_code=remote
        )
        # Models without position limit have no such key.
        self._context = getattr(text_config, "max_position_embeddings", None)
        self.identity = {
            **chat_identity(self._tokenizer, options),
            "target_revision": config.target_revision,
            "dtype": dtype_name(resolve_dtype(config.dtype, default_device())),
        }

    def answer(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Job]:
        """Yield the jobs as they are finished, in order, batch by batch.

        Args:
            jobs: to be finished.
            watch: called while a batch is under way.

        Raises:
            BadInput: a first prompt and its answer exceed the target's context; nothing is loaded.
        """
        # Lengths alone: the ids of all prompts would fill the memory.
        lengths = {job.key: self._first_length(job) for job in jobs}
        config = self._config
        device = default_device()
        target = load_target(
            config.target,
            dtype=resolve_dtype(config.dtype, device),
            device=device,
            revision=config.target_revision,
            head=True,
            trust_remote_code=config.trust_remote_code,
        )
        for chunk in self._chunks(jobs, lengths):
            prompts = {job.key: self._prompt(job) for job in chunk}
            while waiting := [job for job in chunk if job.finish_reason is None]:
                lengths = {job.key: len(prompts[job.key]) for job in waiting}
                for batch in self._chunks(waiting, lengths):
                    self._answer_once(target, batch, prompts, watch)
            yield from chunk

    def _chunks(self, jobs: Sequence[Job], lengths: Mapping[str, int]) -> Iterator[list[Job]]:
        """Yield runs of jobs whose next prompts, of these lengths by key, fit a batch."""
        chunk: list[Job] = []
        width = 0
        for job in jobs:
            needed = lengths[job.key] + self._config.max_new_tokens
            if chunk and max(width, needed) * (len(chunk) + 1) > self._config.batch_tokens:
                yield chunk
                chunk, width = [], 0
            chunk.append(job)
            width = max(width, needed)
        yield chunk

    def _first_length(self, job: Job) -> int:
        length = len(self._prompt(job))
        if not self._has_room(length):
            raise BadInput(
                f"--max-new-tokens {self._config.max_new_tokens} after the {length} tokens of "
                f"prompt {job.id} is above the target's context of {self._context}; lower it, or "
                "leave the prompt out"
            )
        return length

    def _has_room(self, length: int) -> bool:
        return self._context is None or length + self._config.max_new_tokens <= self._context

    def _prompt(self, job: Job) -> list[int]:
        try:
            return render_prompt(self._tokenizer, job.ask(), self._options)
        except BadInput as problem:
            raise BadInput(f"prompt {job.id}: {problem}; change it or leave it out") from problem

    def _answer_once(
        self, target: Target, jobs: Sequence[Job], prompts: dict[str, list[int]], watch: Watch
    ) -> None:
        """Answer the prompts of jobs, and render those that come next."""
        limit = self._config.max_new_tokens
        decoded = decode_batch(
            target,
            [prompts[job.key] for job in jobs],
            [job.seed(self._config.seed) for job in jobs],
            stop_ids=stop_token_ids(self._tokenizer, target.generation_config),
            sampling=Sampling(
                max_new_tokens=limit,
                temperature=self._config.temperature,
                top_p=self._config.top_p,
            ),
            watch=lambda steps, tokens: watch(len(jobs) * steps / limit, tokens),
        )
        watch(0.0, 0)
        for job, each in zip(jobs, decoded, strict=True):
            # Marks of reasoning and calls are special tokens of some targets, and their words.
            text = self._tokenizer.decode(each.tokens, skip_special_tokens=False)
            # A limit may stand between the bytes of a character, which the target did not write.
            text = text.removesuffix("\ufffd") if each.is_cut else text
            reason = "length" if each.is_cut else "stop"
            job.take(Answer(text=text, finish_reason=reason, num_tokens=len(each.tokens)))
            if job.finish_reason is None:
                prompts[job.key] = self._prompt(job)
                if not self._has_room(len(prompts[job.key])):
                    job.end()
