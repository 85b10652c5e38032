"""Everything a run needs before its first step: options checked, stores open, drafter made.

Nothing is written here, so bad input leaves no trace.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_offline.common.cache import Cache
from dflash_offline.common.device_choice import dtype_name, resolve_dtype
from dflash_offline.common.errors import BadInput
from dflash_offline.common.options import config_as_dict
from dflash_offline.kernels.block_attention import table_sizes
from dflash_offline.train.checkpoint import FINAL, RunState, check_learned, checkpoints, load_state
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.distributed import World
from dflash_offline.train.draft_shape import (
    ShapeWishes,
    check_fits,
    check_kept,
    check_kernels,
    head_for,
    new_drafter_config,
    read_draft_config,
    with_wishes,
)
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.drafter_config import DrafterConfig
from dflash_offline.train.export import load_drafter, load_drafter_config
from dflash_offline.train.fp8 import use_fp8
from dflash_offline.train.loss_spec import parse_loss
from dflash_offline.train.mask_token import MaskToken, choose_mask_token
from dflash_offline.train.memory_model import memory_line
from dflash_offline.train.objective import Objective, objective_of
from dflash_offline.train.order import SampleOrder, StoreSamples
from dflash_offline.train.schedule import parse_every
from dflash_offline.train.sharding import ALL, Sharding
from dflash_offline.train.sources import (
    check_supervision,
    open_caches,
    training_samples,
    warn_of_short_documents,
    what_is_read,
)
from dflash_offline.train.stream import PassInput, StreamOptions
from dflash_offline.train.target_head import TargetHead, load_target_head
from dflash_offline.train.wandb_log import check_wandb
from dflash_offline.train.warm_up import blank_pass, warm_up_head, warm_up_step

_DEFAULT_EPOCHS = 6.0
# Options that change nothing of what a step learns from.
_FREE_OPTIONS = {
    "cache", "out", "resume", "partial", "damaged", "rows_per_pass", "num_epochs", "num_steps",
    "max_minutes", "device", "gpus", "shard", "log_every", "eval_every", "checkpoint_every",
    "keep_checkpoints", "wandb", "init_from", "draft_config", "mask_token_id", "storage_option",
    "read_cache", "read_cache_gb",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that is ready to start or to go on."""

    config: TrainConfig
    world: World
    device: torch.device
    dtype: torch.dtype
    caches: list[Cache]
    wanted: list[list[int]]  # training samples of each store, in plan order
    head: TargetHead  # on the device, in the compute dtype
    drafter: Drafter  # on the device, masters in fp32
    mask_token: MaskToken
    objective: Objective
    order: SampleOrder
    num_steps: int | None  # None: until the minutes are over
    total_samples: int | None  # those before `state` included
    state: RunState
    checkpoint: Path | None  # where `state` comes from
    memory: str = ""  # a line about what the run takes
    sharding: Sharding | None = None  # of the drafter's weights

    @property
    def stream_options(self) -> StreamOptions:
        """How the stream cuts samples for this run."""
        return StreamOptions(
            layout=self.drafter.config.layout,
            layers=self.drafter.config.target_layer_ids,
            num_anchors=self.config.num_anchors,
            rows_per_pass=self.config.rows_per_pass,
            seed=self.config.seed,
            supervise=self.config.supervise,
            skip_damaged=self.config.damaged == "skip",
            with_final=self.objective.needs_states,
            num_topk=self.objective.num_topk,
            # Half the bytes to copy to a GPU; on a CPU the copy converts at once.
            dtype=torch.bfloat16 if self.device.type == "cuda" else self.dtype,
            pinned=self.device.type == "cuda",
            table_sizes=self._table_sizes() if self.device.type == "cuda" else {},
        )

    def _table_sizes(self) -> dict[str, tuple[int, ...]]:
        shape = self.drafter.config
        queries = torch.empty(
            1, shape.num_attention_heads, shape.head_dim, dtype=self.dtype, device=self.device
        )
        return table_sizes(
            queries, num_kv_heads=shape.num_key_value_heads, block_size=shape.block_size
        )

    def warm_up(self) -> None:
        """Compile every kernel of the run's shapes before the first step."""
        if self.device.type != "cuda":
            return
        codecs = [cache.schema.codec for cache in self.caches]
        warm_up_step(self.drafter, self.head, self.objective, self.stream_options, codecs=codecs)
        warm_up_head(self.head, self.objective)

    @functools.cached_property
    def idle_pass(self) -> PassInput:
        """A pass that teaches nothing."""
        return blank_pass(
            self.stream_options,
            self.caches[0].schema.codec,
            hidden=self.drafter.config.hidden_size,
            exact=False,
            labelled=False,
        )

    def whole_drafter(self) -> Drafter:
        """Return the drafter as it is, to be run outside of steps; all processes take part."""
        return self.drafter if self.sharding is None else self.sharding.whole()

    def samples_of_steps(self) -> Iterator[int]:
        """Yield the number of samples of every step still to come; the last may be smaller."""
        size = self.config.samples_per_step
        if self.total_samples is None:
            yield from itertools.repeat(size)
            return
        for done in range(self.order.num_before(self.state.stream), self.total_samples, size):
            yield min(size, self.total_samples - done)


