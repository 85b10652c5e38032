"""Answers from any server with OpenAI's chat completions: vLLM, SGLang, llama.cpp and others."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.prompts import is_unicode

_TIMEOUT_S = 600.0
_RETRY_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A chat server.

    Attributes:
        url: up to and including `/v1`.
        model: name that the server knows the target by.
        api_key: sent as bearer token when given.
        parameters: sent with every request, next to model, messages and seed.
        num_retries: attempts after the first, with pauses that double.
        pause_s: the first pause.
    """

    url: str
    model: str
    api_key: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    num_retries: int = 5
    pause_s: float = 1.0

    def complete(self, messages: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
        """Return the first choice of a chat completion, with its `completion_tokens`.

        Raises:
            BadInput: the server refuses the request.
            Stopped: the server cannot be reached, or keeps failing.
        """
        body = {"model": self.model, "messages": list(messages), "seed": seed, **self.parameters}
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
        )
        for attempt in range(self.num_retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                    return _first_choice(response.read())
            except urllib.error.HTTPError as problem:
                reason = f"{problem.code} {problem.read(500).decode(errors='replace')}"
                if problem.code not in _RETRY_STATUS:
                    raise BadInput(
                        f"--endpoint {self.url} refuses the request: {reason}; check --target "
                        "(the model's name at the server) and the options"
                    ) from problem
            except (OSError, http.client.HTTPException, ValueError) as problem:
                reason = str(problem)
            if attempt < self.num_retries:
                time.sleep(self.pause_s * 2**attempt)
        raise Stopped(
            f"--endpoint {self.url} fails after {self.num_retries + 1} attempts ({reason}); "
            "finished rows are safe, run the same command to go on"
        )


def check_url(url: str) -> None:
    """Refuse what is no address of a web server."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise BadInput(
            f"--endpoint {url} is no address of a server; give one as http://localhost:8000/v1"
        )


def _first_choice(content: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        message = choice["message"]
        # vLLM has both names in its history.
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        texts = [message.get("content") or "", reasoning]
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        start = content[:200].decode(errors="replace")
        raise ValueError(f"the reply is no chat completion but {start!r}") from problem
    if not all(isinstance(text, str) and is_unicode(text) for text in texts):
        raise ValueError("the answer's content is no text")
    message = {"content": texts[0], "reasoning_content": texts[1]}
    return {**choice, "message": message, "completion_tokens": tokens}
