"""Runs kernels of Triton's lower language on the CPU, as plain Python on torch tensors.

Groups of warps are threads of which one runs at a time; which one is drawn anew at every operation
on a barrier or the tensor cores. Copies into shared memory ruin what they overwrite at once, and
arrive at a time that is drawn too. So what is checked, in float64 and in many orders of events, is
arithmetic, masks, indices, and that nothing is read too early, overwritten too early or waited for
in vain. What only a GPU shows: layouts, registers, speed.
"""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


class Pointer:
    """A pointer into a tensor, as kernels add to it."""

    def __init__(self, values: Tensor, at=0):
        self.values, self.at = values.view(-1), at
        self.dtype = SimpleNamespace(element_ty=values.dtype)

    def __add__(self, offset):
        return Pointer(self.values, self.at + offset)

    def __sub__(self, offset):
        return Pointer(self.values, self.at - offset)


def _load(pointer: Pointer, mask=None, other=None) -> Tensor:
    if mask is None:
        return pointer.values[pointer.at].clone()
    x = torch.full(pointer.at.shape, other, dtype=pointer.values.dtype)
    x[mask] = pointer.values[pointer.at[mask]]
    return x


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    pointer.values[pointer.at[mask]] = value[mask]


class Descriptor:
    """Boxes of a tensor: 2-D [tokens, heads * D], or 3-D as it is; zeros where it has ended."""

    def __init__(self, x: Tensor, box: list[int]):
        self.x = x.flatten(1) if len(box) == 2 else x
        self.block_shape, self.dtype, self.layout = box, x.dtype, None
        count = torch.Size(box).numel()
        self.block_type = SimpleNamespace(nbytes=count * x.element_size())

    def read(self, at) -> Tensor:
        box = torch.zeros(self.block_shape, dtype=self.dtype)
        spans = [
            slice(int(a), min(int(a) + n, size))
            for a, n, size in zip(at, self.block_shape, self.x.shape, strict=True)
        ]
        part = self.x[tuple(spans)]
        box[tuple(slice(0, n) for n in part.shape)] = part
        return box


class Shared:
    """Shared memory; NaN, or the least integer, until written."""

    def __init__(self, data: Tensor):
        self.data, self.dtype, self.layout = data, data.dtype, None

    def index(self, i) -> Shared:
        return Shared(self.data[int(i)])

    def reshape(self, shape) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype, shape, _layout) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view(-1)[: torch.Size(shape).numel()].view(list(shape)))

    def load(self, _layout) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


@dataclass
class Barrier:
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        self.turn()

    def turn(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase += 1


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, bars: list[Barrier]):
        self.bars = bars

    def index(self, i) -> Barriers:
        return Barriers([self.bars[int(i)]])

    @property
    def bar(self) -> Barrier:
        (bar,) = self.bars
        return bar


@dataclass(eq=False)
class Product:
    """A product under way: its value, and its operands in shared memory as they were."""

    value: Tensor
    operands: list[tuple[Shared, Tensor]]

    def finish(self) -> None:
        for operand, before in self.operands:
            assert torch.equal(operand.data, before), "an operand was overwritten under a product"