def prepare(config: TrainConfig, world: World) -> Setup:
    """Check the options against each other and the stores, and build the run's parts.

    Raises:
        BadInput: names the option, what was given, what is allowed and the remedy.
    """
    _check_options(config)
    device = _device(config, world)
    dtype = resolve_dtype(config.dtype, device)
    checkpoint, state = _start(config)
    caches = open_caches(config)
    wanted = training_samples(config, caches)
    check_supervision(config, caches, wanted)
    head = load_target_head(caches[0])
    shape, mask_token = _shape(config, caches, head, checkpoint)
    if device.type == "cuda":
        check_kernels(shape, dtype)
    objective = _objective(config, shape, caches[0])
    head = head_for(head, shape, has_teacher=objective.makes_target_logits)
    if world.is_first:
        warn_of_short_documents(caches, wanted, shape.layout)
    order = _order(config, caches, wanted)
    num_steps, total_samples = _length(config, order, state)
    learned = _learned(config, caches, wanted, shape) | {"dtype": dtype_name(dtype)}
    if checkpoint is not None:
        check_learned(state.learned, learned, config.out)
    memory = memory_line(
        config,
        shape,
        caches,
        wanted,
        objective=objective,
        head=head.to("meta", dtype),
        device=device,
        world_size=world.size,
    )
    drafter = _drafter(config, shape, checkpoint)
    sharding = _placed(drafter, config.shard, world, device=device, dtype=dtype)
    return Setup(
        config=config,
        world=world,
        device=device,
        dtype=dtype,
        caches=caches,
        wanted=wanted,
        head=use_fp8(
            config.fp8, head.to(device, dtype), drafter, objective, device=device, dtype=dtype
        ),
        drafter=drafter,
        mask_token=mask_token,
        objective=objective,
        order=order,
        num_steps=num_steps,
        total_samples=total_samples,
        state=state if checkpoint is not None else RunState(learned=learned),
        checkpoint=checkpoint,
        memory=memory,
        sharding=sharding,
    )


def _objective(config: TrainConfig, shape: DrafterConfig, cache: Cache) -> Objective:
    return objective_of(
        parse_loss(config.loss),
        labels=config.labels,
        block_size=shape.block_size,
        noise=config.noise,
        num_topk=cache.schema.num_topk,
    )


def _check_options(config: TrainConfig) -> None:
    if config.weight and len(config.weight) != len(config.cache):
        raise BadInput(
            f"--weight: {len(config.weight)} given for {len(config.cache)} --cache; give one for "
            "each, or none"
        )
    parse_loss(config.loss)
    parse_every(config.checkpoint_every)
    check_wandb(config.wandb)


def _device(config: TrainConfig, world: World) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise BadInput("--device cuda: there is no CUDA device; use --device cpu")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def _start(config: TrainConfig) -> tuple[Path | None, RunState]:
    """Return the checkpoint to go on from, and its state."""
    found = checkpoints(config.out)
    if not found:
        if (config.out / FINAL).exists():
            raise BadInput(f"--out {config.out} holds a drafter already; choose another folder")
        return None, RunState()
    state = load_state(found[-1])
    if state.is_finished and (config.out / FINAL).exists() and not config.resume:
        raise BadInput(
            f"--out {config.out} holds a finished run; choose another folder, or add --resume and "
            "a larger --num-steps to train on"
        )
    return found[-1], state


def _shape(
    config: TrainConfig, caches: list[Cache], head: TargetHead, checkpoint: Path | None
) -> tuple[DrafterConfig, MaskToken]:
    """Return the drafter's configuration and its mask token, with the reason for it."""
    wishes = ShapeWishes(
        file=read_draft_config(config.draft_config),
        draft_layers=config.draft_layers,
        block_size=config.block_size,
    )
    if checkpoint is not None:
        shape = load_drafter_config(checkpoint)
        check_kept(shape, wishes)
        if config.mask_token_id not in (None, shape.mask_token_id):
            raise BadInput(
                f"--mask-token-id {config.mask_token_id} given, but the run in {config.out} has "
                f"{shape.mask_token_id}; drop it, or choose another --out"
            )
        for cache in caches:
            check_fits(shape, cache, f"the run in {config.out}")
        return shape, MaskToken(id=shape.mask_token_id, reason="the run's own")
    initial = load_drafter_config(config.init_from) if config.init_from else None
    if initial is not None:
        for cache in caches:
            check_fits(initial, cache, f"--init-from {config.init_from}")
        _check_initial(config, initial, caches[0])
    mask_token = choose_mask_token(
        caches,
        head.embed,
        given=config.mask_token_id,
        in_file=(wishes.file.get("dflash_config") or {}).get("mask_token_id"),
        initial=initial.mask_token_id if initial else None,
    )
    if initial is not None:
        changed = initial.to_json()
        changed["dflash_config"]["mask_token_id"] = mask_token.id
        return with_wishes(DrafterConfig.from_json(changed), wishes), mask_token
    layers = _layers(config, caches[0])
    shape = new_drafter_config(caches[0], head, wishes, layers=layers, mask_token_id=mask_token.id)
    if config.layers is not None and shape.target_layer_ids != layers:
        raise BadInput(
            f"--layers {config.layers} does not go with --draft-config {config.draft_config}, "
            "which names target_layer_ids of its own; drop one of them"
        )
    for cache in caches:
        check_fits(shape, cache, "the drafter")
    return shape, mask_token


