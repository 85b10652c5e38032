"""Kernels run on the device where there is one, else in Triton's interpreter."""

import os

import pytest
import torch

# Triton reads it when a kernel is defined, so it must stand before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    no_device = pytest.mark.skip(reason="needs a CUDA device; run on a machine with a GPU")
    # The interpreter reads scalars from one-element arrays, which numpy will stop allowing.
    scalars = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
    for item in items:
        if item.path.parent.name != "kernels":
            continue
        item.add_marker(scalars)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_device)
