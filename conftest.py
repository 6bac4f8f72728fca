"""Deterministic tests on one thread; hypothesis without deadlines, so that a loaded machine cannot fail a law."""

import os

import pytest
import torch
from hypothesis import settings

# Virtual machines may announce AMX and not have it: bfloat16 products of torch's then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

settings.register_profile("laws", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("laws")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