def _check_initial(config: TrainConfig, initial: DrafterConfig, cache: Cache) -> None:
    layers = config.layers and ",".join(map(str, _layers(config, cache)))
    for option, given, own in (
        ("--draft-layers", config.draft_layers, initial.num_hidden_layers),
        ("--draft-config", config.draft_config, None),
        ("--layers", layers, ",".join(map(str, initial.target_layer_ids))),
    ):
        if given is not None and given != own:
            raise BadInput(
                f"{option} {given} does not go with --init-from {config.init_from}, which brings "
                "its own shape; drop one of them"
            )


def _layers(config: TrainConfig, cache: Cache) -> tuple[int, ...]:
    if config.layers is None:
        return tuple(sorted(cache.schema.layers))
    try:
        layers = tuple(int(each) for each in config.layers.split(","))
    except ValueError:
        layers = ()
    if not layers or len(set(layers)) < len(layers) or set(layers) - set(cache.schema.layers):
        raise BadInput(
            f"--layers {config.layers} is no list of distinct layers that the store holds; choose "
            f"among {','.join(map(str, cache.schema.layers))}"
        )
    return tuple(sorted(layers))


def _drafter(config: TrainConfig, shape: DrafterConfig, checkpoint: Path | None) -> Drafter:
    if checkpoint is None and config.init_from is not None:
        loaded = load_drafter(config.init_from)
        drafter = Drafter(shape)
        drafter.load_state_dict(loaded.state_dict())
        return drafter
    return Drafter(shape).initialise(config.seed)


def _placed(
    drafter: Drafter, shard: str, world: World, *, device: torch.device, dtype: torch.dtype
) -> Sharding | None:
    """Put a drafter where training runs, whole or in slices."""
    if shard == ALL and world.size > 1:
        return Sharding(drafter, world=world, device=device, dtype=dtype)
    drafter.to(device)
    return None


def _order(config: TrainConfig, caches: list[Cache], wanted: list[list[int]]) -> SampleOrder:
    weights = config.weight or (1.0,) * len(caches)
    stores = [
        StoreSamples(indices=indices, packs=cache.plan.column("pack")[indices], weight=weight)
        for cache, indices, weight in zip(caches, wanted, weights, strict=True)
    ]
    return SampleOrder(stores, config.seed)


def _length(
    config: TrainConfig, order: SampleOrder, state: RunState
) -> tuple[int | None, int | None]:
    """Return the run's steps and samples; None where only minutes bound it."""
    size = config.samples_per_step
    # A run that goes on after its last epoch may have had a short step.
    done = order.num_before(state.stream)
    if config.num_steps is not None:
        return config.num_steps, done + (config.num_steps - state.step) * size
    if config.num_epochs is None and config.max_minutes is not None:
        return None, None
    epochs = config.num_epochs if config.num_epochs is not None else _DEFAULT_EPOCHS
    whole = math.floor(epochs)
    samples = sum(order.epoch_length(epoch) for epoch in range(whole))
    # 3.2 - 3 is a little more than 0.2.
    samples += math.ceil(round((epochs - whole) * order.epoch_length(whole), 6))
    if samples == 0:
        raise BadInput(f"--num-epochs {epochs} is less than one sample; raise it")
    return state.step + math.ceil((samples - done) / size), samples


def _learned(
    config: TrainConfig, caches: list[Cache], wanted: list[list[int]], shape: DrafterConfig
) -> dict[str, Any]:
    """Return what must agree for a run to go on as if it had not stopped."""
    options = config_as_dict(config)
    learned = {name: value for name, value in options.items() if name not in _FREE_OPTIONS}
    learned["cache"] = what_is_read(caches, wanted)
    learned["block_size"] = config.block_size or shape.block_size
    learned["draft_layers"] = config.draft_layers or shape.num_hidden_layers
    return learned
