"""The parts of a causal language model, by the names that transformers' classes give them."""

from torch import nn
from transformers import PreTrainedModel

from dflash_offline.common.errors import BadInput

# The last is LFM2's, where it comes after the layers in spite of its name.
_NORM_NAMES = (
    "norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm",
)  # fmt: skip
_LAYERS_NAMES = ("layers", "h", "blocks")


def decoder_of(causal: PreTrainedModel) -> nn.Module:
    """Return the model without its head."""
    base = causal.get_decoder()
    # Llama 4's text model takes itself for its decoder.
    return causal.get_submodule("model") if base is causal else base


def decoder_layers(causal: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of decoder layers, `None` where there is none of a known name."""
    children = dict(decoder_of(causal).named_children())
    count = causal.config.get_text_config(decoder=True).num_hidden_layers
    for name in _LAYERS_NAMES:
        layers = children.get(name)
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            return layers
    return None


def parts_of(
    causal: PreTrainedModel, given: str
) -> tuple[nn.Module, nn.ModuleList, nn.Module, nn.Module]:
    """Return decoder, its layers, its final norm, and the head; weights may be on the meta device.

    Args:
        given: what the user gave as the target.

    Raises:
        BadInput: it has not all of them, so it cannot serve as a target.
    """
    config = causal.config.get_text_config(decoder=True)
    base, lm_head = decoder_of(causal), causal.get_output_embeddings()
    if lm_head is None or lm_head.weight.shape[1] != config.hidden_size:
        raise BadInput(
            f"--target {given} is a {type(causal).__name__}, whose head is not one "
            "matrix over the final state; use a causal language model"
        )
    if lm_head.bias is not None:
        raise BadInput(
            f"--target {given} has a bias on its lm_head, which drafters cannot share; "
            "use a target without"
        )
    if (layers := decoder_layers(causal)) is None:
        raise BadInput(
            f"--target {given} is a {type(base).__name__} without a list of "
            f"{config.num_hidden_layers} decoder layers called {', '.join(_LAYERS_NAMES)}; use a "
            "decoder-only target"
        )
    return base, layers, _final_norm(base, given), lm_head


def _final_norm(base: nn.Module, given: str) -> nn.Module:
    children = dict(base.named_children())
    for name in _NORM_NAMES:
        if isinstance(getattr(children.get(name), "weight", None), nn.Parameter):
            return children[name]
    raise BadInput(
        f"--target {given} is a {type(base).__name__} without a final norm called "
        f"{', '.join(_NORM_NAMES)} that has a weight; use another decoder-only target"
    )
