"""The frozen target model: where its checkpoint lies, how it is loaded, and what its parts are.

Transformers' classes disagree about nesting (text part of a multimodal model) and scales of
embeddings, of which this is the one module that knows; names of modules are in target_parts.py,
scales of logits in logit_scales.py.
Letters: T tokens, K captured layers, H hidden, V vocabulary, N decoder layers.
"""

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dflash_offline.common.checkpoint_files import Checkpoint, find_checkpoint, sampled_digest
from dflash_offline.common.device_memory import has_run_out
from dflash_offline.common.errors import BadInput, Stopped
from dflash_offline.common.gguf_header import gguf_header_parsed_once
from dflash_offline.common.logit_scales import logit_scale, logit_softcap
from dflash_offline.common.target_parts import decoder_of, parts_of
from dflash_offline.common.weights import gathered, load_causal, load_without_layers, own_part

_AUTO_MODEL = "AutoModelForCausalLM"
_ALLOWED = "give a GGUF file, a Hugging Face folder or a hub id of a causal language model"


def load_config(
    target: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return the text part of a checkpoint's configuration; reads no weights.

    Raises:
        BadInput: no checkpoint there, or one that transformers does not know.
    """
    checkpoint = find_checkpoint(target, revision, trust_remote_code=trust_remote_code)
    config = _full_config(checkpoint)
    own_code = _config_value(config, "auto_map") or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and _AUTO_MODEL not in own_code:
        raise BadInput(
            f"--target {checkpoint.given} is of the model type {config.model_type}, of which "
            f"transformers makes no causal language model; {_ALLOWED}"
        )
    return config.get_text_config(decoder=True)


def load_tokenizer(
    target: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer (from the GGUF file itself where the target is one).

    Raises:
        BadInput: no checkpoint there, one without a tokenizer, or a tokenizer that cannot give
            character offsets.
    """
    checkpoint = find_checkpoint(target, revision, trust_remote_code=trust_remote_code)
    with _refusing(checkpoint, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.where, **checkpoint.load_arguments())
    if not tokenizer.is_fast:
        raise BadInput(
            f"--target {target} has a {type(tokenizer).__name__}, which gives no character "
            "offsets; use a checkpoint with a tokenizer.json"
        )
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded target; `base` makes states, and only `own_logits` ever makes logits.

    Attributes:
        base: decoder without head; called with `input_ids` it returns `last_hidden_state`
            [batch, T, H], the final state (post final norm).
        causal: the model with its head. When loaded with `head=False`, an untied head waits in
            host memory, so that no call of `base` can reach it.
        config: text configuration.
        layers: the N decoder layers.
        logit_softcap: `c` of `c * tanh(logits / c)`, or None.
        logit_scale: factor on `head(final)`, before the soft-cap.
        embedding_scale: factor on embedding rows before the first layer.
        shared_by: processes that hold parts of it (tensor parallelism).
        whole: embedding and head [V, H] of a target that several processes share, as `head` says.
    """

    checkpoint: Checkpoint
    base: nn.Module
    causal: PreTrainedModel
    config: PreTrainedConfig
    layers: nn.ModuleList
    embed_tokens: nn.Embedding
    final_norm: nn.Module
    generation_config: GenerationConfig
    device: torch.device
    dtype: torch.dtype
    logit_softcap: float | None
    logit_scale: float
    embedding_scale: float
    tied: bool
    shared_by: int = 1
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _memo: dict[str, str] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, N."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of a state, H."""
        return self.embed_tokens.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, V; may exceed the tokenizer's vocabulary."""
        return self.embed_tokens.weight.shape[0]

    @property
    def lm_head(self) -> nn.Module:
        """The module whose weight multiplies the final state."""
        return self.causal.get_output_embeddings()

    def head_weight(self) -> torch.Tensor:
        """Return the head's weight [V, H]; the embedding itself when they are tied."""
        if self.tied:
            return self.embed_weight()
        return self.whole.get("head", self.lm_head.weight)

    def embed_weight(self) -> torch.Tensor:
        """Return the embedding table [V, H], without `embedding_scale`."""
        return self.whole.get("embed", self.embed_tokens.weight)

    def head_logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, V] in fp32 of final states [rows, H], scale and soft-cap applied."""
        weight = self.head_weight().to(final.device)
        logits = (final.to(weight.dtype) @ weight.T).float() * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

    @torch.inference_mode()
    def own_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the model's own logits [batch, T, V] for `input_ids` [batch, T].

        An untied head that waits in host memory comes to the device for this call.
        """
        if self.shared_by > 1:  # the head's parts are where they belong
            return self.causal(input_ids=input_ids.to(self.device), use_cache=False).logits
        head = self.lm_head
        waits_at = next(head.parameters()).device
        head.to(self.device)
        try:
            return self.causal(input_ids=input_ids.to(self.device), use_cache=False).logits
        finally:
            head.to(waits_at)

    def cache_argument(self) -> str:
        """Return the name of the argument of `base` and `causal` that takes a cache."""
        # transformers 5.24 renamed `past_key_values` to `cache`; both are in use.
        is_new = "cache" in inspect.signature(self.causal.forward).parameters
        return "cache" if is_new else "past_key_values"

    def weight_digest(self) -> str:
        """Return a digest of names, shapes, sizes and a fixed sample of bytes of the weights."""
        if "digest" not in self._memo:
            self._memo["digest"] = sampled_digest(self.checkpoint)
        return self._memo["digest"]


