"""Sizes in bytes as the command line takes them."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from lockstep_kv import ConfigError
from lockstep_kv.commands import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("28145000000", 28_145_000_000),
        ("1kB", 1000),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1TB", 10**12),
        ("1KiB", 1024),
        ("1MiB", 2**20),
        ("1GiB", 2**30),
        ("1TiB", 2**40),
        ("1B", 1),
        ("28.145GB", 28_145_000_000),
        # A float would come out at 1,001 below.
        ("1.001kB", 1001),
        ("4.35GB", 4_350_000_000),
        ("0.5KiB", 512),
        ("1.5TiB", 3 * 2**39),
        ("2 GB", 2 * 10**9),
        (" 2GB\n", 2 * 10**9),
        ("007", 7),
        ("9" * 28, 10**28 - 1),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "B",
        "one",
        "-1",
        "-1GB",
        "+1",
        "1e9",
        "0x10",
        "1,000",
        "1_000",
        "1.",
        ".5",
        "1.5.2GB",
        "nan",
        "inf",
        "1  GB",
        "1GB 2",
        "1gb",
        "1KB",
        "1PB",
        "1GBB",
        "1BB",
        "1iB",
        "1GB/s",
        "\u0663GB",
        "\u00b2",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith("a size must be bytes or a number with one of kB, MB, ")
    assert str(caught.value).endswith(f", got {text!r}")


@pytest.mark.parametrize("unit", ["k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"])
def test_a_unit_without_its_b_is_not_taken_for_bytes(unit: str) -> None:
    try:
        size = parse_bytes(f"3{unit}")
    except ConfigError:
        return
    assert size == parse_bytes(f"3{unit}B")
