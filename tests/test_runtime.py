"""Programs executed by real ranks: the loss and every gradient are the reference's, whatever the plan."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import make_case  # noqa: E402
from ranks import Run, SharedState, run_step, step_on_rank  # noqa: E402

from bench.action import Action, Kind, Pass  # noqa: E402
from bench.case import Case  # noqa: E402
from bench.edges import Rows, ends  # noqa: E402
from bench.errors import BadInput  # noqa: E402
from bench.execute.exchange import Deal, route  # noqa: E402
from bench.execute.pool import RankError, RankPool  # noqa: E402
from bench.execute.record import merge_timeline, traffic  # noqa: E402
from bench.execute.streams import Streams  # noqa: E402
from bench.execute.transport import Channel  # noqa: E402
from bench.execute.values import Stopped, Values  # noqa: E402
from bench.program import Op  # noqa: E402

CPU = torch.device("cpu")
