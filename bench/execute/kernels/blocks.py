"""How many elements of a row a program has."""

# Triton is not installed everywhere.
# mypy: ignore-errors
import triton

MAX_BLOCK = 1024


def block(width: int) -> int:
    """The power of two that holds a row, up to `MAX_BLOCK`."""
    return min(MAX_BLOCK, int(triton.next_power_of_2(width)))
