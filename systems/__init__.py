"""Training systems, each a pure function from a case to a plan, by name."""

from bench.system import System
from systems.baselines.comet import Comet
from systems.baselines.dualpipe import DualPipe
from systems.baselines.dualpipe_v import DualPipeV
from systems.baselines.ep import ExpertParallel
from systems.baselines.megatron import Megatron
from systems.baselines.megatron_overlap import MegatronOverlap
from systems.baselines.tutel import Tutel
from systems.disagmoe.system import DisagMoE
from systems.reference import Reference

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Reference(),
        ExpertParallel(),
        Megatron(),
        MegatronOverlap(),
        DualPipe(),
        DualPipeV(),
        Tutel(),
        Comet(),
        DisagMoE(),
    )
}
