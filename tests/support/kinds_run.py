"""engine_run.py for models that vLLM 0.32 does not run on the CPU as it is, and with weights that make tokens tell.

Usage and output are those of engine_run.py. With TRITON_INTERPRET=1 in the environment vLLM's Triton kernels run too,
in Triton's interpreter. Needs vLLM.
"""

from __future__ import annotations

import importlib
import os


def offer_triton() -> None:
    """Make vLLM take Triton, which it does only if Triton has a backend for the CPU; the interpreter asks for none."""
    backends = importlib.import_module("triton.backends")

    class NoDriver:
        @staticmethod
        def is_active() -> bool:
            return False

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=NoDriver)


if os.environ.get("TRITON_INTERPRET") == "1":
    # vLLM looks when it is imported.
    offer_triton()

import cpu_kernels
import engine_run
import ring_model
import tiny_weights

if __name__ == "__main__":
    cpu_kernels.fill_in()
    ring_model.register()
    tiny_weights.register()
    engine_run.main()
