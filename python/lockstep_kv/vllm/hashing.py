"""vLLM's request block hasher, natively: the same digests, only new blocks hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from lockstep_kv._core import hash_blocks
from lockstep_kv.errors import LockstepKVError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

__all__ = ["request_block_hasher"]

_ALGORITHMS: dict[Any, str] = {
    hashing.sha256: "sha256",
    hashing.sha256_cbor: "sha256_cbor",
    hashing.xxhash: "xxhash",
    hashing.xxhash_cbor: "xxhash_cbor",
}
_stock_hasher = kv_cache_utils.get_request_block_hasher


def request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> Callable[[Request], list[kv_cache_utils.BlockHash]]:
    """Make what vLLM's `get_request_block_hasher` makes.

    A hash function that is not known runs in vLLM's own code, and so do requests whose extra keys (LoRA, images, ...)
    cannot be encoded natively to the same bytes.
    """
    stock: Callable[[Request], list[Any]] = _stock_hasher(hash_block_size, caching_hash_fn)
    algo = _ALGORITHMS.get(caching_hash_fn)
    if algo is None:
        return stock

    def hasher(request: Request) -> list[kv_cache_utils.BlockHash]:
        done = request.block_hashes
        start = len(done) * hash_block_size
        if start + hash_block_size > request.num_tokens:
            return []
        extra_keys = None
        if request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None:
            extra_keys = _extra_keys(request, start, hash_block_size)
        try:
            hashes: list[Any] = hash_blocks(
                request.all_token_ids[start:],
                hash_block_size,
                algo=algo,
                parent=done[-1] if done else None,
                extra_keys=extra_keys,
                none_hash=kv_cache_utils.NONE_HASH,
            )
        except LockstepKVError:
            return stock(request)
        return hashes

    return hasher


def _extra_keys(request: Request, start: int, hash_block_size: int) -> list[tuple[Any, ...] | None]:
    """The extra keys of each block from token `start` on."""
    keys = []
    # From the first image on: the index moves up to the block's first.
    at = 0
    for begin in range(start, request.num_tokens - hash_block_size + 1, hash_block_size):
        key, at = kv_cache_utils.generate_block_hash_extra_keys(request, begin, begin + hash_block_size, at)
        keys.append(key)
    return keys
