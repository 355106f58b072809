"""The KV and state cache of a JAX model's decode loop.

A host-side radix tree of token prefixes decides what a request can reuse; an immutable pytree, `CacheState`, holds
pages and recurrent states on the device; pure functions read and write them inside the model's jitted step.
"""

from jkv.attention import append_attend, attend
from jkv.config import (
    AttentionLayer,
    BatchShape,
    Buffer,
    CacheConfig,
    DeviceTier,
    HostTier,
    RecurrentLayer,
    Scope,
    SequenceShape,
    StoreTier,
    Tokens,
    WindowScratch,
    kv_buffers,
    latent_buffers,
)
from jkv.errors import (
    CacheError,
    ConfigError,
    IntegrityError,
    OutOfPagesError,
    SequenceStateError,
    StoreError,
)
from jkv.events import Event
from jkv.manager import CacheManager
from jkv.ops import (
    append,
    candidate_slots,
    export_pages,
    gather,
    import_pages,
    pool,
    read_state,
    slots_for,
    table_for,
    with_pool,
    write_state,
)
from jkv.radix import Match
from jkv.ragged import Ragged
from jkv.sequence import Sequence, Status
from jkv.state import CacheState
from jkv.stats import CacheStats
from jkv.transfer import Transfer

__all__ = [
    "AttentionLayer",
    "BatchShape",
    "Buffer",
    "CacheConfig",
    "CacheError",
    "CacheManager",
    "CacheState",
    "CacheStats",
    "ConfigError",
    "DeviceTier",
    "Event",
    "HostTier",
    "IntegrityError",
    "Match",
    "OutOfPagesError",
    "Ragged",
    "RecurrentLayer",
    "Scope",
    "Sequence",
    "SequenceShape",
    "SequenceStateError",
    "Status",
    "StoreError",
    "StoreTier",
    "Tokens",
    "Transfer",
    "WindowScratch",
    "append",
    "append_attend",
    "attend",
    "candidate_slots",
    "export_pages",
    "gather",
    "import_pages",
    "kv_buffers",
    "latent_buffers",
    "pool",
    "read_state",
    "slots_for",
    "table_for",
    "with_pool",
    "write_state",
]
