"""Block hashes: stored vectors, seeds, refusals, and the ways in which cache keys are known to have gone wrong."""

from __future__ import annotations

import array
import enum
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from lockstep_kv import ArgumentTypeError, ConfigError, hash_blocks, none_hash

ROOT = bytes(range(32))
ALGOS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

# 17 tokens, 4 full blocks of 4: every width of integer.
TOKENS = [1, 255, 256, 65535, 65536, 129279, 2**31 - 1, 2**31, -1, 0, 7, 8, 9, 10, 11, 12, 13]
# Made with pickle, cbor2 and xxhash from Python 3.11: the hash of the default seed, the four blocks of TOKENS after it,
# and the same with the extra keys below.
VECTORS = {
    "sha256": [
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "64b05b8b7de237b04310cce9899c2c3b4100aeafbf1bb53c1ba4e55e6b925b31",
        "4bd20638ef7a16e0fa95b8607fba33b7e896c90380c36319f6735938c69e13b3",
        "1f23fd64a5395ad1ff21a622720487b19d03a46208f11c8f5576e6b101c09cd8",
        "b8bada58822e45e674b2f42349ff9710fd82b2dc02c30e6dc96c03930474b89f",
        "a2683ec362cbffcefeadc82ffe49cc0fc4b58de32296e81e26476011d611c2eb",
        "ce9995a83128efaa705b4f90d2698a3ffd06711718fbc85f1fd73ebd71482644",
        "ca7f4c096e3ca22a1f88aca3b2d0be819e11d7b7e6a201510cc4a5088441b9d2",
        "d5f47d434568284be68eaf21aa353597ee2a00662f69e1d1d271195565a71080",
    ],
    "sha256_cbor": [
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "7cbf2a43da7e3bf7f6605fca21778e2d3e48b5d8abe1898b841db47bb22759ba",
        "941c4f77d96ad42e21364009657bbfb9ed54d7685902229e9a3647599b0cc031",
        "7452d23f56cafbc90e466454a3997ec64fbe1572f8a11865c5e5c22afaf3b5f8",
        "1afb85aa44b27b394845ed44e321c12be02d5e77a6e5c410da6597d8b2644ee3",
        "0e0275b945ab75196318461e5dfe191d89a4dfb4f82459c4280585f9d986e52b",
        "ecb711153d14cdbb16f7b3b0d59472a311a5ce24f6190754a50ab912b247dde2",
        "5fc50efe9ba63569ad4772a33e227691f6e344d4ce557907be3252c2077ff432",
        "09bfe4e68fb8b780ede71c9cc9227959f73d7628cb60277771d811c5b02bda78",
    ],
    "xxhash": [
        "d98f72b9c430d985211489af307f0229",
        "046cb0e22a37aa19c42a2236ba318551",
        "afb34363a894a5537cd52c18fc15e8bf",
        "62f92caffb3a63c4f22397469dc0fa3f",
        "eeac51265e62d469f2d3298a71ef1484",
        "af9afb362b94fb07354b2e26af0fdde7",
        "71f9b7353f496b08e6c9c0978e488b3b",
        "fc7462638a84ccd3287d6cc21da45e2c",
        "81e9aa45c96c98abe4d2f8e1ce638114",
    ],
    "xxhash_cbor": [
        "a4e364baa0791a6f63bbf917db9b700d",
        "ef397868b9526bca598ccba5d124aec1",
        "63a735192a6f727e6c29966e3e9a0549",
        "f744149fc02c386dfc295b0208aa57bb",
        "708e89e7d5dae22f4eed8e07b5f0adac",
        "cb945919098438d547b275b2d373d006",
        "7dcfe9d4fc21f7d3c4881472afaeb6d9",
        "d42b0a9fdcd596a252201d6b6291a489",
        "999d594545609cd8dc0c4bab3fc6905e",
    ],
}


def own(text: str) -> str:
    """Make a string that is an object of its own, which literals are not."""
    return "".join(list(text))


def extra_keys() -> list[tuple[Any, ...] | None]:
    """Build the stored vectors' keys: the adapter's tuple and the word "mm" are one object each, all else is not."""
    lora, mm, image = (own("lora"), own("adapter"), own("/adapters/a")), own("mm"), own("image-b")
    return [
        (lora, (own("cache_salt"), own("pepper"))),
        (lora, (mm, own("image-a"), 1), (mm, image, 3)),
        None,
        (lora, (mm, image, -1), (own("prompt_embeds"), bytes(range(32)))),
    ]


