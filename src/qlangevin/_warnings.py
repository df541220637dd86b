"""The class of this library's warnings, and warnings that are given once."""

from __future__ import annotations

import warnings

__all__ = ["QLangevinWarning", "warn", "warn_once"]


class QLangevinWarning(UserWarning):
    """Something doubtful that qlangevin noticed; what cannot be done as asked raises instead.

    Turn warnings into errors with ``warnings.simplefilter("error", qlangevin.QLangevinWarning)``.
    """


def warn(message: str, stacklevel: int = 2) -> None:
    """Warn the caller of the function that calls this; ``stacklevel`` counts from that function, as in `warnings.warn`."""
    warnings.warn(message, QLangevinWarning, stacklevel=stacklevel + 1)


def warn_once(given: set[str], topic: str, message: str, stacklevel: int = 2) -> None:
    """Warn unless the topic is among those given already. The owner of the set decides for how long once is."""
    if topic not in given:
        given.add(topic)
        warn(message, stacklevel + 1)
