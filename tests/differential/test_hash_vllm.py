"""Block hashes against vLLM's own request hasher, with every kind of extra key that it knows.

The extra keys come from vLLM, so that they are the objects it hashes. vLLM is the judge; where it is not installed
these tests are skipped.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from lockstep_kv import hash_blocks, none_hash

with warnings.catch_warnings():
    # What vLLM and torch warn about while they are imported is not ours to answer for.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")

    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY_ALGO = pytest.mark.parametrize("algo", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])


@pytest.fixture(autouse=True)
def _keep_root() -> Iterator[None]:
    """Give other tests vLLM's root hash back as it was."""
    before = {name: vars(kv_cache_utils).get(name) for name in ("NONE_HASH", "_NONE_HASH_SEED")}
    yield
    for name, value in before.items():
        if value is not None:
            setattr(kv_cache_utils, name, value)


def make_request(rng: random.Random, num_tokens: int, algo: str, block_tokens: int) -> Request:
    """Make a request with a random choice of adapter, salt, images and prompt embeddings."""
    images = []
    at = 0
    while rng.random() < 0.7:
        offset = at + rng.randrange(20)
        length = rng.randrange(1, 40)
        if offset + length > num_tokens:
            break
        # Few names, so that one image may come twice in a block.
        name = f"image-{rng.randrange(3)}"
        place = PlaceholderRange(offset=offset, length=length)
        images.append(MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place))
        at = offset + length
    lora = None
    if rng.random() < 0.5:
        number = rng.randrange(1, 3)
        lora = LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=f"/adapters/{number}")
    embeds = torch.randn(num_tokens, 8) if rng.random() < 0.3 else None
    return Request(
        request_id="request",
        prompt_token_ids=None if embeds is not None else [rng.randrange(200_000) for _ in range(num_tokens)],
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        mm_features=images,
        lora_request=lora,
        cache_salt=rng.choice([None, "", "salt", "adapter-1"]),
        prompt_embeds=embeds,
        block_hasher=kv_cache_utils.get_request_block_hasher(block_tokens, get_hash_fn_by_name(algo)),
    )


def keys_of(request: Request, block_tokens: int) -> list[tuple[Any, ...] | None]:
    """Let vLLM make the request's extra keys, block by block."""
    keys = []
    image = 0
    for start in range(0, request.num_tokens - block_tokens + 1, block_tokens):
        entry, image = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, image)
        keys.append(entry)
    return keys


@EVERY_ALGO
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
def test_requests_hash_as_in_vllm(algo: str, block_tokens: int) -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algo))
    root = bytes(kv_cache_utils.NONE_HASH)
    rng = random.Random(f"{algo} {block_tokens}")
    kinds = set()
    for _ in range(150):
        request = make_request(rng, rng.randrange(1, 200), algo, block_tokens)
        keys = keys_of(request, block_tokens)
        kinds |= {key[0] for entry in keys if entry is not None for key in entry}
        tokens = list(request.all_token_ids)
        got = hash_blocks(tokens, block_tokens, algo=algo, extra_keys=keys, none_hash=root)
        assert got == request.block_hashes

        # Tokens that the model makes continue the chain.
        done = len(got)
        request.append_output_token_ids([rng.randrange(200_000) for _ in range(rng.randrange(1, 40))])
        more = list(request.all_token_ids)[done * block_tokens :]
        later = keys_of(request, block_tokens)[done:]
        parent = got[-1] if got else None
        got += hash_blocks(more, block_tokens, algo=algo, parent=parent, extra_keys=later, none_hash=root)
        assert got == request.block_hashes
    assert kinds == {"lora", "mm", "cache_salt", "prompt_embeds"}


@EVERY_ALGO
def test_one_long_block(algo: str) -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algo))
    root = bytes(kv_cache_utils.NONE_HASH)
    tokens = [random.Random(at).randrange(200_000) for at in range(16384)]
    expected = kv_cache_utils.hash_block_tokens(get_hash_fn_by_name(algo), None, tokens, None)
    assert hash_blocks(tokens, 16384, algo=algo, none_hash=root) == [expected]


@EVERY_ALGO
def test_the_root_is_vllms(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in ["0", "", "another"]:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algo))
        assert none_hash(algo) == kv_cache_utils.NONE_HASH
    monkeypatch.delenv("PYTHONHASHSEED")
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algo))
    if algo.startswith("sha256"):
        assert none_hash(algo) == kv_cache_utils.NONE_HASH
    assert none_hash(algo, kv_cache_utils.get_none_hash_seed()) == kv_cache_utils.NONE_HASH
