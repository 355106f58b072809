"""Every error that jkv raises on purpose."""


class CacheError(Exception):
    """Base class of all jkv errors."""


class ConfigError(CacheError, ValueError):
    """A value that can never work: a declaration, a token id, an unknown layer, a wrong shape."""


class OutOfPagesError(CacheError):
    """A request that would not fit an empty cache; the message names what was asked and what there is."""


class SequenceStateError(CacheError):
    """An operation that the sequence's (or the state's) present condition does not allow."""


class IntegrityError(CacheError):
    """An internal invariant does not hold: a bug in jkv, or a state that was tampered with."""


class StoreError(CacheError):
    """A store location that cannot be used."""
