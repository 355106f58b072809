"""Names of what the store holds: digests of all that the contents depend on.

    root = digest of (model, scope)      d[0] = digest of (root, tokens of page 0)      d[1] = digest of (d[0], page 1)

Content behind placeholder ids, an image for instance, is part of its page. The name of a page is its digest, so it
stands for all tokens up to the page's end: two prompts share the names of the pages that they share, and nothing else
has them. A tail's name says its parent too: children of a page are found by listing names. SHA-256: another content
with the same name is not to be found, by chance or on purpose.

A key of the store is FINGERPRINT-BYTES/GROUP/NAME (`jkv.tiers.store`): geometry and group are not part of the digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

DIGEST_BYTES = 32
LONGEST_DECIMAL = 2048  # bits; 640 digits, the least limit that Python can be set to, are more
# as long as a digest: what is hashed for a root, or for a page with content, is never that of a plain page
ROOT = b"jkv root 1".ljust(DIGEST_BYTES)
CONTENT = b"jkv content 1".ljust(DIGEST_BYTES)
Contents = Mapping[int, tuple[int, bytes]]  # {negative token: (the id that it stands for, its content)}
# One spelling only: another, such as upper case, would be a second key of the same entry.
NAME = re.compile(r"(?:([0-9a-f]{64})\.([1-9][0-9]{0,9})\.)?([0-9a-f]{64})")


def typed(part: object) -> bytes:
    """`part` as bytes that no other part, or parts, have: its type, its length, its contents."""
    if part is None:
        kind, data = b"n", b""
    elif isinstance(part, bytes):
        kind, data = b"b", part
    elif isinstance(part, str):
        kind, data = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, int) and not isinstance(part, bool):
        # Python refuses to write long ones as decimals, from some number of digits on that can be set.
        kind, data = b"i", b"%d" % part if part.bit_length() <= LONGEST_DECIMAL else b"%#x" % part
    else:
        raise TypeError(f"a part of a key must be None, an int, a str or bytes, got {part!r}")
    return kind + len(data).to_bytes(8, "little") + data


def root_digest(model: str, *scope: int | str | bytes | None) -> bytes:
    """The digest that the first page of every prompt of this model and scope continues.

    Args:
      model: identity of the weights.
      scope: what else must be equal for reuse. None, 0, "" and b"" are four different parts, and their order counts.

    Returns:
      32 bytes.
    """
    return hashlib.sha256(ROOT + b"".join(typed(part) for part in (model, *scope))).digest()


def _digest_of(parent: bytes, tokens: np.ndarray, contents: Contents) -> bytes:
    """The digest of a page or tail that has content: of ids, positions and contents, whatever the symbols."""
    parts = []
    for at in np.flatnonzero(tokens < 0).tolist():
        content = contents[int(tokens[at])][1]
        parts.append(at.to_bytes(8, "little") + len(content).to_bytes(8, "little") + content)
    count, ids = len(tokens).to_bytes(8, "little"), _token_bytes(plain_ids(tokens, contents))
    return hashlib.sha256(b"".join((CONTENT, parent, count, ids, *parts))).digest()


def plain_ids(tokens: np.ndarray, contents: Contents) -> np.ndarray:
    """The ids behind `tokens`: int32[n]."""
    if not contents or not len(tokens) or tokens.min() >= 0:
        return tokens
    ids = tokens.copy()
    for at in np.flatnonzero(tokens < 0).tolist():
        ids[at] = contents[int(tokens[at])][0]
    return ids


def _token_bytes(tokens: np.ndarray) -> memoryview:
    """The tokens as they are hashed: int32, little endian, on every machine."""
    return np.ascontiguousarray(tokens, "<i4").view(np.uint8).data


def page_digests(
    parent: bytes, tokens: np.ndarray, page_size: int, contents: Contents = MappingProxyType({})
) -> list[bytes]:
    """The digests of whole pages that follow `parent`.

    Args:
      parent: digest of the page before, or of the root.
      tokens: int32[n * page_size].
      page_size: tokens of a page.
      contents: of the negative tokens.

    Returns:
      n digests; the last is the parent of what follows.
    """
    if len(tokens) % page_size:
        raise ValueError(f"{len(tokens)} tokens are no whole pages of {page_size}")
    data, step = _token_bytes(tokens), 4 * page_size
    digests = []
    mixed = bool(contents) and len(tokens) > 0 and bool(tokens.min() < 0)
    for start in range(0, len(data), step):
        page = tokens[start // 4 : (start + step) // 4]
        if mixed and page.min() < 0:
            parent = _digest_of(parent, page, contents)
        else:
            parent = hashlib.sha256(parent + data[start : start + step]).digest()
        digests.append(parent)
    return digests


def tail_digest(parent: bytes, tokens: np.ndarray, contents: Contents = MappingProxyType({})) -> bytes:
    """The digest of a partial page that follows `parent`: int32[< page_size], at least one token."""
    if contents and tokens.min() < 0:
        return _digest_of(parent, tokens, contents)
    return hashlib.sha256(parent + _token_bytes(tokens)).digest()


def page_name(digest: bytes) -> str:
    """The name of a whole page, or of the state after it."""
    return digest.hex()


def tail_name(parent: bytes, count: int, digest: bytes) -> str:
    """The name of a tail of `count` tokens behind `parent`, or of the state after it: "PARENT.COUNT.DIGEST"."""
    return f"{parent.hex()}.{count}.{digest.hex()}"


def parse_name(name: str) -> tuple[bytes, bytes | None, int]:
    """(digest, parent, count) of a tail's name, (digest, None, 0) of a page's.

    Raises:
      ValueError: `page_name` and `tail_name` never gave such a name.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of a page or a tail")
    parent, count, digest = match.groups()
    if parent is None:
        return bytes.fromhex(digest), None, 0
    return bytes.fromhex(digest), bytes.fromhex(parent), int(count)
