"""What kind of fault an error is: out of memory, too long a wait, or something else. No torch."""

from __future__ import annotations

from collections.abc import Iterator

OUT_OF_MEMORY, HUNG, DIED = "oom", "hung", "died"
# torch says so in errors of many classes: its CUDA and CPU allocators, cuBLAS, NCCL.
_MEMORY_WORDS = (
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)


def cause_of(error: BaseException) -> str:
    """``oom`` or ``hung`` where an error is that, or comes of it; otherwise the name of its class."""
    found = list(chain(error))
    if any(_is_out_of_memory(one) for one in found):
        return OUT_OF_MEMORY
    if any(isinstance(one, TimeoutError) for one in found):
        return HUNG
    return type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_WORDS)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came of."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or one.__context__
