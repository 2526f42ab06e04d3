# ruff: noqa: E501  a case a line
"""Byte mutations, seeded: what a fuzzer without coverage does, with the words of the format at hand."""

import random

WORDS = [
    b"-1", b"0", b"1e999", b"NaN", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"1.0", b"null", b"true", b"[]", b"{}", b'""',
    b'"\\ud800"', b"..", b"/", b"\0", b"\xff", b"\xed\xa0\x80", b'"../../x"', b"[[[[[[[[", b"2.0", b"zstd", b"none", b"ragged", b"token", b"bfloat16",
    b"\xff" * 8, b"\0" * 8, b"\x80" + b"\0" * 7, b"\0" * 7 + b"\x80", b"\xff" * 7 + b"\x7f", b"\x01" + b"\0" * 7,
]  # fmt: skip


def mutated(data: bytes, choose: random.Random, others: list[bytes]) -> bytes:
    """Return the data after 1 to 4 mutations."""
    result = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 4))):
        at = choose.randrange(len(result) + 1)
        kind = choose.randrange(9)
        if kind == 0 and result:
            result[at % len(result)] ^= 1 << choose.randrange(8)
        elif kind == 1 and result:
            result[at % len(result)] = choose.randrange(256)
        elif kind == 2:
            del result[at : at + choose.choice((1, 2, 8, 40))]
        elif kind == 3:
            word = choose.choice(WORDS)
            result[at : at + len(word)] = word
        elif kind == 4:
            result[at:at] = choose.choice(WORDS)
        elif kind == 5:
            stop = at + choose.choice((1, 8, 40))
            result[at:at] = result[at:stop]
        elif kind == 6:
            other = choose.choice(others)
            start = choose.randrange(len(other) + 1)
            result[at : at + 16] = other[start : start + choose.choice((4, 16, 64))]
        elif kind == 7:
            del result[at:]
        else:
            result[at // 8 * 8 : at // 8 * 8 + 8] = choose.choice(WORDS[-6:])
    return bytes(result)
