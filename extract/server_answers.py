"""Answers by a chat server, many conversations under way at a time."""

import json
import queue
import threading
from collections.abc import Iterator, Sequence

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.extract.endpoint import Endpoint, check_url
from dflash_offline.extract.generate_config import GenerateConfig
from dflash_offline.extract.jobs import Answer, Job


class ServerAnswers:
    """A server that knows the target by its name.

    Raises:
        BadInput: an option that does not reach a server.
    """

    def __init__(self, config: GenerateConfig, options: ChatOptions) -> None:
        ours = {
            "--chat-template": config.chat_template,
            "--target-revision": config.target_revision,
            "--dtype": None if config.dtype == "auto" else config.dtype,
            "--trust-remote-code": config.trust_remote_code or None,
        }
        for name, value in ours.items():
            if value is not None:
                raise BadInput(
                    f"{name} {value} does not reach the server of --endpoint; start the server "
                    "with it"
                )
        assert config.endpoint is not None
        check_url(config.endpoint)
        parameters = {
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        if options.chat_template_args:
            parameters["chat_template_kwargs"] = options.chat_template_args
        self._config = config
        self._options = options
        self._endpoint = Endpoint(
            url=config.endpoint,
            model=config.target,
            api_key=config.api_key,
            parameters=parameters,
        )
        self.identity = {
            "endpoint": config.endpoint,
            "chat_template_args": json.dumps(options.chat_template_args, sort_keys=True),
            "system_prompt": options.system_prompt or "",
        }

    def answer(self, jobs: Sequence[Job], _watch: object) -> Iterator[Job]:
        """Yield the jobs as they are finished, in any order.

        Raises:
            BadInput: the server refuses a request.
            Stopped: the server fails for good.
        """
        todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        finished: queue.SimpleQueue[Job | BaseException] = queue.SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set() and (job := todo.get()) is not None:
                try:
                    finished.put(self._finish(job))
                # Whatever it is, the main thread raises it.
                except BaseException as problem:
                    finished.put(problem)

        num_threads = min(self._config.concurrency, len(jobs))
        for each in [*jobs, *[None] * num_threads]:
            todo.put(each)
        # Daemons: after an error or a signal nobody waits for answers on their way.
        for _ in range(num_threads):
            threading.Thread(target=work, name="answer", daemon=True).start()
        try:
            for _ in jobs:
                done = finished.get()
                if isinstance(done, BaseException):
                    raise done
                yield done
        finally:
            is_over.set()

    def _finish(self, job: Job) -> Job:
        while job.finish_reason is None:
            messages = self._options.with_system(job.ask())
            try:
                choice = self._endpoint.complete(messages, job.seed(self._config.seed))
            except BadInput as problem:
                raise BadInput(f"prompt {job.id}: {problem}") from problem
            message = choice["message"]
            job.take(
                Answer(
                    text=message["content"],
                    finish_reason=choice.get("finish_reason") or "stop",
                    num_tokens=choice["completion_tokens"],
                    reasoning=message["reasoning_content"],
                )
            )
        return job