def load_target(
    target: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    revision: str | None = None,
    head: bool,
    trust_remote_code: bool = False,
    attention: str | None = None,
    tensor_parallel: int = 1,
    layers: bool = True,
) -> Target:
    """Load a target in evaluation mode, without gradients.

    Args:
        target: GGUF file, Hugging Face folder or hub id.
        dtype: of weights and states.
        device: where the decoder goes.
        revision: branch, tag or commit of a hub id.
        head: whether the head is on the device too (generation, evaluation). Without, only `base`
            is, and an untied head stays in host memory.
        trust_remote_code: whether code shipped with the checkpoint may run.
        attention: transformers' `attn_implementation`; its own choice when None.
        tensor_parallel: processes that share the target, all those of torch.distributed's default
            group; each of them loads its part, then all take part in every forward.
        layers: whether the decoder layers' weights are read. Without, on the CPU, the target has
            embedding, head and final norm to be saved, but no forward.

    Raises:
        BadInput: no checkpoint there, or one that cannot serve as a target.
    """
    checkpoint = find_checkpoint(target, revision, trust_remote_code=trust_remote_code)
    extra: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if tensor_parallel > 1:
        from transformers.distributed import DistributedConfig

        extra["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel)
    load = load_causal if layers else load_without_layers
    config = _full_config(checkpoint)
    with _refusing(checkpoint, "weights", remedy=_remedy(config)):
        causal = load(checkpoint, config, dtype=dtype, **extra)
    causal.eval().requires_grad_(False)
    _drop_other_modalities(causal)
    if dtype == torch.float32:
        keep_fp32_products()
    return _describe(
        checkpoint,
        causal,
        device=torch.device(device),
        dtype=dtype,
        head=head,
        shared_by=tensor_parallel,
    )


def keep_fp32_products() -> None:
    """Keep the kernels of linear attention from rounding fp32 products to ten bits of mantissa.

    Triton does so where a kernel says nothing else (`tl.dot`), unlike PyTorch: a block of tokens
    would not give the states that its tokens give one by one. Products of three TF32 parts are off
    by about 2^-22. It counts for the whole process; a choice of the user's is left.
    """
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")


def _describe(
    checkpoint: Checkpoint,
    causal: PreTrainedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head: bool,
    shared_by: int,
) -> Target:
    config = causal.config.get_text_config(decoder=True)
    said = config.to_dict()
    base, layers, norm, lm_head = parts_of(causal, checkpoint.given)
    embed_tokens = base.get_input_embeddings()
    tied = own_part(lm_head.weight).data_ptr() == own_part(embed_tokens.weight).data_ptr()
    whole: Mapping[str, torch.Tensor] = {}
    if shared_by > 1:  # its parts are on their devices already, the head's among them
        parts = {"embed": embed_tokens.weight} | ({} if tied else {"head": lm_head.weight})
        whole = gathered(parts, device if head else torch.device("cpu"))
    else:
        if device.type != "cpu":  # where layers may be that have no weights
            base.to(device)
        if head or tied:
            lm_head.to(device)
    return Target(
        checkpoint=checkpoint,
        base=base,
        causal=causal,
        config=config,
        layers=layers,
        embed_tokens=embed_tokens,
        final_norm=norm,
        generation_config=causal.generation_config or GenerationConfig.from_model_config(config),
        device=device,
        dtype=dtype,
        logit_softcap=logit_softcap(said),
        logit_scale=logit_scale(said),
        embedding_scale=_embedding_scale(embed_tokens, config),
        tied=tied,
        shared_by=shared_by,
        whole=whole,
    )


# Several checks want it; transformers copies what it is given.
@functools.lru_cache(maxsize=4)
def _full_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    with _refusing(checkpoint, "config"):
        return AutoConfig.from_pretrained(checkpoint.where, **checkpoint.load_arguments())


@contextmanager
def _refusing(checkpoint: Checkpoint, part: str, *, remedy: str = _ALLOWED) -> Iterator[None]:
    try:
        with gguf_header_parsed_once():
            yield
    # Of shapes that are not the configuration's, and of a file that is not whole.
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as problem:
        if isinstance(problem, RuntimeError) and (
            isinstance(problem, Stopped) or has_run_out(problem)
        ):
            raise
        reason = str(problem).strip().split("\n")[0]
        if "trust_remote_code" in str(problem):
            remedy = "add --trust-remote-code to let it run"
        raise BadInput(
            f"--target {checkpoint.given}: its {part} cannot be loaded ({reason}); {remedy}"
        ) from problem


def _remedy(config: PreTrainedConfig) -> str:
    """Return what helps where a target's weights cannot be loaded."""
    quantised = _config_value(config, "quantization_config")
    if quantised is None:
        return f"download it again where a file is not whole, or {_ALLOWED}"
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return (
        f"it is quantised ({method or 'by an unnamed method'}), so install what transformers wants "
        "for that, or give the checkpoint that it was made from"
    )


def _drop_other_modalities(causal: PreTrainedModel) -> None:
    """Free the towers of a multimodal checkpoint; its text part never reads them."""
    names = {id(module): name for name, module in causal.named_modules()}
    roots = [names[id(m)] for m in (decoder_of(causal), causal.get_output_embeddings())]
    for name, module in causal.named_modules():
        around = any(f"{root}.".startswith(f"{name}.") or name == "" for root in roots)
        inside = any(f"{name}.".startswith(f"{root}.") for root in roots)
        if not (around or inside):
            module.to("meta")


def _config_value(config: PreTrainedConfig, name: str) -> Any:
    """Return a key that only some families have, or None."""
    return getattr(config, name, None)


def _embedding_scale(embed_tokens: nn.Embedding, config: PreTrainedConfig) -> float:
    # Gemma's embedding module scales by itself, in the weight's precision; Granite's and
    # Falcon-H1's models scale what it returns.
    own = getattr(embed_tokens, "embed_scale", None)
    if own is not None:
        return float(torch.as_tensor(own).to(embed_tokens.weight.dtype))
    return float(_config_value(config, "embedding_multiplier") or 1.0)
