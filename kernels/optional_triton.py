"""Triton where it is installed, a stand-in where it is not, and the choice of implementation.

Kernel modules import `triton` and `tl` from here, so that they can be imported (and run their plain
PyTorch paths) on a machine without Triton.
"""

import torch


class _StandIn:
    """Lets `@triton.jit` and `tl.constexpr` stand in modules that launch no kernel."""

    @staticmethod
    def constexpr(value=None):
        return value

    @staticmethod
    def jit(fn=None, **_options):
        return fn if fn is not None else lambda kernel: kernel


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    # The lower language is experimental: its names are those of this version.
    HAS_GLUON = triton.__version__.startswith("3.6.")
except ImportError:
    HAS_TRITON = HAS_GLUON = False
    triton = tl = _StandIn()
    TensorDescriptor = None

if HAS_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
else:
    gluon = gl = hopper = _StandIn()
    GluonDescriptor = None


def is_interpreted() -> bool:
    """Say whether Triton kernels run in its interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def use_triton(tensor: torch.Tensor, implementation: str | None) -> bool:
    """Say whether an op on `tensor` runs as Triton kernels.

    `implementation` is "triton", "reference" or None, which means Triton for CUDA tensors.

    Raises:
        ValueError: an unknown name, or Triton asked for where it cannot run.
    """
    if implementation is None:
        if tensor.is_cuda and not HAS_TRITON:
            raise ValueError(
                "implementation is unset and the tensors are on a GPU, but triton is missing; "
                "install triton or pass implementation='reference'"
            )
        return tensor.is_cuda
    if implementation == "reference":
        return False
    if implementation != "triton":
        raise ValueError(
            f"implementation is {implementation!r}; allowed are 'triton', 'reference' and None"
        )
    if not HAS_TRITON or not (tensor.is_cuda or is_interpreted()):
        raise ValueError(
            "implementation is 'triton', which needs the triton package and CUDA tensors "
            "(or TRITON_INTERPRET=1); pass implementation='reference'"
        )
    return True
