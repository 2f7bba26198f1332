"""The copy kernels compiled as C++, and an engine that copies with them on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep_kv.offload import CpuCopyEngine, HostPool, RowFormat
from lockstep_kv.offload.kernel_path import SLICE_BYTES, kernel_arguments, member_records, slices_per_page
from lockstep_kv.offload.transfers import Direction, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

_HERE = Path(__file__).parent
KERNEL_FILE = _HERE.parents[1] / "kernels" / "copy_pages.cu"


COMPILER = shutil.which("g++") or shutil.which("clang++")


def compile_kernels(folder: Path) -> ctypes.CDLL:
    """Compile the kernels into a library in this folder, with accesses checked for alignment."""
    # Linked without the sanitizer's library: the shim counts in its place.
    options = ["-fno-strict-aliasing", "-fsanitize=alignment", f'-DKERNEL_FILE="{KERNEL_FILE}"']
    kernels = compile_library(folder, "kernel_shim.cpp", options)
    kernels.misaligned_accesses.restype = ctypes.c_long
    return kernels


def compile_library(folder: Path, source: str, options: Sequence[str]) -> ctypes.CDLL:
    """Compile a source beside this file; the options are those of the compiler alone, not of the linker."""
    assert COMPILER is not None
    whole, library = folder / "whole.o", folder / "library.so"
    strict = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    for command in (
        [COMPILER, *strict, *options, "-c", str(_HERE / source), "-o", str(whole)],
        [COMPILER, "-shared", str(whole), "-o", str(library)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class KernelOnCpu(CpuCopyEngine):
    """Copies with the kernels, in grids of random sizes, and small slices so that pages have several."""

    def __init__(self, row_format: RowFormat, pool: HostPool, kernels: ctypes.CDLL, rng: random.Random) -> None:
        super().__init__(row_format, pool)
        self._rng = rng
        self._functions = {Direction.STORE: kernels.run_store, Direction.LOAD: kernels.run_load}
        for function in self._functions.values():
            function.restype = None

    def copy(self, transfer: Transfer) -> None:
        page_set = self.row_format.sets[transfer.set_id]
        members = member_records(page_set)
        slice_bytes = self._rng.choice([16, 48, 1024, SLICE_BYTES])
        arguments = kernel_arguments(
            members=members.ctypes.data,
            num_members=len(members),
            blocks=transfer.blocks.ctypes.data,
            host_offsets=transfer.host_offsets.ctypes.data,
            num_blocks=len(transfer.blocks),
            host=self.pool.memory.data_ptr(),
            slices=slices_per_page(page_set, slice_bytes),
            slice_bytes=slice_bytes,
        )
        self._functions[transfer.direction](
            ctypes.c_uint(self._rng.choice([1, 2, 5])),
            ctypes.c_uint(self._rng.choice([1, 3, 32])),
            *(ctypes.c_int64(int(one)) for one in arguments),
        )
