"""Autograd cut into islands: one part of the model, with passes F, B and W as separate calls.

A pipeline schedule decides when every pass runs, so no graph may reach from one part into the next. An
`Island` detaches what comes in and what goes out, keeps the graph in between under a key (a micro-batch), and
runs its backward when told to, with gradients that came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bench.execute.host_activations import Away, HostLink
from bench.execute.wgrad import WeightGradStore


class IslandError(RuntimeError):
    """A pass was asked for out of order: a key used twice, or never seen."""


class _Flight:
    """What is kept for one key between its passes."""

    def __init__(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.inputs = inputs
        self.options = options
        self.outputs: tuple[Any, ...] | None = None  # attached tensors or edges; None where forward will run again
        self.store = WeightGradStore()
        self.away: Away | None = None
        self.backward_done = False


class Island:
    """Passes of one part, for any number of keys in flight, in any order.

    Args:
        part: a module whose tensor arguments are positional and whose output is a tensor or a tuple of
            tensors and Nones. With ``replay(outputs) -> dict`` it names keyword arguments that make a second
            forward take the same discrete decisions as the first. ``defers_weight_gradients`` False says that
            there is no pass W: the key is free after B.
        link: with it, what F keeps for B is with the host in between, see `bench.execute.host_activations`.
    """

    def __init__(self, part: nn.Module, link: HostLink | None = None) -> None:
        self.part, self.link = part, link
        self._flights: dict[Hashable, _Flight] = {}

    def __repr__(self) -> str:
        return f"Island({type(self.part).__name__}, in flight: {list(self._flights)})"

    def forward(self, key: Hashable, *inputs: Any, recompute: bool = False, **options: Any) -> Any:
        """Pass F. Keeps the graph, or with ``recompute`` the inputs only.

        Returns what the part returns, detached. Inputs must stay unchanged until the key is finished.
        """
        if key in self._flights:
            raise IslandError(f"{self!r}: forward of key {key!r} while that key is in flight")
        flight = _Flight(tuple(_detached(value) for value in inputs), dict(options))
        if recompute:
            with torch.no_grad():
                outputs = self.part(*flight.inputs, **options)
            replay = getattr(self.part, "replay", None)
            flight.options |= replay(outputs) if replay is not None else {}
        elif self.link is not None:
            outputs = self._run_away(flight, self.link)
        else:
            outputs = self._run(flight)
        self._flights[key] = flight
        return _map_tensors(outputs, Tensor.detach)

    def fetch(self, key: Hashable) -> None:
        """Says that the key's backward comes next: what is with the host begins to come back."""
        flight = self._flights.get(key)
        if flight is not None and flight.away is not None:
            flight.away.fetch()

    def backward(self, key: Hashable, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pass B: input gradients only.

        Args:
            output_grads: dL/d(output) in the order of the outputs; None, or left out at the end, is zero. An
                output that is a scalar is a term of the loss: its gradient is 1 where none is given.
        Returns:
            one entry an input: its gradient, or None where it is not floating point or has no influence.
        """
        flight = self._flight(key, "backward")
        if flight.backward_done:
            raise IslandError(f"{self!r}: second backward of key {key!r}")
        if flight.outputs is None:
            self._run(flight)
        assert flight.outputs is not None
        if len(output_grads) > len(flight.outputs):
            raise IslandError(f"{self!r}: {len(output_grads)} gradients for {len(flight.outputs)} outputs")
        roots, grads = [], []
        for number, output in enumerate(flight.outputs):
            grad = output_grads[number] if number < len(output_grads) else None
            if isinstance(output, GradientEdge):
                wanted = grad is not None
            else:
                wanted = output is not None and output.requires_grad and (grad is not None or output.dim() == 0)
            if not wanted:
                continue
            roots.append(output)
            grads.append(torch.ones_like(output) if grad is None else grad)
        self.fetch(key)
        if roots:
            torch.autograd.backward(roots, grads)
        if flight.away is None:
            input_grads = tuple(value.grad if isinstance(value, Tensor) else None for value in flight.inputs)
        else:
            input_grads = tuple(flight.away.input_grads.get(number) for number in range(len(flight.inputs)))
        flight.inputs, flight.outputs, flight.options, flight.away = (), None, {}, None
        flight.backward_done = True
        if not getattr(self.part, "defers_weight_gradients", True):
            del self._flights[key]
        return input_grads

    def weight_gradient(self, key: Hashable) -> None:
        """Pass W: every deferred weight gradient of the key, into ``main_grad``; frees the key."""
        flight = self._flight(key, "weight_gradient")
        if not flight.backward_done:
            raise IslandError(f"{self!r}: weight_gradient of key {key!r} before its backward")
        flight.store.run()
        del self._flights[key]

    def discard(self) -> None:
        """Frees every key, whatever its passes: after an error, or where only the forward was wanted."""
        self._flights.clear()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys in flight."""
        return tuple(self._flights)

    @property
    def live_bytes(self) -> int:
        """Bytes of activations and gradients kept on the device for the keys in flight; parameters are not counted.

        Walks the graphs, so this is for tests and memory reports and not for every action. Storage shared by
        several tensors counts once.
        """
        own = {param.untyped_storage().data_ptr() for param in self.part.parameters()}
        sizes: dict[int, int] = {}
        for flight in self._flights.values():
            for tensor in _kept(flight):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def _flight(self, key: Hashable, what: str) -> _Flight:
        if key not in self._flights:
            raise IslandError(f"{self!r}: {what} of key {key!r}, which is not in flight")
        return self._flights[key]

    @property
    def host_bytes(self) -> int:
        """Bytes that are with the host for the keys in flight."""
        return sum(flight.away.num_bytes for flight in self._flights.values() if flight.away is not None)

    def _run_away(self, flight: _Flight, link: HostLink) -> Any:
        flight.away = Away(link, self.part.parameters())
        inputs, flight.inputs = flight.inputs, (None,) * len(flight.inputs)
        with torch.enable_grad(), flight.store.collect(), flight.away.keeping():
            outputs = self.part(*flight.away.enter(inputs), **flight.options)
        together = tuple(outputs) if isinstance(outputs, tuple) else (outputs,)
        flight.outputs = tuple(_edge(output) for output in together)
        return outputs

    def _run(self, flight: _Flight) -> Any:
        with torch.enable_grad(), flight.store.collect():
            outputs = self.part(*flight.inputs, **flight.options)
        flight.outputs = tuple(outputs) if isinstance(outputs, tuple) else (outputs,)
        return outputs


def _edge(output: Tensor | None) -> Tensor | GradientEdge | None:
    """An output's place in the graph, without its memory; a term of the loss as it is."""
    if output is None or output.dim() == 0 or not output.requires_grad:
        return output if output is not None and output.dim() == 0 else None
    return get_gradient_edge(output)


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


def _map_tensors(outputs: Any, function: Any) -> Any:
    if isinstance(outputs, Tensor):
        return function(outputs)
    if not isinstance(outputs, tuple):
        return outputs
    values = [_map_tensors(value, function) for value in outputs]
    return type(outputs)(*values) if hasattr(outputs, "_fields") else tuple(values)


def _kept(flight: _Flight) -> Iterator[Tensor]:
    yield from (value for value in (*flight.inputs, *flight.options.values()) if isinstance(value, Tensor))
    yield from flight.store.tensors()
    if flight.away is not None:
        yield from flight.away.here
        return
    todo: list[Any] = []
    for output in flight.outputs or ():
        if output is not None:
            yield output
            todo.append(output.grad_fn)
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for value in [*saved, *getattr(node, "saved_tensors", ())]:
            yield from (one for one in _flat(value) if isinstance(one, Tensor))


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
