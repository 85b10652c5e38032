"""Marks of the kernel tests; tests/conftest.py turns Triton's interpreter on without a device."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that runs kernels of Triton's lower language on the CPU."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("gluon_on_cpu")


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
