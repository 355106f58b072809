"""Every error that jkv raises on purpose."""


class CacheError(Exception):
    """Base class of all jkv errors.

    >>> import jkv
    >>> issubclass(jkv.StoreError, jkv.CacheError)
    True
    """


class ConfigError(CacheError, ValueError):
    """A value that can never work: a declaration, a token id, an unknown layer, a wrong shape.

    >>> import jkv
    >>> jkv.DeviceTier(pages=0)
    Traceback (most recent call last):
    jkv.errors.ConfigError: DeviceTier.pages must be at least 1, got 0
    """


class OutOfPagesError(CacheError):
    """A request that would not fit an empty cache; the message names what was asked and what there is.

    >>> import jkv
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=2)))
    >>> seq = manager.open()
    >>> seq.resume(), seq.reserve(8)
    (True, True)
    >>> seq.reserve(9)
    Traceback (most recent call last):
    jkv.errors.OutOfPagesError: one sequence needs 3 pages of pool 'full', which has 2
    """


class SequenceStateError(CacheError):
    """An operation that the sequence's (or the state's) present condition does not allow.

    >>> import jkv
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=2)))
    >>> manager.open().reserve(1)  # before resume
    Traceback (most recent call last):
    jkv.errors.SequenceStateError: resize: <Sequence suspended row=None ...> is suspended, not active
    """


class IntegrityError(CacheError):
    """An internal invariant does not hold: a bug in jkv, or a state that was tampered with.

    >>> import jkv
    >>> issubclass(jkv.IntegrityError, ValueError)
    False
    """


class StoreError(CacheError):
    """A store location that cannot be used.

    >>> import jkv
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
    >>> tiers = jkv.DeviceTier(pages=16), jkv.StoreTier("/dev/null/store")
    >>> jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=tiers, model="m"))
    Traceback (most recent call last):
    jkv.errors.StoreError: StoreTier.location='/dev/null/store' cannot be used: ...
    """
