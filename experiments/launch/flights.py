"""What the ranks of a job did last, from the files of their flight recorders: what ends a rank does not take them."""

from bench.case import Case
from experiments.launch.submission import JobFolder, JobRecord
from experiments.launch.work import Task


def last_actions(folder: JobFolder, element: int, task: Task, before: int | None = None) -> tuple[str, ...]:
    """What every rank did last in a task, a line each; nothing for a simulation, or where no rank began.

    Args:
        before: a start of the job, where those earlier than it are meant; the last one where not given.
    """
    starts = [restart for restart in folder.restarts(element) if before is None or restart < before]
    record = JobRecord.read(folder.path)
    if not starts or record is None or task.settings.backend != "run":
        return ()
    from bench.execute.flight import last_actions, last_noted_s, read_slots
    from bench.lower import lower
    from bench.system import plan_of

    assert isinstance(task.spec, Case), "a run has a layout"
    files = [folder.recorder(element, starts[-1], rank) for rank in range(record.shape.num_ranks)]
    alone = task.spec.system == "reference"  # it runs no program
    program = None if alone else lower(plan_of(task.spec), task.spec.model)
    flights = [read_slots(path) for path in files]
    return last_actions(flights, program, folder.last_sign(element) if before is None else last_noted_s(flights))