@dataclass
class Machine:
    """One program at a time: its groups of warps, its copies under way, who runs."""

    seed: int
    program: tuple[int, ...] = (0,)
    programs: tuple[int, ...] = (1,)
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        # Slow copies for odd seeds, so that whoever does not wait for them comes first.
        self.landing = 0.02 if self.seed % 2 else 0.3
        self.turn = threading.Condition()
        self.running, self.blocked, self.copies, self.error = None, {}, [], None
        self.local = threading.local()

    # Who runs.

    def specialize(self, parts, _warps, _registers) -> None:
        threads = [
            threading.Thread(target=self._run, args=(i, function, arguments), daemon=True)
            for i, (function, arguments) in enumerate(parts)
        ]
        self.blocked = dict.fromkeys(range(len(parts)))
        self.running = None
        for thread in threads:
            thread.start()
        with self.turn:
            self._next()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        assert not self.copies, "a copy that nobody waited for"

    def _run(self, index, function, arguments) -> None:
        self.local.index, self.local.products = index, []
        try:
            self._wait_for_turn()
            function(*arguments)
            assert not self.local.products, "a product that nobody waited for"
        except BaseException as error:  # For the test's own thread.
            self.error = self.error or error
        with self.turn:
            del self.blocked[index]
            self._next()

    def _wait_for_turn(self) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.error or self.running == self.local.index)
        if self.error:
            raise RuntimeError("another part failed")

    def _next(self) -> None:
        """Draw who runs now; a copy may arrive first."""
        while self.blocked and not self.error:
            ready = [i for i, free in self.blocked.items() if free is None or free()]
            if self.copies and (not ready or self.random.random() < self.landing):
                self.copies.pop(self.random.randrange(len(self.copies)))()
            elif ready:
                self.running = self.random.choice(ready)
                break
            else:
                self.error = AssertionError(f"all of {sorted(self.blocked)} wait in vain")
        self.turn.notify_all()

    def step(self, free=None) -> None:
        """Let others run, until `free()`."""
        with self.turn:
            self.blocked[self.local.index] = free
            self._next()
        self._wait_for_turn()
        self.blocked[self.local.index] = None

    # Barriers, copies, products.

    def init(self, bars: Barriers, *, count: int) -> None:
        bars.bar.count = bars.bar.pending = count

    def wait(self, bars: Barriers, parity) -> None:
        bar, parity = bars.bar, int(parity)
        self.step(lambda: bar.phase & 1 != parity)

    def arrive(self, bars: Barriers, *, count: int = 1) -> None:
        bars.bar.arrive(count)
        self.step()

    def expect(self, bars: Barriers, count: int) -> None:
        bars.bar.bytes += count
        bars.bar.arrive(1)
        self.step()

    def copy(self, source: Descriptor, at, bars: Barriers, target: Shared) -> None:
        at, bar = [int(x) for x in at], bars.bar
        assert list(target.data.shape) == list(source.block_shape)
        target.data.fill_(float("nan"))

        def land():
            target.data.copy_(source.read(at))
            bar.bytes -= source.block_type.nbytes
            bar.turn()

        self.copies.append(land)
        self.step()

    def multiply(self, a, b: Shared, acc, *, use_acc=True, is_async=False):
        self.step()
        operands = [(x, x.data.clone()) for x in (a, b) if isinstance(x, Shared)]
        if isinstance(acc, Product):
            acc = acc.value
        left = a.data if isinstance(a, Shared) else a
        value = left.to(acc.dtype) @ b.data.to(acc.dtype)
        assert value.shape == acc.shape
        product = Product(acc + value if use_acc else value, operands)
        self.local.products.append(product)
        return product if is_async else self.wait_products(0, deps=[product])

    def wait_products(self, outstanding: int, *, deps):
        self.step()
        products = self.local.products
        done = products[: len(products) - outstanding]
        del products[: len(done)]
        for product in done:
            product.finish()
        assert not any(p in products for p in deps), "used before it was waited for"
        values = tuple(p.value for p in deps)
        return values if len(values) > 1 else values[0]

    # The language.

    def allocate(self, dtype, shape, _layout):
        if dtype is BARRIER_WORD:
            return Barriers([Barrier() for _ in range(shape[0])])
        nothing = float("nan") if dtype.is_floating_point else -(2**31)
        return Shared(torch.full(shape, nothing, dtype=dtype))

    def language(self) -> SimpleNamespace:
        return SimpleNamespace(
            constexpr=int,
            float32=torch.float64,
            int32=torch.int32,
            int64=BARRIER_WORD,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: self.programs[axis],
            static_range=range,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            load=_load,
            store=_store,
            arange=lambda a, b, layout: torch.arange(a, b),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            where=torch.where,
            sum=lambda x, axis: x.sum(axis),
            max=lambda x, axis: x.amax(axis),
            exp2=torch.exp2,
            log2=torch.log2,
            convert_layout=lambda x, _layout: x,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
            **{name: lambda *a, **k: None for name in LAYOUTS},
        )

    def instructions(self) -> SimpleNamespace:
        return SimpleNamespace(
            mbarrier=SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=self.init,
                wait=self.wait,
                arrive=self.arrive,
                expect=self.expect,
            ),
            tma=SimpleNamespace(async_copy_global_to_shared=self.copy),
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.wait_products,
            fence_async_shared=lambda: None,
        )


BARRIER_WORD = torch.int64
LAYOUTS = (
    "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "DotOperandLayout",
    "BlockedLayout", "SliceLayout",
)  # fmt: skip


def patch(monkeypatch, machine: Machine, *modules: ModuleType) -> None:
    """Make plain functions of the kernels of `modules`, which run on `machine`."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if type(value).__name__ == "GluonJITFunction":
                monkeypatch.setattr(module, name, value.fn)
        monkeypatch.setattr(module, "gl", machine.language())
        monkeypatch.setattr(module, "hopper", machine.instructions())
        monkeypatch.setattr(module, "PART", 64)


def launch(machine: Machine, kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run every program of a grid, one after the other."""
    machine.programs = grid
    for machine.program in itertools.product(*map(range, grid)):
        kernel(*arguments, **constants)