def hashes(tokens: list[int], block_tokens: int = 4, **keywords: Any) -> list[bytes]:
    return hash_blocks(tokens, block_tokens, none_hash=keywords.pop("none_hash", ROOT), **keywords)


@pytest.mark.parametrize("algo", ALGOS)
def test_stored_vectors(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, *blocks = [bytes.fromhex(text) for text in VECTORS[algo]]
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert none_hash(algo, "vllm-none-hash") == root
    assert hash_blocks(TOKENS, 4, algo=algo, none_hash=root) == blocks[:4]
    assert hash_blocks(TOKENS, 4, algo=algo, none_hash=root, extra_keys=extra_keys()) == blocks[4:]


def test_sha256_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    root = none_hash()
    assert root.hex() == VECTORS["sha256"][0]
    assert hash_blocks(TOKENS, 4, none_hash=root)[0].hex() == VECTORS["sha256"][1]


@pytest.mark.parametrize("algo", ALGOS)
def test_a_chain_can_be_continued(algo: str) -> None:
    whole = hashes(TOKENS, algo=algo)
    assert [len(digest) for digest in whole] == [32 if algo.startswith("sha") else 16] * 4
    assert hashes(TOKENS[8:], algo=algo, parent=whole[1]) == whole[2:]
    assert hashes(TOKENS, algo=algo, parent=ROOT) == whole


def test_only_full_blocks_are_hashed() -> None:
    assert hashes([]) == []
    assert hashes([1, 2, 3]) == []
    assert hashes([], extra_keys=[]) == []
    assert hashes([1, 2, 3], 2**64 - 1) == []
    assert hashes([1, 2, 3, 4, 5]) == hashes([1, 2, 3, 4])


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"])
def test_numpy_tokens_count_as_plain_ints(kind: str) -> None:
    values = [0, 1, 2, 100, 5, 6, 127, 8]
    expected = hashes(values)
    assert hash_blocks(np.array(values, dtype=kind), 4, none_hash=ROOT) == expected
    apart = np.zeros((8, 2), dtype=kind)
    apart[:, 1] = values
    assert hash_blocks(apart[:, 1], 4, none_hash=ROOT) == expected
    assert hash_blocks(list(np.array(values, dtype=kind)), 4, none_hash=ROOT) == expected


def test_other_sequences_of_tokens() -> None:
    expected = hashes([1, 2, 3, 4])
    assert hash_blocks((1, 2, 3, 4), 4, none_hash=ROOT) == expected
    assert hash_blocks(range(1, 5), 4, none_hash=ROOT) == expected
    for code in "bBhHiIlLqQ":
        assert hash_blocks(array.array(code, [1, 2, 3, 4]), 4, none_hash=ROOT) == expected


class TestSeeds:
    """The hash that stands before a first block."""

    @pytest.mark.parametrize("algo", ALGOS)
    def test_the_environment_decides_if_nothing_is_given(self, algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for seed in ["0", "", "random", "\N{SNOWMAN}"]:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            assert none_hash(algo) == none_hash(algo, seed)
            assert none_hash(algo, "another") != none_hash(algo)

    @pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
    def test_cryptographic_algorithms_share_a_seed(self, algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        assert none_hash(algo) == none_hash(algo, "vllm-none-hash")

    @pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
    def test_the_others_draw_one(self, algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        monkeypatch.setattr(os, "urandom", lambda size: b"\xab" * size)
        assert none_hash(algo) == none_hash(algo, "ab" * 32)
        monkeypatch.undo()
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        assert none_hash(algo) != none_hash(algo)

    def test_a_seed_without_utf8_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONHASHSEED", "\udc80")
        with pytest.raises(ConfigError, match="PYTHONHASHSEED is not valid Unicode"):
            none_hash()
        with pytest.raises(ConfigError, match="seed is not valid Unicode"):
            none_hash(seed="\ud800")


class Text(str):
    """A string that is not quite one."""

    __slots__ = ()


class Pair(tuple[int, int]):
    """A tuple that is not quite one."""

    __slots__ = ()


class Blob(bytes):
    """Bytes that are not quite bytes."""


class Colour(enum.IntEnum):
    """Integers that are not quite integers."""

    RED = 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1], "list [1]"),
        ({"a": 1}, "dict {'a': 1}"),
        ({1}, "set {1}"),
        (bytearray(b"ab"), "bytearray"),
        (1j, "complex 1j"),
        (Text("salt"), "Text 'salt'"),
        (Pair((1, 2)), "Pair (1, 2)"),
        (Blob(b"x"), "Blob b'x'"),
        (Colour.RED, "Colour <Colour.RED: 1>"),
        (np.int64(7), "int64 np.int64(7)"),
        (np.float64(0.5), "float64 np.float64(0.5)"),
        ("lone \ud800", r"'lone \ud800'"),
    ],
)
@pytest.mark.parametrize("algo", ALGOS)
def test_keys_without_an_identical_encoding_are_refused(algo: str, value: object, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hashes([1, 2, 3, 4, 5, 6, 7, 8], algo=algo, extra_keys=[None, ("a", (0, value))])
    assert shown in str(caught.value)
    assert "extra_keys[1][1][1]" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [1, True, 3, 4]}, r"token_ids\[1\] must be an int, got bool True"),
        ({"token_ids": [1, 2.0]}, r"token_ids\[1\] must be an int, got float 2.0"),
        ({"token_ids": [None]}, r"token_ids\[0\] must be an int, got NoneType None"),
        ({"token_ids": [2**63]}, r"token_ids\[0\] must be between .* got 9223372036854775808"),
        ({"token_ids": (0, -(2**63) - 1)}, r"token_ids\[1\] must be between .* got -9223372036854775809"),
        ({"token_ids": [10**5000]}, r"token_ids\[0\] must be between "),
        ({"token_ids": np.array([1, 2**63], dtype="u8")}, r"token_ids\[1\] must be between .* got 9223372036854775808"),
        ({"token_ids": np.array([1.0])}, r"token_ids\[0\] must be an int"),
        ({"token_ids": np.array([True])}, r"token_ids\[0\] must be an int"),
        ({"token_ids": np.array([[1, 2]])}, "token_ids must be one-dimensional"),
        ({"token_ids": b"abcd"}, "token_ids must be a sequence, got bytes b'abcd'"),
        ({"token_ids": bytearray(4)}, "token_ids must be a sequence, got bytearray"),
        ({"token_ids": "abcd"}, "token_ids must be a sequence, got str 'abcd'"),
        ({"token_ids": 5}, "token_ids must be a sequence, got int 5"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, got 0"),
        ({"block_tokens": -1}, "block_tokens must be between 0 and .* got int -1"),
        ({"block_tokens": True}, "block_tokens must be an int, got bool True"),
        ({"block_tokens": 4.0}, "block_tokens must be an int, got float 4.0"),
        ({"algo": "md5"}, 'algo must be one of sha256, sha256_cbor, xxhash, xxhash_cbor, got "md5"'),
        ({"algo": 256}, "algo must be a str, got int 256"),
        ({"parent": b"x" * 20}, "parent: a block hash must be 16 or 32 bytes long, got 20"),
        ({"parent": b""}, "parent: a block hash must be 16 or 32 bytes long, got 0"),
        ({"parent": "x" * 16}, "parent must be bytes, got str"),
        ({"parent": Blob(b"x" * 16)}, "parent must be bytes, got Blob"),
        ({"none_hash": b"x" * 31}, "none_hash: a block hash must be 16 or 32 bytes long, got 31"),
        ({"none_hash": None}, "none_hash must be bytes, got NoneType None"),
        ({"extra_keys": []}, "extra_keys must have one entry per full block, 1 for 4 tokens in blocks of 4, got 0"),
        ({"extra_keys": [None, None]}, "one entry per full block, 1 for 4 tokens in blocks of 4, got 2"),
        ({"extra_keys": ["salt"]}, r"extra_keys\[0\] must be None or a tuple, got str 'salt'"),
        ({"extra_keys": [["salt"]]}, r"extra_keys\[0\] must be None or a tuple, got list \['salt'\]"),
        ({"extra_keys": [Pair((1, 2))]}, r"extra_keys\[0\] must be None or a tuple, got Pair \(1, 2\)"),
        ({"extra_keys": "salt"}, "extra_keys must be a sequence, got str 'salt'"),
        ({"extra_keys": [(b"x" * (2**26 + 1),)]}, r"extra_keys\[0\]\[0\]: .*67108865 bytes"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"token_ids": [1, 2, 3, 4], "block_tokens": 4, "none_hash": ROOT}
    with pytest.raises(ConfigError, match=message):
        hash_blocks(**(good | arguments))


def test_wrong_types_are_type_errors() -> None:
    with pytest.raises(ArgumentTypeError):
        hashes([1, 2, 3, 4], extra_keys=[([],)])
    with pytest.raises(ArgumentTypeError):
        none_hash("sha256", seed=b"0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="algo must be one of"):
        none_hash("sha1")


def test_tuples_nested_too_deeply_are_refused() -> None:
    nested: tuple[Any, ...] = ()
    for _ in range(199):
        nested = (nested,)
    assert len(hashes([1], 1, extra_keys=[nested])) == 1
    for _ in range(100_000):
        nested = (nested,)
    with pytest.raises(ConfigError, match="nested deeper than 200"):
        hashes([1], 1, extra_keys=[nested])
    # Taken apart step by step, as freeing it at once would nest as deeply.
    while nested:
        (nested,) = nested


def test_tuples_whose_full_form_explodes_are_refused() -> None:
    doubling: tuple[Any, ...] = ()
    for _ in range(100):
        doubling = (doubling, doubling)
    assert len(hashes([1], 1, extra_keys=[doubling])) == 1
    with pytest.raises(ConfigError, match=r"extra_keys\[0\]: .* longer than 67108864 bytes"):
        hashes([1], 1, algo="sha256_cbor", extra_keys=[doubling])


@pytest.mark.parametrize("algo", ALGOS)
class TestKnownFaults:
    """What has made prefix caches serve the wrong blocks, or none, at the level of keys."""

    def test_near_collisions_and_roots(self, algo: str) -> None:
        blocks = [[10, 20, 30, 40], [41, 19, 30, 40], [10, 51, 29, 40], [1, 23, 30, 40], [12, 3, 30, 40]]
        keys = [hashes(block, algo=algo)[0] for block in blocks]
        keys += hashes([10, 20, 30, 40], algo=algo, none_hash=bytes(32))
        keys += hashes([10, 20, 30, 40], algo=algo, none_hash=bytes(16))
        # The same block at depth 2.
        keys.append(hashes([10, 20, 30, 40] * 2, algo=algo)[1])
        assert len(set(keys)) == len(keys)

    def test_two_processes_agree_for_one_seed(self, algo: str) -> None:
        code = (
            "from lockstep_kv import hash_blocks, none_hash;"
            f"root = none_hash({algo!r});"
            f"print(root.hex(), *(h.hex() for h in hash_blocks(range(64), 16, algo={algo!r}, none_hash=root)))"
        )

        def run(seed: str) -> list[str]:
            environment = os.environ | {"PYTHONHASHSEED": seed}
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)  # noqa: S603
            return done.stdout.split()

        first = run("1")
        assert first == run("1")
        assert not set(first) & set(run("2"))
        root = none_hash(algo, "1")
        assert first == [digest.hex() for digest in [root, *hash_blocks(range(64), 16, algo=algo, none_hash=root)]]

    def test_adapters(self, algo: str) -> None:
        def of(*adapter: object) -> list[bytes]:
            return hashes(list(range(8)), algo=algo, extra_keys=[(("lora", *adapter),)] * 2 if adapter else None)

        first = of("n", 1, 1)
        others = [of("n", 2, 1), of(), of("n", 1, 2)]
        assert not any(set(first) & set(other) for other in others)
        assert of("n", 1, 1) == first

    def test_images(self, algo: str) -> None:
        tokens = [1, 2, 3, 4, *[9] * 8]

        def of(item: str, start: int) -> list[bytes]:
            offsets = [start - 4 * block for block in range(3)]
            keys = [(("mm", item, offset),) if offset < 4 else None for offset in offsets]
            return hashes(tokens, algo=algo, extra_keys=keys)

        x, y = "0" * 56 + "0001abcd", "0" * 56 + "0002abcd"
        first = of(x, 4)
        assert first == of(x, 4)
        for other in [of(y, 4), of(x, 6)]:
            assert other[0] == first[0]
            assert not set(other[1:]) & set(first[1:])

    def test_fine_hashes_are_taken_at_a_coarse_block_s_end(self, algo: str) -> None:
        def shared(count: int) -> list[bytes]:
            return hashes([*range(1, count + 1), *range(100, 108 - count)], 2, algo=algo)

        fine = shared(8)
        for count in [2, 4, 6]:
            other = shared(count)
            assert other[: count // 2] == fine[: count // 2]
            # The hash at the end of the 8-token block differs even though the first fine ones agree.
            assert not set(other[count // 2 :]) & set(fine)
        assert shared(8)[3] == fine[3]
        # A chain of coarser steps is another chain: its hashes never stand in for the fine ones.
        assert not set(hashes(list(range(1, 9)), 8, algo=algo)) & set(fine)
