"""Answers by a chat server, many conversations under way at a time."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.extract.endpoint import Endpoint
from dflash_offline.extract.generate_config import GenerateConfig
from dflash_offline.extract.jobs import Answer, Job


class ServerAnswers:
    """A server that knows the target by its name.

    Raises:
        BadInput: an option that does not reach a server.
    """

    def __init__(self, config: GenerateConfig, options: ChatOptions) -> None:
        if config.chat_template is not None:
            raise BadInput(
                f"--chat-template {config.chat_template} does not reach the server of --endpoint; "
                "start the server with it"
            )
        assert config.endpoint is not None
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
        pool = ThreadPoolExecutor(self._config.concurrency)
        try:
            for done in as_completed([pool.submit(self._finish, job) for job in jobs]):
                yield done.result()
        finally:
            # After an error or a signal, what has not begun never does.
            pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self, job: Job) -> Job:
        while job.finish_reason is None:
            messages = job.ask()
            prompt = self._options.system_prompt
            if prompt is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": prompt}, *messages]
            choice = self._endpoint.complete(messages, job.seed(self._config.seed))
            message = choice["message"]
            text = message.get("content") or ""
            job.take(
                Answer(
                    text=text,
                    finish_reason=choice.get("finish_reason") or "stop",
                    num_tokens=choice["completion_tokens"],
                    reasoning=message.get("reasoning_content") or "",
                )
            )
        return job
