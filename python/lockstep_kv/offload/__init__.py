"""Native offload of a KV cache to host memory: the pool of rows, what a row holds, and the copies. Needs torch.

A GPU also needs CuPy, which is imported when a GPU is used and not before.
"""

from lockstep_kv.offload.copy_engine import CopyEngine, FinishedCopy
from lockstep_kv.offload.cpu_copy import CpuCopyEngine
from lockstep_kv.offload.gpu_copy import GpuCopyEngine
from lockstep_kv.offload.host_pool import HostPool
from lockstep_kv.offload.row_format import RowFormat

__all__ = ["CopyEngine", "CpuCopyEngine", "FinishedCopy", "GpuCopyEngine", "HostPool", "RowFormat"]
