"""Seeded mutations of bytes and of JSON-like values; most are small, so that they pass the first checks."""

import copy
import random
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
]
TEXTS = [
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b'"',
    b"'",
    b",",
    b"nan",
    b"-1",
    b"1e999",
    b"../../etc/passwd",
    b"\x1b[2J",
    b"{}",
    b"[[",
]
VALUES = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**64, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"),
    "", "x", "\x00", "\ud800", "a" * 10_000, "digits", "/dev/zero", [], [[]], [None], [2**40, 2**40], [0],
    ["x", 1], {}, {"x": 1},
]  # fmt: skip


def mutated(content: bytes, random: random.Random) -> bytes:
    """The content after one to four random edits."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_EDITS)(data, random)
    return bytes(data)


def mutated_value(value: Any, random: random.Random) -> Any:
    """A JSON-like value after one to three random edits: keys removed, added or renamed, values replaced."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _edited(value, random)
    return value


def _edited(value: Any, random: random.Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value, key=str))
        chance = random.random()
        if chance < 0.1:
            del value[key]
        elif chance < 0.2:
            value[str(random.choice(VALUES))[:20]] = random.choice(VALUES)
        else:
            value[key] = _edited(value[key], random)
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        value[place] = _edited(value[place], random)
        return value * random.choice((1, 1, 1, 2))
    return copy.deepcopy(random.choice(VALUES))


def _flip(data: bytearray, random: random.Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _replace(data: bytearray, random: random.Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _number(data: bytearray, random: random.Random) -> None:
    """Overwrite some bytes by an interesting number, of 1 to 8 bytes in either order, or in digits."""
    number, size = random.choice(NUMBERS), random.choice((1, 2, 4, 8))
    place = random.randrange(len(data) + 1)
    if random.random() < 0.2:
        text = random.choice((b"%d", b"%o", b"%x")) % abs(number)
    else:
        text = struct.pack(random.choice("<>") + "Q", number % 2**64)
        text = text[:size] if random.random() < 0.5 else text[-size:]
    data[place : place + len(text)] = text


def _truncate(data: bytearray, random: random.Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _delete(data: bytearray, random: random.Random) -> None:
    place = random.randrange(len(data) + 1)
    del data[place : place + random.choice((1, 2, 16, 512))]


def _repeat(data: bytearray, random: random.Random) -> None:
    place, size = random.randrange(len(data) + 1), random.choice((1, 4, 64, 512))
    data[place:place] = data[place : place + size] * random.choice((1, 2, 20))


def _insert(data: bytearray, random: random.Random) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.choice(TEXTS) * random.choice((1, 1, 3, 2000))


def _swap(data: bytearray, random: random.Random) -> None:
    size = random.choice((1, 8, 64))
    first, second = (random.randrange(len(data) + 1) for _ in range(2))
    part = data[first : first + size]
    data[first : first + size] = data[second : second + size]
    data[second : second + size] = part


_EDITS: list[Callable[[bytearray, random.Random], None]] = [
    _flip, _replace, _number, _number, _truncate, _delete, _repeat, _insert, _swap,
]  # fmt: skip
