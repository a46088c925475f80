"""What `moebench run --resume` takes from a checkpoint, and what from its other options."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typer import Context

from bench.cli import executed, options

if TYPE_CHECKING:
    from bench.case import Case
    from bench.execute.checkpoint import Saving
    from bench.execute.manifest import Saved


class Resumed(NamedTuple):
    """A run that goes on: options that were not given are as the checkpoint has them."""

    case: "Case"
    device: str
    data: str
    steps: int
    saving: "Saving | None"


def resumed(ctx: Context, folder: Path) -> Resumed:
    """The run that a verb's options and a checkpoint describe. Raises BadInput."""
    from bench.execute.manifest import find_saved

    saved = find_saved(folder)
    given = {
        name: value
        for name, value in ctx.params.items()
        if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    manifest = saved.manifest
    device = given.get("device", "cpu" if manifest.case.cluster.gpu.name == "cpu" else "cuda")
    # A folder whose marker was followed is gone on with; a checkpoint that was named itself is only read.
    save = given.get("save", folder if saved.folder != folder else None)
    return Resumed(
        case=_case(saved, given, device),
        device=device,
        data=given.get("data", manifest.data),
        steps=given.get("steps", manifest.steps),
        saving=saving_of(save, given.get("save_every", manifest.save_every)),
    )


def _case(saved: "Saved", given: dict[str, Any], device: str) -> "Case":
    from bench.case import CaseSpec, Workload
    from bench.execute.support import require_supported
    from bench.fits import require_fits_here
    from bench.models import get_model
    from bench.system import get_system

    ours = saved.manifest.case
    system = get_system(given.get("system", ours.system))
    model = get_model(given["model"]) if "model" in given else ours.model
    workload = {name: given.get(name, value) for name, value in ours.workload.model_dump().items()}
    ranks, cluster = given.get("ranks", ours.cluster.num_gpus), ours.cluster
    if given.keys() & {"ranks", "device", "cluster"}:
        on, transport = options.device_of(device), given.get("transport", "auto")
        cluster = executed.local_cluster(ranks, on, given.get("cluster"), transport)
    layout = options.layout_of(system.name, given.get("layout"))
    if layout is None:
        same = system.name == ours.system and cluster.num_gpus == ours.cluster.num_gpus
        layout = ours.layout if same else executed.layout_on(system, ranks, model.num_experts)
    spec = CaseSpec.make(model=model, cluster=cluster, workload=Workload.make(**workload), system=system.name)
    case = spec.with_layout(layout)
    require_supported(case.model)
    num_ranks = case.cluster.num_gpus
    require_fits_here(case, with_reference=False, ranks_per_gpu=executed.ranks_per_gpu(num_ranks, device))
    return case


def saving_of(folder: Path | None, every: int | None) -> "Saving | None":
    """Raises BadInput for a number without a folder, or a folder that cannot be one."""
    from bench.cli.output import require_folder
    from bench.errors import BadInput
    from bench.execute.checkpoint import Saving

    if folder is None:
        if every is not None:
            raise BadInput("save-every", every, "a number beside --save DIR")
        return None
    require_folder("save", folder)
    return Saving(folder, every)
