"""One target over the devices of several processes: the first leads, the others do as it does.

transformers shards the layers' weights, so each process of a group must take part in each forward.
The leader is a worker like any other. Before its target runs it sends the token ids, and the
others run the same forward and drop the result.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from dflash_offline.common.device_memory import first_line, has_run_out
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.target import Target
from dflash_offline.common.unplanned_attention import unplanned_attention
from dflash_offline.extract.place import Place
from dflash_offline.extract.stop_request import StopRequest

_BASE, _CAUSAL, _END = range(3)
# A leader may wait for a disk; a process that is gone is noticed by other means.
_PATIENCE = timedelta(days=30)
_LOSS_S = 10.0


def check_tensor_parallel(size: int, target: str, config: PreTrainedConfig) -> None:
    """Refuse a `--tp` that the target or the installation cannot have.

    Raises:
        BadInput: a GGUF file, heads that cannot be dealt out evenly, or accelerate is missing.
    """
    if size == 1:
        return
    if target.endswith(".gguf"):
        raise BadInput(f"--tp {size} needs a Hugging Face checkpoint; --target {target} is GGUF")
    heads = (config.num_attention_heads, config.num_key_value_heads)
    if any(count % size for count in heads):
        allowed = [n for n in range(1, heads[1] + 1) if not any(count % n for count in heads)]
        raise BadInput(
            f"--tp {size} does not divide the target's {heads[0]} attention and {heads[1]} "
            f"key-value heads; allowed are {', '.join(map(str, allowed))}"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise BadInput(
            f"--tp {size} needs accelerate, which transformers places shards with; "
            "pip install -e '.[tp]' in the clone"
        )


def too_large(batch: int, tokens: int, device: torch.device, problem: RuntimeError) -> Stopped:
    """Return why a run ends where a single GPU would split the batch: all must do the same."""
    return Stopped(
        f"the memory of {device} does not hold its part of a forward of {batch} x {tokens} tokens "
        f"({first_line(problem)}), and workers that share a target split no batch; what "
        "is committed is safe, go on where more memory is free"
    )


class TensorGroup:
    """The processes that share one target; `size` 1 is a process by itself.

    Args:
        place: this process among all of the run; neighbours form groups.
        size: processes of a group.
        stop: knows of workers that are gone.
        store: where all of them meet, a torch.distributed store.
        device: of this process.
    """

    def __init__(
        self,
        place: Place,
        size: int,
        stop: StopRequest,
        *,
        store: dist.Store | None,
        device: torch.device,
    ) -> None:
        self.size = size
        self._stop = stop
        self.is_leader = place.rank % size == 0
        self._device = device
        self._is_in_causal = False
        if size > 1:
            number = place.rank // size
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore(f"target/{number}", store),
                rank=place.rank % size,
                world_size=size,
                timeout=_PATIENCE,
            )

    @contextmanager
    def leading(self, target: Target) -> Iterator[None]:
        """Let the others take part in every forward of the target, until the end of the block."""
        if self.size == 1:
            yield
            return
        handles = [
            target.base.register_forward_pre_hook(self._before_base, with_kwargs=True),
            target.causal.register_forward_pre_hook(self._before_causal, with_kwargs=True),
            target.causal.register_forward_hook(self._after_causal, always_call=True),
        ]
        try:
            with self._explained():
                yield
        finally:
            for handle in handles:
                handle.remove()
            with suppress(RuntimeError):  # of others that are gone
                dist.broadcast(torch.tensor([_END, 0, 0, 0]), 0)

    def follow(self, target: Target) -> None:
        """Take part in the leader's forwards until it ends.

        Raises:
            Stopped: the memory of this process' device does not hold a forward.
        """
        with self._explained():
            self._follow(target)

    @torch.inference_mode()
    def _follow(self, target: Target) -> None:
        call = torch.empty(4, dtype=torch.int64)
        while True:
            dist.broadcast(call, 0)
            kind, batch, tokens, is_planned = call.tolist()
            if kind == _END:
                return
            ids = torch.empty(batch, tokens, dtype=torch.int64, device=self._device)
            dist.broadcast(ids, 0)
            module = target.base if kind == _BASE else target.causal
            try:
                with nullcontext() if is_planned else unplanned_attention():
                    module(input_ids=ids, use_cache=False)
            except RuntimeError as problem:
                if not has_run_out(problem):
                    raise
                raise too_large(batch, tokens, self._device, problem) from problem

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Let a collective that breaks end the run as the loss of whoever broke it."""
        try:
            yield
        except RuntimeError:
            # Who that is becomes known in this time, and raises here.
            self._stop.wait(_LOSS_S)
            raise

    def _send(self, kind: int, ids: torch.Tensor) -> None:
        is_planned = torch.backends.cuda.cudnn_sdp_enabled()
        dist.broadcast(torch.tensor([kind, *ids.shape, is_planned]), 0)
        dist.broadcast(ids.contiguous(), 0)

    def _before_base(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        # The causal model calls it in turn; its own call has been sent.
        if not self._is_in_causal:
            self._send(_BASE, kwargs["input_ids"])

    def _before_causal(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._send(_CAUSAL, kwargs["input_ids"])
        self._is_in_causal = True

    def _after_causal(self, *_given: Any) -> None:
        self._is_in_causal = False
