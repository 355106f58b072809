"""The format of the store's keys and values.

    key      FINGERPRINT-BYTES / GROUP / NAME           names: jkv.tiers.keys
    value    [ magic | version | fingerprint | digest of the key | length | crc32 | payload ]

All values of a group have one size, BYTES, so a list of keys says what they take. The header says whose value it is: a
file that was truncated, damaged, or copied from elsewhere is told from a good one. CRC32 finds damage by chance, at
4 GB/s; SHA-256 would cost more than the write.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jkv.layout import Group, Layout

MAGIC = b"jkv page"
VERSION = 1
HEADER = struct.Struct("<8sI32s32sQI")
KEY = re.compile(r"[0-9a-f]{32}-([0-9]{1,15})/[^/]+/([0-9a-f.]+)")
Part = np.ndarray | memoryview | bytes


class Damaged(ValueError):
    """A value that is not what was written under its key; the message says in which way."""


class Format(NamedTuple):
    """How the values of one group look.

    Attributes:
      prefix: of its keys, "FINGERPRINT-BYTES/GROUP/".
      fingerprint: 32 bytes: digest of the format's version, the page size and the layers' names, shapes and dtypes.
      size: bytes of a value, header included.
    """

    prefix: str
    fingerprint: bytes
    size: int

    def _header(self, key: str, checksum: int) -> bytes:
        digest = hashlib.sha256(key.encode()).digest()
        return HEADER.pack(MAGIC, VERSION, self.fingerprint, digest, self.size - HEADER.size, checksum)

    def pack(self, key: str, parts: Sequence[Part]) -> bytes:
        """The value under `key` whose payload is the parts' bytes (C-contiguous), in order. The parts are copied."""
        # dtypes such as bfloat16 have no buffer protocol
        flat = [part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part for part in parts]
        checksum = 0
        for part in flat:
            checksum = zlib.crc32(part, checksum)
        value = b"".join([self._header(key, checksum), *flat])
        if len(value) != self.size:
            raise ValueError(f"{key}: parts of {len(value) - HEADER.size} bytes, a value has {self.size - HEADER.size}")
        return value

    def payload(self, value: bytes) -> memoryview:
        """What `pack` was given, of a value known to be good."""
        return memoryview(value)[HEADER.size :]

    def unpack(self, key: str, value: bytes) -> memoryview:
        """The payload of what was read under `key`, or Damaged."""
        if len(value) != self.size:
            raise Damaged(f"{key} has {len(value)} bytes instead of {self.size}")
        payload = self.payload(value)
        # Every byte of the header is checked by comparing with the header that it must be.
        expected = self._header(key, zlib.crc32(payload))
        if value.startswith(expected):
            return payload
        fields = ("magic number", "version", "fingerprint", "key", "length", "checksum")
        pairs = zip(fields, HEADER.unpack_from(value), HEADER.unpack(expected), strict=True)
        raise Damaged(f"{key} has another {next(name for name, found, right in pairs if found != right)}")


def _format(layout: Layout, group: Group) -> Format:
    pool = layout.pools[group.pool]
    layers = [
        [name, [[buffer, each.shape, each.dtype.name] for buffer, each in buffers.items()]]
        for name, buffers in zip(group.layers, pool.buffers, strict=True)
    ]
    geometry = json.dumps([VERSION, sys.byteorder, layout.page_size, layers])
    fingerprint = hashlib.sha256(geometry.encode()).digest()
    size = HEADER.size + pool.page_bytes
    return Format(f"{fingerprint.hex()[:32]}-{size}/{group.name}/", fingerprint, size)


def formats(layout: Layout) -> dict[str, Format]:
    """{group: Format}."""
    return {group.name: _format(layout, group) for group in layout.groups}
