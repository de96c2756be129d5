"""Fake CUDA tensors on a machine, and in a build of torch, without CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# FakeTensorMode needs a device guard for "cuda" before such a tensor can be indexed; builds without CUDA have none
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


@cache
def fake_cuda() -> FakeTensorMode:
    """The mode under which tensors on "cuda" have shapes but no numbers: reading one raises, mixing devices too.

    One for the whole process, because tensors that are kept (lru_cache) must not meet another mode. Skips the test
    where fake CUDA takes a C++ compiler and there is none.
    """
    if not torch.backends.cuda.is_built():
        _register_guard()
    return FakeTensorMode()


def _register_guard() -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("this build of torch has no CUDA, and there is no C++ compiler to give it a device guard")
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(source)]
        subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library))
