"""The actions of one micro-batch in each direction, numbered: what every action of a plan is a copy of."""

import numpy as np
from numpy.typing import NDArray

from bench.action import END_OF_STEP, TRANSFERS, Codes, Kind, Pass, unpack
from bench.graph import Graph, ends_of
from bench.placement import Placement

Index = NDArray[np.int64]
NOWHERE = -1
_ENDS = np.array(sorted(END_OF_STEP), dtype=np.int64)  # as codes: sync and update have no other part


class Templates:
    """Sorted `codes` with what is looked up by number: `kind`, `pass_`, whether it `moves` (is a transfer), and the
    indices of the groups where it stands (`source`) and where a transfer arrives (`target`), else `NOWHERE`.

    Args:
        chunks: of a micro-batch.
    """

    def __init__(self, graph: Graph, placement: Placement, chunks: int) -> None:
        self.codes = np.unique(np.concatenate([graph.actions, _ENDS]))
        self._shape = placement.num_layers + 1, chunks, placement.directions
        columns = unpack(self.codes)
        self.kind, self.pass_ = columns.kind, columns.pass_
        self.ends_step = np.isin(self.kind, _ENDS)
        self.moves = np.isin(self.kind, [int(kind) for kind in TRANSFERS])
        self.source, self.target = ends_of(placement, self.codes)
        self.source[self.ends_step] = NOWHERE
        layers, chunks, directions = self._shape
        self._number = np.full(layers * chunks * directions * len(Pass) * len(Kind), NOWHERE, dtype=np.int32)
        self._number[self._places(*columns)] = np.arange(len(self.codes))

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, codes: Codes) -> Index:
        """Of templates, their numbers."""
        return np.searchsorted(self.codes, codes)

    def of(self, codes: Codes) -> tuple[NDArray[np.int32], Index]:
        """Of actions of any micro-batch: the template of each, `NOWHERE` where there is none, and the number of its
        micro-batch in its direction."""
        kind, pass_, layer, microbatch, chunk = unpack(codes)
        layers, chunks, directions = self._shape
        outside = (kind >= len(Kind)) | (layer >= layers) | (chunk >= chunks)
        strange = bool(outside.any())
        if strange:
            kind, layer, chunk = (np.where(outside, 0, column) for column in (kind, layer, chunk))
        direction, turn = (0, microbatch) if directions == 1 else (microbatch % 2, microbatch // 2)
        number = self._number[self._places(kind, pass_, layer, direction, chunk)]
        if strange:
            number[outside] = NOWHERE
        return number, turn

    def _places(self, kind: Codes, pass_: Codes, layer: Codes, direction: Codes | int, chunk: Codes) -> Index:
        """In the table of all parts of an action, each from 0 to its own limit."""
        layers, chunks, directions = self._shape
        place = chunk + direction * chunks if directions > 1 else chunk
        place = layer + place * layers if chunks * directions > 1 else layer
        return (place * len(Pass) + pass_) * len(Kind) + kind
