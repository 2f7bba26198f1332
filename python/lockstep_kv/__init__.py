"""KV-cache blocks for large language models: groups of layers that belong together move in lockstep.

A `Coordinator` decides which blocks a request gets, which of its leading tokens are cached already, and what is
evicted. `plan_layout` says where the pages of every layer lie. Nothing here imports torch or vLLM.
"""

from lockstep_kv._core import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    Coordinator,
    CoordinatorConfig,
    GroupSpec,
    LayerSpec,
    Layout,
    LayoutTensor,
    LockstepSet,
    OffloadIndex,
    PrefixHit,
    StorePlan,
    __version__,
    hash_blocks,
    none_hash,
    plan_layout,
)
from lockstep_kv.errors import (
    ArgumentTypeError,
    ConfigError,
    DoubleFreeError,
    InvariantError,
    LockstepKVError,
    PoolExhaustedError,
    StaleHitError,
    UnknownRequestError,
)

__all__ = [
    "AllBlocksCleared",
    "ArgumentTypeError",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ConfigError",
    "Coordinator",
    "CoordinatorConfig",
    "DoubleFreeError",
    "GroupSpec",
    "InvariantError",
    "LayerSpec",
    "Layout",
    "LayoutTensor",
    "LockstepKVError",
    "LockstepSet",
    "OffloadIndex",
    "PoolExhaustedError",
    "PrefixHit",
    "StaleHitError",
    "StorePlan",
    "UnknownRequestError",
    "__version__",
    "hash_blocks",
    "none_hash",
    "plan_layout",
]
