"""What was found before and may be asked for again, up to a total weight: the least recently used goes first."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Kept(Generic[Found]):
    """Values by key. `most` bounds the sum of their weights; what weighs more by itself is not kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._weighed: dict[Hashable, tuple[Found, int]] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._weighed)

    def get(self, key: Hashable) -> Found | None:
        """None where it is not kept; what is asked for stays longest."""
        known = self._weighed.pop(key, None)
        if known is None:
            return None
        self._weighed[key] = known
        return known[0]

    def put(self, key: Hashable, found: Found, weight: int) -> None:
        if weight > self.most:
            return
        old = self._weighed.pop(key, None)
        self._total += weight - (old[1] if old else 0)
        self._weighed[key] = found, weight
        while self._total > self.most:
            first = next(iter(self._weighed))
            self._total -= self._weighed.pop(first)[1]
