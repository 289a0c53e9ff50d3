"""What can go wrong with ranks, as exceptions."""


class RankError(RuntimeError):
    """A rank failed and its own exception cannot travel, or it left without one (exit, signal, out of memory)."""


class DeadlockError(RankError):
    """Every rank waits or has finished, and no message is under way that could release one of them."""


class RankTimeout(RankError):
    """The ranks ran longer than they were allowed to; the message holds the stack of each."""


class CargoError(ValueError):
    """The function would take something of the notebook along that cannot or should not travel to the ranks."""


class NestedRanksError(RuntimeError):
    """Ranks were asked to start ranks."""


class ServerError(RuntimeError):
    """The process that starts ranks cannot be started or has died twice in a row."""
